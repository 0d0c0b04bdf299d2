"""Two processes of one cluster, each of which examines what it sees."""

import json
import os
import socket
import subprocess
import sys

SCRIPT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]), cluster_detection_method="deactivate")
from jreshard.doctor import examine
print(examine(json=True)[0])
"""


def test_hosts_and_pairs() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT, str(port)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for i, output in enumerate(outputs):
        found = json.loads(output[output.index("{") :])
        assert found["process"] == i
        assert found["hosts"] == {"0": socket.gethostname(), "1": socket.gethostname()}
        assert [device["process"] for device in found["devices"]] == [0, 0, 1, 1]
        # The pair of the other process's devices is for that one to judge.
        others = {(2, 3)} if i == 0 else {(0, 1)}
        pairs = {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)} - others
        assert {tuple(verdict["pair"]) for verdict in found["transports"]} == pairs
