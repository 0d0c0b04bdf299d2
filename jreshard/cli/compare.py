"""Byte-for-byte comparison of arrays on devices with the tensors that they should hold."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Sharding

from jreshard.cli.checkpoint import with_progress


def differences(
    arrays: Mapping[str, jax.Array], tensors: Mapping[str, np.ndarray], shardings: Mapping[str, Sharding]
) -> Iterator[str]:
    """Yield a line for each tensor and device where `arrays` does not hold the bytes of `tensors`.

    Which part of a tensor a device must hold is read from `shardings`, not from the arrays, and all replicas count.
    """
    for name, tensor in with_progress(tensors, "comparing"):
        shards = {shard.device: shard.data for shard in arrays[name].addressable_shards}
        for device, index in shardings[name].devices_indices_map(tensor.shape).items():
            fault = _fault(shards.get(device), tensor[index])
            if fault:
                yield f"{name} on {device}: {fault}"


def _fault(shard: jax.Array | None, expected: np.ndarray) -> str | None:
    """Say in what `shard` is not `expected`; values are not compared, for NaN and -0.0 count too."""
    if shard is None:
        return "no shard there"
    if (shard.dtype, shard.shape) != (expected.dtype, expected.shape):
        return f"{shard.dtype}{list(shard.shape)}, expected {expected.dtype}{list(expected.shape)}"
    (wrong,) = np.nonzero(_bytes(np.asarray(shard)) != _bytes(expected))
    return f"{wrong.size:,} of {expected.nbytes:,} bytes differ" if wrong.size else None


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
