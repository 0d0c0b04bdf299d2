"""Runs scenarios in several real processes of one `jax.distributed` cluster."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 120.0  # seconds for all processes of a scenario, starting JAX included


@dataclasses.dataclass
class Outcome:
    """How one process ended."""

    status: int
    output: str


def run(
    *scenarios: str,
    devices: Sequence[int] = (1, 1),
    platform: str = "cpu",
    transport: str = "auto",
    isolated: bool = False,
    shared: bool = False,
    patience: float = PATIENCE,
) -> list[Outcome]:
    """How the processes end that run some functions of scenarios.py one after the other, one for each of `devices`.

    Args:
        scenarios: their names.
        devices: how many devices each process has.
        platform: `"cpu"` or `"cuda"`.
        transport: what the transfers are told to use.
        isolated: whether a process sees only its own GPUs, rather than choosing them among all.
        shared: whether all processes have the same GPU, the first, and a part of its memory each.
        patience: seconds after which processes that have not ended are killed.
    """
    port = _free_port()
    workers = []
    first = 0
    for process, count in enumerate(devices):
        own = ",".join(map(str, range(first, first + count)))
        first += 0 if shared else count
        memory = 0.7 / len(devices) if shared else 0.4
        environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory:.2f}"}
        environment["JRESHARD_TEST_TRANSPORT"] = transport
        environment["JRESHARD_TEST_PATIENCE"] = str(patience)
        arguments = [",".join(scenarios), str(process), str(len(devices)), str(port), platform, str(count)]
        if platform == "cuda" and isolated:
            environment["CUDA_VISIBLE_DEVICES"] = own
        elif platform == "cuda":
            arguments.append(own)
        command = [sys.executable, "-X", "faulthandler", str(WORKER), *arguments]
        workers.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    deadline = time.monotonic() + patience
    outcomes = []
    for worker in workers:
        try:
            output, _ = worker.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            output = worker.communicate()[0] + "\nkilled: it did not end in time"
        outcomes.append(Outcome(worker.returncode, output))
    return outcomes


def check(outcomes: Sequence[Outcome], dies: Sequence[int] = ()) -> None:
    """Every process has ended well, but for those that were to die."""
    wrong = [i for i, outcome in enumerate(outcomes) if i not in dies and outcome.status != 0]
    report = "\n".join(f"--- process {i}: {outcome.status}\n{outcome.output}" for i, outcome in enumerate(outcomes))
    assert not wrong, report


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
