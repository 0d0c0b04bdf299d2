"""Transfers between the GPUs of two processes."""

import shutil
import subprocess

import processes
import pytest
from test_hosts import SCENARIOS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    found = shutil.which("nvidia-smi")
    listed = subprocess.run([found, "-L"], capture_output=True, text=True, check=False).stdout if found else ""
    if listed.count("GPU ") < 2:
        pytest.skip("needs 2 GPUs")


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
@pytest.mark.parametrize("isolated", [False, True], ids=["one view", "isolated"])
def test_scenarios(isolated: bool, transport: str) -> None:
    processes.check(processes.run(*SCENARIOS, platform="cuda", isolated=isolated, transport=transport))


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_process_dies(transport: str) -> None:
    processes.check(processes.run("a_process_dies_while_others_wait", platform="cuda", transport=transport), dies=[1])
