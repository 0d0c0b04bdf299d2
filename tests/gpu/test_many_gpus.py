"""Transfers between four GPUs and eight, in one process and in a process for each."""

import gpus
import processes
import pytest
from repeats import repeats

SCENARIOS = ["every_layout_of_many", "many_leaves_between_collectives", "many_refits"]
PATIENCE = repeats(150, 600)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(repeats(300, 1200)),
    pytest.mark.parametrize("transport", ["p2p", "nccl"]),
    pytest.mark.parametrize("count", [4, 8]),
]


@pytest.fixture(autouse=True)
def enough_gpus(count: int) -> None:
    gpus.need(count)


def test_one_process(count: int, transport: str) -> None:
    processes.check(
        processes.run(*SCENARIOS, devices=(count,), platform="cuda", transport=transport, patience=PATIENCE)
    )


def test_a_process_for_each(count: int, transport: str) -> None:
    scenarios = [*SCENARIOS, "connects_again_and_again"]
    processes.check(
        processes.run(*scenarios, devices=(1,) * count, platform="cuda", transport=transport, patience=PATIENCE)
    )


def test_survivors_go_on(count: int, transport: str) -> None:
    outcomes = processes.run("survivors_go_on", devices=(1,) * count, platform="cuda", transport=transport)
    processes.check(outcomes, dies=[1])
