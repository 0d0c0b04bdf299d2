"""Memory that a transfer takes beyond the source and the destination, which exist already."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jreshard.bench.gpu import Gpu

_BALLAST_BYTES = 1 << 30  # in pieces, which find room between others


def limit(device: Any) -> int:
    """Bytes that arrays on the device may take in all."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def extra(call: Callable[[], Any], devices: Iterable[Any]) -> int:
    """Bytes by which `call` raises the use of memory at most, on the device where that is most.

    On GPUs what JAX's allocator hands out counts, on CPU devices the process's resident memory. `call` makes no new
    arrays that outlive it.
    """
    gpus = [device for device in devices if device.platform == "gpu"]
    return max(_extra_on_gpus(call, gpus)) if gpus else _extra_on_host(call)


def _extra_on_gpus(call: Callable[[], Any], devices: Sequence[Any]) -> list[int]:
    # The allocator keeps the highest use ever. Memory up to that is filled, so that whatever is added raises it.
    ballast = [_ballast(device) for device in devices]
    before = [_stats(device)["bytes_in_use"] for device in devices]
    jax.block_until_ready(call())
    peaks = [_stats(device)["peak_bytes_in_use"] for device in devices]
    del ballast
    return [peak - used for used, peak in zip(before, peaks, strict=True)]


def _ballast(device: Any) -> list[jax.Array]:
    stats = _stats(device)
    gap = stats["peak_bytes_in_use"] - stats["bytes_in_use"]
    sizes = [_BALLAST_BYTES] * (gap // _BALLAST_BYTES) + [gap % _BALLAST_BYTES]
    ballast = [jnp.zeros((size,), jnp.uint8, device=device) for size in sizes]
    jax.block_until_ready(ballast)
    return ballast


def _stats(device: Any) -> dict[str, int]:
    stats: dict[str, int] = device.memory_stats()
    return stats


def _extra_on_host(call: Callable[[], Any]) -> int:
    with contextlib.suppress(OSError, AttributeError):  # not glibc: what was freed before may then serve unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    jax.block_until_ready(call())
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return max(0, peak - before)


def outside_jax(gpus: Iterable[Gpu]) -> list[int] | None:
    """Bytes of each GPU in use beside JAX's arrays, plus a constant; `None` where JAX's own use of it varies."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") not in ("true", "1"):
        return None
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") not in ("default", "bfc", "vmm"):
        return None
    used = []
    for gpu in gpus:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with gpu.current():
            gpu.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        used.append(total.value - free.value)
    return used
