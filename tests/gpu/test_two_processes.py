"""Transfers between the GPUs of two processes."""

import gpus
import processes
import pytest
from repeats import repeats
from test_hosts import SCENARIOS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(repeats(300, 1200))]

LINKING = {"linking_fails_on_one_side"}  # NCCL links processes in its own way
PATIENCE = repeats(150, 600)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    gpus.need(2)


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
@pytest.mark.parametrize("isolated", [False, True], ids=["one view", "isolated"])
def test_scenarios(isolated: bool, transport: str) -> None:
    scenarios = [name for name in SCENARIOS if transport == "p2p" or name not in LINKING]
    outcomes = processes.run(*scenarios, platform="cuda", isolated=isolated, transport=transport, patience=PATIENCE)
    processes.check(outcomes)


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_into_takes_no_second_copy(transport: str) -> None:
    processes.check(processes.run("into_takes_no_second_copy", platform="cuda", transport=transport))


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_process_dies(transport: str) -> None:
    processes.check(processes.run("a_process_dies_while_others_wait", platform="cuda", transport=transport), dies=[1])
