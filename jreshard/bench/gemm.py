"""Matrix products on streams of their own, which JAX's work neither waits for nor holds up.

Names and numbers are those of cublas_v2.h.
"""

import contextlib
import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jreshard.bench.gpu import Gpu, pointer

_SIDE = 8192  # 1.1e12 operations, some 1.5 ms of an H200
_COUNT = 100
_NONE = 0  # CUBLAS_OP_N
_BF16, _COMPUTE_FP32, _DEFAULT = 14, 68, -1  # CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
_MAPS = Path("/proc/self/maps")
_PACKAGES = {"nvidia.cu13": "libcublas.so.13", "nvidia.cublas": "libcublas.so.12"}


def open_cublas(device: Any) -> Any:
    """cuBLAS of this process, which JAX loads with its first matrix product, or of the package that JAX depends on.

    Raises:
        OSError: there is none.
    """
    ones = jax.device_put(jnp.ones((256, 256), jnp.bfloat16), device)
    jax.block_until_ready(ones @ ones)
    found = re.search(r"/\S*libcublas\.so\S*", _MAPS.read_text())
    return ctypes.CDLL(found[0] if found else _installed())


def _installed() -> str:
    with contextlib.suppress(ModuleNotFoundError):  # no packages of NVIDIA at all
        for package, soname in _PACKAGES.items():
            spec = importlib.util.find_spec(package)
            for folder in (spec.submodule_search_locations if spec else None) or []:
                if (path := Path(folder) / "lib" / soname).exists():
                    return str(path)
    return next(iter(_PACKAGES.values()))


class MatrixProducts:
    """A fixed number of products of two matrices, of bfloat16, on one GPU.

    Args:
        library: cuBLAS, or what stands in for it.
        gpu: where to run, on its stream.
        device: the same as JAX knows it.
    """

    def __init__(self, library: Any, gpu: Gpu, device: Any) -> None:
        self._library, self.gpu, self._handle = library, gpu, ctypes.c_void_p()
        # Random numbers: of zeros a GPU multiplies more in the same time.
        keys = jax.device_put(jax.random.split(jax.random.key(0), 3), device)
        self._matrices = [jax.random.normal(key, (_SIDE, _SIDE), jnp.bfloat16) for key in keys]
        jax.block_until_ready(self._matrices)
        with gpu.current():
            self._call("cublasCreate_v2", ctypes.byref(self._handle))
            self._call("cublasSetStream_v2", self._handle, gpu.stream)

    def launch(self) -> None:
        """Queues the products; `Gpu.elapsed` tells how long they took."""
        a, b, c = (ctypes.c_void_p(pointer(matrix)) for matrix in self._matrices)
        one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        self.gpu.start_clock()
        with self.gpu.current():
            for _ in range(_COUNT):
                self._call(
                    "cublasGemmEx", self._handle, _NONE, _NONE, _SIDE, _SIDE, _SIDE, one, a, _BF16, _SIDE,
                    b, _BF16, _SIDE, zero, c, _BF16, _SIDE, _COMPUTE_FP32, _DEFAULT,
                )  # fmt: skip
        self.gpu.stop_clock()

    def _call(self, name: str, *args: Any) -> None:
        if result := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} failed with {result}")
