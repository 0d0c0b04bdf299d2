"""What is said of memory is what was taken."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from fake_gpu import FakeDriver

from jreshard._driver import Driver
from jreshard.bench import memory
from jreshard.bench.gpu import Gpu

MIB = 1 << 20


def test_resident_memory_of_the_process() -> None:
    devices = jax.devices("cpu")[:2]
    assert memory.extra(lambda: np.ones(200 * MIB, np.uint8).sum(), devices) >= 200 * MIB
    assert memory.extra(lambda: None, devices) < 50 * MIB


class FakeGpu:
    """A device whose allocator has once handed out 1000 bytes and now hands out 300."""

    platform = "gpu"

    def __init__(self) -> None:
        self.in_use, self.peak = 300, 1000

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "bytes_limit": 5000}

    def take(self, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)


@pytest.mark.parametrize(("taken", "extra"), [(0, 0), (50, 50), (2000, 2000)])
def test_the_peak_of_a_gpus_allocator(monkeypatch: pytest.MonkeyPatch, taken: int, extra: int) -> None:
    gpus = [FakeGpu(), FakeGpu()]

    def zeros(shape: tuple[int], dtype: Any, *, device: FakeGpu) -> jax.Array:
        device.take(shape[0])
        return jax.numpy.ones(())

    monkeypatch.setattr(memory, "jnp", SimpleNamespace(zeros=zeros, uint8=np.uint8))
    assert memory.limit(gpus[0]) == 5000
    assert memory.extra(lambda: gpus[1].take(taken), gpus) == extra


def test_memory_outside_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(Driver(FakeDriver()), 0)]
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    assert memory.outside_jax(gpus) == [70 << 30]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert memory.outside_jax(gpus) is None
