"""The copy engine, send/recv and matrix products, with stand-ins for the libraries that they call."""

import io
import time
from typing import Any

import jax
import pytest
from fake_gpu import FakeCublas, FakeDriver, FakeNccl

from jreshard._runtime.driver import Driver
from jreshard._runtime.nccl import Nccl
from jreshard.bench import ceilings, context, gemm, slowdown
from jreshard.bench.context import Context
from jreshard.bench.gpu import Gpu, within
from jreshard.bench.peers import Peers

SCALE, ROUNDS = 1e-5, 3
GPU_CEILINGS = [ceilings.COPY_ENGINE, ceilings.BOTH_WAYS, ceilings.SEND_RECV]


def make_context(driver: FakeDriver, transports: tuple[str, ...] = (), timeout: float = 5, count: int = 2) -> Context:
    """CPU devices, whose memory the stand-ins take for that of as many GPUs."""
    gpus = {rank: Gpu(Driver(driver), rank) for rank in range(count)}
    peers = Peers(1, io.StringIO(), io.StringIO())
    return Context(jax.devices("cpu")[:count], gpus, peers, ROUNDS, transports, timeout)


def use_nccl(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr(context.nccl, "find", lambda: Nccl("libnccl.so.2", (2, 28, 9), True))
    monkeypatch.setattr(context, "open_nccl", lambda path: library)


def measure(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, nccl: FakeNccl, timeout: float = 5) -> dict[str, Any]:
    monkeypatch.setattr(ceilings, "names", lambda platform, processes, devices: GPU_CEILINGS)
    use_nccl(monkeypatch, nccl)
    return ceilings.run(make_context(driver, timeout=timeout), "ceilings", SCALE, [])["contenders"]


def test_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    found = measure(monkeypatch, driver, FakeNccl())
    assert list(found) == GPU_CEILINGS
    for name in GPU_CEILINGS:
        assert len(found[name]["ready_s"]) == ROUNDS, found[name]
        assert all(seconds > 0 for sample in found[name]["ready_s"] for seconds in sample)
        assert all(len(sample) == len(ceilings.groups(name, 2)) for sample in found[name]["ready_s"])
    assert not any(driver.contexts.values()), "every context was given back"


def test_a_copy_that_loses_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, FakeDriver(loses=True), FakeNccl())
    for name in (ceilings.COPY_ENGINE, ceilings.BOTH_WAYS):
        assert found[name]["error"] == "RuntimeError: wrong bytes arrived"
    assert "ready_s" in found[ceilings.SEND_RECV]


def test_what_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = FakeNccl()
    found = measure(monkeypatch, FakeDriver(stuck=True), nccl, timeout=0.2)
    for name in GPU_CEILINGS:
        assert "TimeoutError: GPU" in found[name]["error"]
    assert nccl.aborted == [50, 51]


def test_a_communicator_that_is_never_there_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, FakeDriver(), FakeNccl(hangs=True), timeout=0.2)
    assert found[ceilings.SEND_RECV]["error"] == ("TimeoutError: making the NCCL communicator has not ended after 0 s")
    assert "ready_s" in found[ceilings.COPY_ENGINE]


def test_a_failure_of_nccl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, FakeDriver(), FakeNccl(fails="recv"))
    assert found[ceilings.SEND_RECV]["error"] == "RuntimeError: ncclRecv failed: unhandled system error (5)"


def test_between_which_devices() -> None:
    assert len(ceilings.groups(ceilings.COPY_ENGINE, 8)) == 56  # each pair by itself
    assert ceilings.groups(ceilings.AT_ONCE, 4) == [[(0, 2), (1, 3)]]
    assert ceilings.groups(ceilings.BOTH_WAYS, 2) == [[(0, 1), (1, 0)]]
    assert ceilings.groups(ceilings.BOTH_WAYS, 4) == [[(0, 1), (1, 2), (2, 3), (3, 0)]]
    assert ceilings.names("gpu", 1, 4) == [
        ceilings.COPY_ENGINE, ceilings.AT_ONCE, ceilings.BOTH_WAYS, ceilings.SEND_RECV
    ]  # fmt: skip
    assert ceilings.names("gpu", 4, 4) == [ceilings.SEND_RECV]


def test_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [ceilings.COPY_ENGINE, ceilings.AT_ONCE, ceilings.BOTH_WAYS, ceilings.SEND_RECV]
    monkeypatch.setattr(ceilings, "names", lambda platform, processes, devices: names)
    use_nccl(monkeypatch, FakeNccl())
    found = ceilings.run(make_context(FakeDriver(), count=4), "ceilings", SCALE, [])
    for name in names:
        assert len(found["contenders"][name]["ready_s"]) == ROUNDS, found["contenders"][name]


def test_the_memory_copy_of_cpus() -> None:
    found = ceilings.run(make_context(FakeDriver()), "ceilings", SCALE, [])
    assert found["bytes"] == pytest.approx(SCALE * (2 << 30), rel=0.3)
    assert len(found["contenders"][ceilings.MEMORY_COPY]["ready_s"]) == ROUNDS


def test_skipped_ceilings_are_left_out() -> None:
    assert ceilings.run(make_context(FakeDriver()), "ceilings", SCALE, [ceilings.MEMORY_COPY])["contenders"] == {}


def test_products_beside_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    cublas = FakeCublas()
    monkeypatch.setattr(slowdown, "open_cublas", lambda device: cublas)
    monkeypatch.setattr(gemm, "_SIDE", 16)
    use_nccl(monkeypatch, FakeNccl())
    driver = FakeDriver()
    found = slowdown.run(make_context(driver, ("host", "nccl")), "slowdown", SCALE, [])["contenders"]
    for name in ("alone", "copy engine", "send/recv", "host into"):
        assert len(found[name]["ready_s"]) == ROUNDS
        assert all(moves >= 1 for moves in found[name]["moves"])
    assert found["nccl into"]["refused"]
    # Each of the four was tried once before, and the transport that refuses never got as far.
    assert list(cublas.products.values()) == [4 * (ROUNDS + 1) * gemm._COUNT] * 2
    assert not any(driver.contexts.values())


def test_without_cublas_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(gemm.ctypes, "CDLL", missing)
    found = slowdown.run(make_context(FakeDriver()), "slowdown", SCALE, [])
    assert list(found["contenders"]) == ["alone"]
    assert found["contenders"]["alone"]["error"].startswith("OSError: ")


def test_within() -> None:
    assert within(5, "adding", lambda: 1 + 1) == 2
    with pytest.raises(TimeoutError, match="sleeping has not ended after 0 s"):
        within(0.05, "sleeping", lambda: time.sleep(1))
    with pytest.raises(ZeroDivisionError):
        within(5, "dividing", lambda: 1 // 0)
