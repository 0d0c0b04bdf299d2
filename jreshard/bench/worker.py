"""A measuring process: `python -m jreshard.bench.worker CONFIG`, started by the command."""

import json
import os
import platform
import sys
from typing import Any

import jax

from jreshard._driver import open_driver
from jreshard.bench import ceilings, slowdown
from jreshard.bench.cases import CASES
from jreshard.bench.config import CEILINGS, SLOWDOWN, Config
from jreshard.bench.contenders import names as contender_names
from jreshard.bench.context import Context
from jreshard.bench.gpu import Gpu
from jreshard.bench.measure import run_case
from jreshard.bench.peers import Peers
from jreshard.doctor.probe import gather

#: On CPU devices, whose memory is small and slow, the cases are this much smaller.
CPU_SCALE = 1 / 64

_NUM_DEVICES = 2
_JOIN_SECONDS = 60


def main() -> None:
    """Measures what the configuration says and sends the results up the pipe."""
    config = Config(**json.loads(sys.argv[1]))
    peers = Peers(config.processes, sys.stdin, os.fdopen(int(sys.argv[2]), "w"))
    devices = _start_jax(config)
    if len(devices) < _NUM_DEVICES:
        peers.tell("refuse", text=f"{_NUM_DEVICES} devices are needed, and JAX has {len(devices)}")
        return
    devices = devices[:_NUM_DEVICES]
    kind = devices[0].platform
    transports = config.transports or (["p2p", "nccl"] if kind == "gpu" else ["host"])
    context = Context(devices, _open_gpus(devices), peers, config.rounds, transports, config.timeout)
    scale = config.scale or (1.0 if kind == "gpu" else CPU_SCALE)
    peers.tell("hello", **_facts(devices), turns=_turns(config, kind, transports))
    for unit in config.units:
        peers.tell("begin", unit=unit, contender=None)
        peers.tell("result", unit=unit, **_measure(context, unit, scale, config.skipped.get(unit, [])))
    peers.tell("done")


def _start_jax(config: Config) -> list[Any]:
    # Takes effect on CPU devices only, and before JAX starts.
    jax.config.update("jax_num_cpu_devices", _NUM_DEVICES // config.processes)
    if config.processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}",
            config.processes,
            config.process,
            local_device_ids=None if config.isolated else [config.process],
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS,
        )
    devices = jax.devices()
    if config.processes == 1 and len(devices) < _NUM_DEVICES:
        devices = jax.devices("cpu")
    return list(devices)


def _open_gpus(devices: list[Any]) -> dict[int, Gpu]:
    mine = [(rank, device) for rank, device in enumerate(devices) if device.process_index == jax.process_index()]
    if devices[0].platform != "gpu":
        return {}
    driver = open_driver()
    return {rank: Gpu(driver, device.local_hardware_id) for rank, device in mine}


def _facts(devices: list[Any]) -> dict[str, Any]:
    """The host and the versions, for the results."""
    facts = gather()
    host = {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "platform": devices[0].platform,
        "link": ", ".join(sorted(set(map(str, facts.links.values())))),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "allocator": facts.allocator,
    }
    return {"host": host, "versions": dict(facts.versions)}


def _turns(config: Config, kind: str, transports: list[str]) -> int:
    """How many contenders will begin something, for the progress bar."""
    times = config.rounds + 1  # each is tried once before
    turns = {unit: len(contender_names(transports)) * times + len(transports) for unit in CASES}
    turns[CEILINGS] = len(ceilings.names(kind, config.processes)) * times
    turns[SLOWDOWN] = len(slowdown.names(transports)) * times if kind == "gpu" else 0
    return sum(turns[unit] for unit in config.units)


def _measure(context: Context, unit: str, scale: float, skipped: list[str]) -> dict[str, Any]:
    if unit == CEILINGS:
        return ceilings.run(context, unit, scale, skipped)
    if unit == SLOWDOWN:
        return slowdown.run(context, unit, scale, skipped) if context.gpus else {"contenders": {}}
    return run_case(context, unit, CASES[unit], scale, skipped)


if __name__ == "__main__":
    main()
