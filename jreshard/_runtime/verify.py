"""Checksums that depend on position, to tell moved weights from weights that only look moved."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard._compat import own_tracing_context
from jreshard._layout import layout_of
from jreshard._wire import bits_of

_LANES = 2  # independent 32-bit sums


class VerificationError(RuntimeError):
    """What arrived is not what was sent."""


def checksums(
    arrays: Sequence[Array], shardings: Sequence[NamedSharding], dtypes: Sequence[Any]
) -> dict[int, np.ndarray]:
    """One sum for each array on each device of this process: `uint32[arrays, 2]` by the device's rank in its mesh.

    Every word of the array is mixed with its global position (multiplication, xor and shift as in the finaliser of
    MurmurHash3, Appleby 2011) and the mixed words are summed modulo 2³². Sums of disjoint parts add up, whatever the
    layout, and an exchange of two elements changes them.

    Args:
        arrays: arrays on one mesh.
        shardings: how each is laid out.
        dtypes: what each holds; an array of bytes may hold a type of less than a byte.
    """
    mesh = Mesh(shardings[0].mesh.devices, shardings[0].mesh.axis_names)
    program = _program(mesh, tuple(s.spec for s in shardings), tuple(dtypes))
    with own_tracing_context(), jax.transfer_guard("allow"):
        sums = program(*arrays)
        return {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in sums.addressable_shards}


@lru_cache(maxsize=64)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...], dtypes: tuple[Any, ...]) -> Any:
    def body(*shards: Array) -> Array:
        sums = [_shard_sums(x, spec, dtype) for x, spec, dtype in zip(shards, specs, dtypes, strict=True)]
        return jnp.stack(sums)[None]

    every_axis = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=every_axis, check_vma=False))


def compare(paths: Sequence[str], sent: Sequence[Any], received: Sequence[Any]) -> None:
    """Raises `VerificationError` naming every leaf whose sums differ, or whose replicas do.

    Args:
        paths: the leaves' names.
        sent: (sums, box of each rank) of each leaf on the source.
        received: the same on the destination.
    """
    wrong = []
    for path, before, after in zip(paths, sent, received, strict=True):
        totals = []
        for side, (sums, boxes) in (("source", before), ("destination", after)):
            _, first, inverse = np.unique(boxes, return_index=True, return_inverse=True)
            if (sums != sums[first][inverse]).any():
                ranks = np.nonzero((sums != sums[first][inverse]).any(axis=1))[0].tolist()
                wrong.append(f"  {path}: {side} replicas differ, at positions {ranks} of the mesh")
            totals.append(sums[first].astype(np.uint64).sum(axis=0) % 2**32)
        if (totals[0] != totals[1]).any():
            wrong.append(f"  {path}: checksum {_hex(totals[1])} arrived, {_hex(totals[0])} was sent")
    if wrong:
        raise VerificationError("\n".join(["jreshard: the destination differs from the source", *wrong]))


def boxes_of(shape: tuple[int, ...], sharding: NamedSharding) -> np.ndarray:
    """Which part of the array each rank of the mesh holds, as one number; equal for replicas."""
    return layout_of(shape, sharding.mesh, sharding.spec).box_of


def _shard_sums(x: Array, spec: PartitionSpec, dtype: Any) -> Array:
    """`uint32[2]` of one device's shard."""
    ndim = x.ndim
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x, dtype = jax.random.key_data(x), jnp.uint32
    words = _words(x, np.dtype(dtype))
    if words.size == 0:
        return jnp.zeros(_LANES, jnp.uint32)
    position = jnp.zeros((), jnp.uint32)
    for dim in range(words.ndim):
        axes = spec[dim] if dim < min(len(spec), ndim) else None
        first = lax.axis_index(axes) * words.shape[dim] if axes else 0
        where = lax.broadcasted_iota(jnp.uint32, words.shape, dim) + jnp.uint32(first)
        position = _mix(position + where * jnp.uint32(0x9E3779B1) + jnp.uint32(dim + 1))
    lanes = [_mix(words * jnp.uint32(0x85EBCA77) + _mix(position + jnp.uint32(lane))) for lane in range(_LANES)]
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def _words(x: Array, dtype: np.dtype[Any]) -> Array:
    """The bits of `x` as `uint32`, with a trailing dim of two where an element has 8 bytes."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1), np.dtype(x.real.dtype))
    if dtype == np.bool_:
        return x.astype(jnp.uint32)
    bits = bits_of(dtype)
    if x.dtype != dtype:
        low_bits: Array = x.astype(jnp.uint32) & jnp.uint32((1 << bits) - 1)
        return low_bits
    if bits > 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _mix(h: Array) -> Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _hex(lanes: np.ndarray) -> str:
    return "".join(f"{int(lane):08x}" for lane in lanes)
