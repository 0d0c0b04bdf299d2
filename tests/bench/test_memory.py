"""What is said of memory is what was taken."""

from typing import Any

import jax
import numpy as np
import pytest
from fake_gpu import FakeDriver, put

from jreshard._runtime.driver import Driver
from jreshard.bench import memory
from jreshard.bench.gpu import Gpu

MIB = 1 << 20


def test_resident_memory_of_the_process() -> None:
    devices = jax.devices("cpu")[:2]
    assert memory.extra(lambda: np.ones(200 * MIB, np.uint8).sum(), devices, {})["extra_bytes"] >= 195 * MIB
    assert memory.extra(lambda: None, devices, {})["extra_bytes"] < 50 * MIB


class FakeGpu:
    """A device whose allocator has once handed out 320 bytes and now hands out 300."""

    platform = "gpu"

    def __init__(self) -> None:
        self.in_use, self.peak = 300, 320

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "bytes_limit": 5000}

    def take_for_a_while(self, size: int) -> None:
        self.peak = max(self.peak, self.in_use + size)


class FilledDriver(FakeDriver):
    """Others take memory of the GPU."""

    taken = 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        put(free, (30 << 30) - self.taken)
        return put(total, 100 << 30)


@pytest.mark.parametrize(("taken", "extra"), [(0, 20), (50, 50), (2000, 2000)])
def test_the_peak_of_a_gpus_allocator(monkeypatch: pytest.MonkeyPatch, taken: int, extra: int) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    devices, driver = [FakeGpu(), FakeGpu()], FilledDriver()

    def call() -> None:
        devices[1].take_for_a_while(taken)
        driver.taken = 5 * MIB

    found = memory.extra(call, devices, {0: Gpu(Driver(driver), 0)})
    assert found == {"extra_bytes": extra, "unseen_bytes": 20, "outside_jax_bytes": 5 * MIB}
    assert memory.limit(devices[0]) == 5000


def test_where_jaxs_pool_grows_the_drivers_memory_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpu = Gpu(Driver(FakeDriver()), 0)
    assert gpu.used_bytes() == 70 << 30
    assert "outside_jax_bytes" not in memory.extra(lambda: None, [FakeGpu()], {0: gpu})
