"""Memory that a transfer takes beyond the source and the destination, which exist already.

JAX's allocator on a GPU keeps the highest use ever and cannot be told to forget it. So this is measured in a process
that has done nothing else than to make the source and the destination.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jreshard.bench.gpu import Gpu

_PERIOD = 0.0005  # seconds between two looks at what the driver has given away
_CALLS = 3


def limit(device: Any) -> int:
    """Bytes that arrays on the device may take in all."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def extra(call: Callable[[], Any], devices: Sequence[Any], gpus: Mapping[int, Gpu]) -> dict[str, int]:
    """Bytes by which `call`, done a few times, raises the use of memory at most, on the device where that is most.

    Args:
        call: makes no new arrays that outlive it.
        devices: those of this process.
        gpus: the same by the driver; none on CPU devices.

    Returns:
        On GPUs `extra_bytes`, of JAX's allocator; `unseen_bytes`, what had been in use before besides what was in use
        when it began, so that as much more would not have shown; and, where JAX's own pool does not grow,
        `outside_jax_bytes`, of the driver: communicators, staging, and what CUDA itself loads. On CPU devices
        `extra_bytes` of the process's resident memory, once the programs are compiled.
    """
    if gpus:
        return _extra_on_gpus(call, devices, list(gpus.values()))
    jax.block_until_ready(call())
    return {"extra_bytes": _extra_on_host(call)}


def _extra_on_gpus(call: Callable[[], Any], devices: Sequence[Any], gpus: Sequence[Gpu]) -> dict[str, int]:
    before = [device.memory_stats() for device in devices]
    with _Outside(gpus) as outside:
        for _ in range(_CALLS):
            jax.block_until_ready(call())
    peaks = [device.memory_stats()["peak_bytes_in_use"] for device in devices]
    found = {
        "extra_bytes": max(peak - stats["bytes_in_use"] for stats, peak in zip(before, peaks, strict=True)),
        "unseen_bytes": max(stats["peak_bytes_in_use"] - stats["bytes_in_use"] for stats in before),
    }
    return found | ({} if outside.most is None else {"outside_jax_bytes": outside.most})


class _Outside:
    """The most that the driver gives away meanwhile, as a thread sees it that looks all the time.

    Attributes:
        most: bytes, on the GPU where they are most; `None` where JAX's own use of the driver's memory varies.
    """

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._gpus = list(gpus)
        self.most = 0 if _pool_is_fixed() else None
        self._before = [gpu.used_bytes() for gpu in self._gpus]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Outside":
        if self.most is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.most is not None:
            self._thread.join()
            self._look()

    def _watch(self) -> None:
        while not self._stop.wait(_PERIOD):
            self._look()

    def _look(self) -> None:
        used = max(gpu.used_bytes() - before for gpu, before in zip(self._gpus, self._before, strict=True))
        self.most = max(self.most or 0, used)


def _pool_is_fixed() -> bool:
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") in ("true", "1") and os.environ.get(
        "XLA_PYTHON_CLIENT_ALLOCATOR", "default"
    ) in ("default", "bfc", "vmm")


def _extra_on_host(call: Callable[[], Any]) -> int:
    with contextlib.suppress(OSError, AttributeError):  # not glibc: what was freed before may then serve unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    jax.block_until_ready(call())
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return max(0, peak - before)
