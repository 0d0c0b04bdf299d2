"""README's examples run as they stand, and print what they are said to print."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"

#: In a process of its own: the examples settle the number of devices.
RUN = """
import doctest, sys
program, session = sys.argv[1:]
names = {}
exec(program, names)
test = doctest.DocTestParser().get_doctest(session, names, "README", "README.md", 0)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed)
"""


PROGRAM, TWO_PROCESSES, SESSION = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_examples() -> None:
    session = re.sub(r"(?<=fingerprint) +[0-9a-f]{16}", " ...", SESSION)
    done = subprocess.run([sys.executable, "-c", RUN, PROGRAM, session], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes() -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        script = TWO_PROCESSES.replace("localhost:8476", f"localhost:{probe.getsockname()[1]}")
    assert script != TWO_PROCESSES
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, process],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for process in "01"
    ]
    try:
        trainer, rollout = (job.communicate(timeout=90)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], trainer + rollout
    for step in range(3):
        assert f"step {step}: the sum of the weights is {64 * (step + 1)}" in rollout
