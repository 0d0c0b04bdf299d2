"""The copy engine between two GPUs, driven by nothing but the driver: what no transfer can beat."""

import ctypes
from collections.abc import Sequence

from jax import Array

from jreshard.bench.gpu import Gpu, pointer


def copy(ways: Sequence[tuple[Gpu, Array, Array]], timeout: float) -> float:
    """Copies whole arrays, all ways at once, and returns the seconds of the slowest.

    Args:
        ways: the GPU that copies, the array that it writes, and the one that it reads.
        timeout: seconds to wait.
    """
    for gpu, dst, src in ways:
        gpu.start_clock()
        with gpu.current():
            to, from_ = ctypes.c_uint64(pointer(dst)), ctypes.c_uint64(pointer(src))
            gpu.driver.call("cuMemcpyAsync", to, from_, ctypes.c_size_t(src.nbytes), gpu.stream)
        gpu.stop_clock()
    return max(gpu.elapsed(timeout) for gpu, _, _ in ways)
