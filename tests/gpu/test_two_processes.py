"""Transfers between the GPUs of two processes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiprocess"))
import processes

pytestmark = pytest.mark.gpu

SCENARIOS = [
    "every_layout",
    "options",
    "many_leaves_between_collectives",
    "plans_in_turn",
    "a_step_right_after",
    "mismatches",
    "a_process_is_late",
    "many_refits",
]


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    found = shutil.which("nvidia-smi")
    listed = subprocess.run([found, "-L"], capture_output=True, text=True, check=False).stdout if found else ""
    if listed.count("GPU ") < 2:
        pytest.skip("needs 2 GPUs")


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
@pytest.mark.parametrize("isolated", [False, True], ids=["one view", "isolated"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, isolated: bool, transport: str) -> None:
    processes.check(processes.run(scenario, platform="cuda", isolated=isolated, transport=transport))


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
@pytest.mark.parametrize("scenario", ["a_process_dies_while_others_wait"])
def test_death(scenario: str, transport: str) -> None:
    processes.check(processes.run(scenario, platform="cuda", transport=transport), dies=[1])
