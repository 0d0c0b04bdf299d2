"""A measuring process: `python -m jreshard.bench.worker CONFIG`, started by the command."""

import json
import os
import platform
import sys
from typing import Any

import jax

from jreshard._runtime.driver import open_driver
from jreshard.bench import ceilings, slowdown
from jreshard.bench.cases import CASES, select
from jreshard.bench.config import CEILINGS, SLOWDOWN, Config
from jreshard.bench.context import Context
from jreshard.bench.gpu import Gpu
from jreshard.bench.measure import run_case, run_memory
from jreshard.bench.peers import Peers
from jreshard.doctor.probe import gather

#: On CPU devices, whose memory is small and slow, the cases are this much smaller.
CPU_SCALE = 1 / 64

_FEWEST_DEVICES = 2
_JOIN_SECONDS = 60


def main() -> None:
    """Measures what the configuration says and sends the results up the pipe."""
    config = Config(**json.loads(sys.argv[1]))
    peers = Peers(config.processes, sys.stdin, os.fdopen(int(sys.argv[2]), "w"))
    devices = _start_jax(config)
    kind, wanted = devices[0].platform, config.devices or _FEWEST_DEVICES
    try:
        if len(devices) < wanted:
            raise ValueError(f"{wanted} devices are needed, and JAX has {len(devices)}")
        chosen = _units(config, kind, len(devices))
    except ValueError as error:
        peers.tell("refuse", text=str(error))
        return
    transports = config.transports or (["p2p", "nccl"] if kind == "gpu" else ["host"])
    context = Context(devices, open_gpus(devices), peers, config.rounds, transports, config.timeout, config.until)
    context.spent.watch_compiling()
    scale = config.scale or (1.0 if kind == "gpu" else CPU_SCALE)
    units = [unit for unit in chosen if unit not in config.done]
    cases = [unit for unit in chosen if unit in CASES]
    peers.tell("hello", **_facts(devices), units=units, cases=cases, transports=transports)
    for i, unit in enumerate(units):
        if context.time_left() <= 0:
            break
        peers.tell("begin", unit=unit, contender=None)
        context.spent.take()
        if config.memory:
            result = run_memory(context, CASES[unit], scale)
        else:
            result = _measure(context, unit, scale, config.skipped.get(unit, []), len(units) - i)
        peers.tell("result", unit=unit, spent=context.spent.take(), **result)
    peers.tell("done")


def _units(config: Config, platform: str, num_devices: int) -> list[str]:
    """What there is to measure, in order.

    Raises:
        ValueError: a case needs more devices.
    """
    units = [CEILINGS] * (CEILINGS in config.beside) + select(config.cases, num_devices)
    return units + [SLOWDOWN] * (SLOWDOWN in config.beside and platform == "gpu")


def _start_jax(config: Config) -> list[Any]:
    """The devices to use: in several processes one of each."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Takes effect on CPU devices only, and before JAX starts.
        jax.config.update("jax_num_cpu_devices", (config.devices or _FEWEST_DEVICES) if config.processes == 1 else 1)
    if config.processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{config.port}",
            config.processes,
            config.process,
            local_device_ids=None if config.isolated else [config.process],
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_SECONDS,
        )
        of_process = {device.process_index: device for device in jax.devices()}
        return [of_process[process] for process in sorted(of_process)]
    devices = jax.devices()
    return list(devices if len(devices) >= _FEWEST_DEVICES else jax.devices("cpu"))[: config.devices]


def open_gpus(devices: list[Any]) -> dict[int, Gpu]:
    """Those of this process, by their places among all devices; none on CPU devices."""
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


def _measure(context: Context, unit: str, scale: float, skipped: list[str], units_left: int) -> dict[str, Any]:
    if unit == CEILINGS:
        return ceilings.run(context, unit, scale, skipped)
    if unit == SLOWDOWN:
        return slowdown.run(context, unit, scale, skipped)
    return run_case(context, unit, CASES[unit], scale, skipped, units_left)


if __name__ == "__main__":
    main()
