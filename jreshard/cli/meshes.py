"""The devices that a command runs on."""

import contextlib
import math

import jax
import numpy as np
from jax.sharding import Mesh

from jreshard.cli.errors import UsageError

#: XLA numbers the CPU devices of a process below this bound; a device beyond it would belong to the next process.
MAX_CPU_DEVICES = 2048


def disjoint_meshes(src_axes: dict[str, int], dst_axes: dict[str, int]) -> tuple[Mesh, Mesh]:
    """Return a mesh with `src_axes` and one with `dst_axes` that share no device.

    The devices are JAX's default ones if there are enough of them, and simulated CPU devices otherwise, which only a
    process that has not used JAX yet can have made. The source takes the first devices, the destination the next.
    """
    src_count, dst_count = math.prod(src_axes.values()), math.prod(dst_axes.values())
    devices = _find_devices(src_count + dst_count)
    return _mesh(devices[:src_count], src_axes), _mesh(devices[src_count:], dst_axes)


def _find_devices(count: int) -> list[jax.Device]:
    if count > MAX_CPU_DEVICES:
        raise UsageError(f"{count} devices are needed, and a process can have at most {MAX_CPU_DEVICES}")
    # Must come before JAX starts, so before it is known whether there are accelerators; it touches CPU devices only.
    with contextlib.suppress(RuntimeError):  # JAX has started: make do with the devices that there are
        jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices()
        if len(devices) < count:
            devices = jax.devices("cpu")
    except (RuntimeError, AssertionError) as error:  # the latter, without a message, if JAX_PLATFORMS names no platform
        reason = " ".join(str(error).split()) or "no usable platform"
        raise UsageError(f"{count} devices are needed, and JAX cannot start them: {reason}") from error
    if len(devices) < count:
        raise UsageError(f"{count} devices are needed, and JAX has {len(devices)} ({devices[0].platform})")
    return devices[:count]


def _mesh(devices: list[jax.Device], axes: dict[str, int]) -> Mesh:
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
