"""Transfers between processes that share one GPU, as trainer and server do where they take turns on it.

Without those scenarios in which XLA computes across the processes: it does so over NCCL, which takes a GPU once only.
"""

import gpus
import processes
import pytest
from repeats import repeats
from test_hosts import SCENARIOS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(repeats(300, 1200))]

COLLECTIVE = {"many_leaves_between_collectives", "transforms"}
PATIENCE = repeats(200, 900)


@pytest.fixture(autouse=True)
def one_gpu() -> None:
    gpus.need(1)


def run(*scenarios: str, count: int = 2, transport: str = "auto") -> list[processes.Outcome]:
    return processes.run(
        *scenarios, devices=(1,) * count, platform="cuda", transport=transport, shared=True, patience=PATIENCE
    )


def test_two_processes() -> None:
    processes.check(run(*(scenario for scenario in SCENARIOS if scenario not in COLLECTIVE)))


@pytest.mark.parametrize("allocator", ["platform", "vmm"])
def test_memory_of_other_allocators_is_lent(allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `platform` allocates is lent by the older kind of handle."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    processes.check(run("every_layout", "many_leaves", "links_that_broke"))


def test_into_takes_no_second_copy() -> None:
    processes.check(run("into_takes_no_second_copy"))


def test_four_processes() -> None:
    processes.check(run("every_layout_of_many", count=4))


def test_a_process_leaves_early() -> None:
    processes.check(run("a_process_leaves_early", count=3))
    processes.check(run("a_process_is_interrupted"))


def test_survivors_go_on() -> None:
    processes.check(run("survivors_go_on", count=3), dies=[1])


def test_a_process_dies() -> None:
    processes.check(run("a_process_dies_while_others_wait"), dies=[1])
    processes.check(run("a_process_dies_between_calls"), dies=[1])


def test_nccl_takes_a_gpu_once() -> None:
    processes.check(run("a_gpu_is_shared", transport="nccl"))
