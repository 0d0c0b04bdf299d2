"""Which transport `auto` comes to between GPUs; the devices, and what the driver says of them, are played."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from jreshard._deadline import Deadline
from jreshard._runtime import transport
from jreshard._runtime.party import Party

Answers = dict[int, dict[str, str]]


@dataclass(frozen=True)
class Gpu:
    process_index: int
    local_hardware_id: int
    platform: str = "gpu"


def gpus(*processes: int) -> list[Any]:
    """A GPU of each of these processes; this one is process 0."""
    return [Gpu(process, i) for i, process in enumerate(processes)]


@pytest.fixture(autouse=True)
def nothing_agreed() -> Iterator[None]:
    transport._agreed.clear()
    yield
    transport._agreed.clear()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Sets what is wrong between the GPUs of this process, and what the others say; returns what was agreed on."""

    def play(fault: str = "", others: Answers | None = None) -> list[str]:
        rounds = []

        def agree(party: Party, what: str, mine: dict[str, str], _: Deadline) -> Answers:
            rounds.append(what)
            elsewhere = {p: {**mine, "fault": "", **(others or {}).get(p, {})} for p in party.processes}
            return {**elsewhere, 0: mine}

        monkeypatch.setattr(transport, "_peer_fault", lambda ordinals: fault)
        monkeypatch.setattr(Party, "agree", agree)
        return rounds

    return play


def choose(devices: list[Any], wanted: str = "auto") -> str:
    return transport.choose_transport(wanted, devices, Deadline.after(5))


@pytest.mark.parametrize("wanted", ["auto", "host", "p2p", "nccl"])
def test_without_devices_there_is_nothing_to_refuse(wanted: str) -> None:
    """Such as for a tree of arrays without elements."""
    assert choose([], wanted) == "host"


def test_gpus_of_one_process(peers: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    peers()
    assert choose(gpus(0, 0)) == "p2p"
    peers(fault="GPU 0 cannot read the memory of GPU 1")
    with caplog.at_level(logging.WARNING):
        assert choose(gpus(0, 0)) == "nccl"
    assert "GPU 0 cannot read the memory of GPU 1" in caplog.text


def test_a_transport_asked_for_stays(peers: Callable[..., list[str]]) -> None:
    rounds = peers(fault="no peer access")
    assert choose(gpus(0, 0), "p2p") == "p2p"
    assert choose(gpus(0, 1), "nccl") == "nccl"
    assert rounds == []


def test_several_processes_agree_once(peers: Callable[..., list[str]]) -> None:
    rounds = peers()
    devices = gpus(0, 1)
    assert [choose(devices) for _ in range(3)] == ["p2p"] * 3
    assert rounds == ["choose the transport between GPUs"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"fault": "no such driver"}, "process 1: no such driver"),
        ({"machine": "another"}, "several machines or in several containers"),
    ],
    ids=["a fault there", "another machine"],
)
def test_one_process_that_cannot(
    peers: Callable[..., list[str]], caplog: pytest.LogCaptureFixture, said: dict[str, str], why: str
) -> None:
    peers(others={1: said})
    with caplog.at_level(logging.WARNING):
        assert choose(gpus(0, 0, 1)) == "nccl"
    assert why in caplog.text


def test_memory_that_cannot_be_lent(
    peers: Callable[..., list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    assert choose(gpus(0, 0)) == "p2p"  # within a process nothing is lent
    with caplog.at_level(logging.WARNING):
        assert choose(gpus(0, 1)) == "nccl"
    assert "cuda_async" in caplog.text


def test_a_process_without_part_asks_nobody(peers: Callable[..., list[str]]) -> None:
    rounds = peers(fault="no peer access")
    choose(gpus(1, 2))
    assert rounds == []
