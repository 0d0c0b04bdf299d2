"""Where the time of a transfer goes that is not copying.

    python benchmarks/launch.py --json launch.json --leaves 1 400 --transports p2p nccl

Moves arrays that are too small for their bytes to matter, into old ones, and splits the time from call to ready: what
Python does before the first launch, the launch of each program, the rest until the call returns, and from there until
JAX tells that all is ready. Beside it, what a program of as many operands costs that does nothing: no transfer that
launches all at once can take less. All of it in a row, and after pauses as long as moving some gigabytes takes: then
caches are cold and threads asleep. Medians in microseconds. Uses two devices of the default backend, or the one that
there is; simulated ones where there is only a CPU.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jreshard

jax.config.update("jax_num_cpu_devices", 2)

ROUNDS = 30
PAUSES = {"in a row": 0.0, "after pauses": 0.025}  # seconds
SHAPE = (64, 64)  # 16 KiB
PROGRAMS = ("_prepare", "_publish", "_receive_into", "_releases", "_exchange_into")


class Stopwatch:
    """When each program of a plan's launchers was launched, and for how long that took."""

    def __init__(self, plan: jreshard.Plan) -> None:
        self.launches: list[tuple[str, float, float]] = []
        for routes in plan._execution._ready.values():
            for route in routes:
                made = vars(route.launcher)
                made.update({name: self._timed(name, made[name]) for name in PROGRAMS if name in made})

    def _timed(self, name: str, program: Any) -> Any:
        """In the place of a program, or of one for each part."""
        if isinstance(program, list):
            return [self._timed(name, of_part) for of_part in program]

        def launch(*args: Any) -> Any:
            begin = time.perf_counter()
            out = program(*args)
            self.launches.append((name.strip("_").removesuffix("_into"), begin, time.perf_counter()))
            return out

        return launch


def layouts() -> dict[str, tuple[NamedSharding, NamedSharding]]:
    devices = jax.devices()
    ends = devices[0], devices[min(1, len(devices) - 1)]
    one, other = (NamedSharding(Mesh(np.array([device]), ("x",)), P()) for device in ends)
    if len(devices) == 1:
        return {"0 -> 0": (one, one)}
    both = Mesh(np.array(devices[:2]), ("x",))
    return {
        "0 -> 1": (one, other),
        "{0,1} rows -> columns": (NamedSharding(both, P("x")), NamedSharding(both, P(None, "x"))),
    }


def measure(leaves: int, src: NamedSharding, dst: NamedSharding, transport: str, pause: float) -> dict[str, float]:
    """Medians in microseconds, by stage."""
    params = {f"w{i}": jax.device_put(np.full(SHAPE, i, np.float32), src) for i in range(leaves)}
    plan = jreshard.plan(params, src, dst)
    old = plan.execute(params, transport=transport)
    old = jax.block_until_ready(plan.execute(params, into=old, transport=transport))
    watch = Stopwatch(plan)
    stages: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        watch.launches.clear()
        time.sleep(pause)
        begin = time.perf_counter()
        old = plan.execute(params, into=old, transport=transport)
        returned = time.perf_counter()
        jax.block_until_ready(old)
        ready = time.perf_counter()
        spans = {"before the first launch": watch.launches[0][1] - begin}
        for name, launched, done in watch.launches:
            spans[name] = spans.get(name, 0.0) + done - launched
        spans["other"] = returned - begin - sum(spans.values())
        spans |= {"until ready": ready - returned, "all": ready - begin}
        for name, seconds in spans.items():
            stages.setdefault(name, []).append(seconds)
    return {name: round(1e6 * statistics.median(of_stage), 1) for name, of_stage in stages.items()}


def empty_program(leaves: int, dst: NamedSharding, pause: float) -> float:
    """Microseconds from call to ready of a program that hands its operands back."""
    arrays = [jax.device_put(np.zeros(SHAPE, np.float32), dst) for _ in range(leaves)]
    program = jax.jit(lambda *xs: list(xs), donate_argnums=tuple(range(leaves))).lower(*arrays).compile()
    seconds = []
    for _ in range(ROUNDS):
        time.sleep(pause)
        begin = time.perf_counter()
        arrays = jax.block_until_ready(program(*arrays))
        seconds.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(seconds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 64, 400, 2000])
    parser.add_argument("--transports", nargs="+", default=["auto"])
    args = parser.parse_args()
    cases = []
    for layout, (src, dst) in layouts().items():
        for leaves in args.leaves:
            for when, pause in PAUSES.items():
                floor = empty_program(leaves, dst, pause)
                for transport in args.transports:
                    stages = measure(leaves, src, dst, transport, pause)
                    case = {"layout": layout, "leaves": leaves, "transport": transport, "when": when}
                    cases.append({**case, "stages": stages, "an empty program": floor})
                    print(f"{', '.join(map(str, case.values()))}: {stages}, an empty program {floor}", flush=True)
    if args.json is not None:
        host = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "device": str(jax.devices()[0].device_kind),
        }
        versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jreshard": jreshard.__version__}
        args.json.write_text(json.dumps({"host": {**host, **versions}, "unit": "us", "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
