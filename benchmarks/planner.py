"""Plans on paper: are they right, how near to the bound, against other policies, and how long does planning take?

    python benchmarks/planner.py --json benchmarks/results/planner.json [--only random|models|big] [--cases 10000]

`random` replays random plans element by element and compares each with the bound; `models` plans every model from and
to the layouts of `SOURCES` and `DESTINATIONS`; `big` measures planning for a thousand and for four thousand devices.
All of it runs without a device. Times are CPU seconds of one process, and depend on the machine.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import platform
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planner_policies import POLICIES

import jreshard
from jreshard import PaperDevice, Topology, models, paper_devices
from jreshard._planning.cost import busiest
from jreshard._planning.spread import place

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from oracle import replay

SOURCES = {
    "FSDP64": {"fsdp": 64},
    "TP8 PP2 DP4": {"pp": 2, "dp": 4, "tp": 8},
    "EP16 PP4": {"pp": 4, "ep": 16},
    "EP16 PP8": {"pp": 8, "ep": 16},
}
DESTINATIONS = {
    "TP8 DP8": {"dp": 8, "tp": 8},
    "TP8 DP16": {"dp": 16, "tp": 8},
    "TP4 DP8": {"dp": 8, "tp": 4},
    "TP1 DP16": {"dp": 16},
}
TOPOLOGIES = ("h100-8", "gb200-72")


# --- random plans ----------------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[list[tuple[Any, str, NamedSharding, NamedSharding]], Topology]:
    """Leaves (shape, dtype, source, destination) on random meshes, and a random topology."""
    draw = random.Random(seed)
    sources, targets = draw.randint(1, 12), draw.randint(1, 16)
    src_ids = list(range(sources))
    dst_ids = draw.choice([list(range(100, 100 + targets)), list(range(targets)), None])
    dst_ids = draw.sample(range(sources + targets), targets) if dst_ids is None else dst_ids
    if draw.random() < 0.5:
        draw.shuffle(src_ids)
        draw.shuffle(dst_ids)
    src_mesh, dst_mesh = _random_mesh(draw, src_ids, "xyz"), _random_mesh(draw, dst_ids, "abc")
    leaves = []
    for _ in range(draw.randint(1, 4)):
        rank = draw.randint(0, 3)
        src, dst = _random_sharding(draw, src_mesh, rank), _random_sharding(draw, dst_mesh, rank)
        sizes = [1, 1, 2, 3, 8, 0 if draw.random() < 0.1 else 5]
        shape = tuple(math.lcm(_parts(src, dim), _parts(dst, dim)) * draw.choice(sizes) for dim in range(rank))
        if math.prod(shape) <= 40_000:
            dtype = draw.choice(["float32", "bfloat16", "int4", "int8"])
            leaves += [(shape, dtype, src, dst)] * draw.choice([1, 1, 2, 5])
    topology = Topology(
        domain_size=draw.choice([1, 2, 3, 4, 8, 72]),
        nvlink=draw.choice([50e9, 400e9]),
        nic=50e9,
        ranks_per_nic=draw.choice([1, 1, 2, 8]),
        smallest_piece=draw.choice([1, 1, 8, 64, 1 << 18]),
    )
    return leaves, topology


def _random_mesh(draw: random.Random, ids: list[int], names: str) -> Mesh:
    sizes, left = [], len(ids)
    for _ in names[1:]:
        sizes.append(draw.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[-1]
    sizes.append(left)
    draw.shuffle(sizes)
    return Mesh(np.array([PaperDevice(i) for i in ids]).reshape(sizes), tuple(names))


def _random_sharding(draw: random.Random, mesh: Mesh, rank: int) -> NamedSharding:
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw.sample(mesh.axis_names, len(mesh.axis_names)):
        dim = draw.randint(-1, rank - 1)
        if dim >= 0:
            dims[dim].append(axis)
    return NamedSharding(mesh, P(*(tuple(axes) or None for axes in dims)))


def _parts(sharding: NamedSharding, dim: int) -> int:
    return math.prod(sharding.mesh.shape[axis] for axis in sharding.spec[dim] or ())


def random_plans(cases: int) -> dict[str, Any]:
    """Replays plans element by element; the first that is wrong ends the run with an error."""
    start, moves, phases = time.process_time(), 0, collections.Counter[int]()
    for seed in range(cases):
        leaves, topology = random_case(seed)
        names = [f"{i:02}" for i in range(len(leaves))]
        structs = {name: jax.ShapeDtypeStruct(leaf[0], leaf[1]) for name, leaf in zip(names, leaves, strict=True)}
        src, dst = ({name: leaf[side] for name, leaf in zip(names, leaves, strict=True)} for side in (2, 3))
        plan = jreshard.plan(structs, src, dst, topology=topology)
        for i, (shape, _, one, other) in enumerate(leaves):
            replay(plan, i, shape, one, other)
        figures = plan.figures
        if figures.busiest.seconds < figures.bound.seconds * (1 - 1e-9):
            raise AssertionError(f"case {seed}: {figures.busiest} is below {figures.bound}")
        moves += plan.num_moves
        phases[figures.phases] += 1
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1} random plans are right, {moves:,} moves", flush=True)
    return {"cases": cases, "wrong": 0, "moves": moves, "phases": phases, "cpu_s": time.process_time() - start}


# --- models ----------------------------------------------------------------------------------------------------------


def model_case(name: str, src: dict[str, int], dst: dict[str, int], *, stacked: bool = True) -> tuple[Any, Any, Any]:
    """Shapes and shardings of a model; pipeline stages, where there are any, on devices of their own."""
    first = math.prod(src.values())
    src_mesh = Mesh(np.array(paper_devices(first)).reshape(tuple(src.values())), tuple(src))
    count = math.prod(dst.values())
    dst_mesh = Mesh(np.array(paper_devices(count, first=first)).reshape(tuple(dst.values())), tuple(dst))
    weights = models.weights(name, stacked=stacked, stages=src.get("pp", 1))
    src_tree = models.shardings(weights, src_mesh, stage_axis="pp" if "pp" in src else None)
    return models.shapes(weights), src_tree, models.shardings(weights, dst_mesh)


def by_number(topology: Topology, sources: int) -> Topology:
    """The topology with the domains of devices numbered as in `model_case`, whatever the order of a plan's ranks."""
    size = topology.domain_size
    fresh = -(-sources // size)
    return dataclasses.replace(
        topology, domains=lambda d: d.id // size if d.id < sources else fresh + (d.id - sources) // size
    )


def plan_model(case: tuple[Any, Any, Any], topology: Topology) -> dict[str, Any]:
    """The figures of one case, and the busiest link under other policies."""
    plan = jreshard.plan(*case, topology=topology)
    figures = plan.figures
    spread, _, pairs = place(plan.routes, topology)
    arrays = [
        (of_route[kind], route.kinds[kind].nbytes)
        for route, of_route in zip(plan.routes, pairs, strict=True)
        for kind in route.kind_of
    ]
    once = sum(int(target.entering.sum()) for target in spread.needs.targets.values())
    return {
        "over_bound": figures.over_bound,
        "network_bytes": figures.bytes_by_link["network"],
        "once_per_domain": once,
        "messages": plan.num_messages,
        "phases": figures.phases,
        "predicted_s": figures.predicted.total,
        "gather_and_broadcast": figures.gather_and_broadcast / figures.predicted.total,
        "one_sender": figures.one_sender.total / figures.predicted.total,
        "policies_over_bound": {
            name: busiest(policy(spread, arrays), topology).seconds / figures.bound.seconds
            for name, policy in POLICIES.items()
        },
    }


def all_models() -> dict[str, Any]:
    """Every model, source, destination and topology."""
    cases = {}
    for name in models.names():
        for src_name, src in SOURCES.items():
            for dst_name, dst in DESTINATIONS.items():
                try:
                    case = model_case(name, src, dst)
                except ValueError as error:
                    print(f"{name}, {src_name} -> {dst_name}: left out, {str(error).splitlines()[-1].strip()}")
                    continue
                for topology in TOPOLOGIES:
                    links = by_number(Topology.preset(topology), math.prod(src.values()))
                    found = plan_model(case, links)
                    label = f"{name}, {src_name} -> {dst_name}, {topology}"
                    cases[label] = found
                    policies = "  ".join(f"{k} {v:5.2f}" for k, v in found["policies_over_bound"].items())
                    print(
                        f"{label:60} {found['over_bound']:.3f}  {policies}  {found['predicted_s']:6.2f} s  "
                        f"gather+broadcast {found['gather_and_broadcast']:.1f}x",
                        flush=True,
                    )
    worst = max(case["over_bound"] for case in cases.values())
    once = all(case["network_bytes"] == case["once_per_domain"] for case in cases.values())
    print(f"worst {worst:.3f}, every byte over the network once for each domain: {once}")
    return {"worst_over_bound": worst, "once_per_domain": once, "cases": cases}


def wide_models() -> dict[str, Any]:
    """Qwen3-235B and DeepSeek-V3 from 64 to 64 devices and from 128 to 128, against gathering and broadcasting."""
    layouts = {
        "64+64": ({"pp": 4, "ep": 16}, {"dp": 8, "tp": 8}),
        "64+64, FSDP": ({"fsdp": 64}, {"dp": 8, "tp": 8}),
        "128+128": ({"pp": 8, "ep": 16}, {"dp": 16, "tp": 8}),
        "128+128, FSDP": ({"fsdp": 128}, {"dp": 16, "tp": 8}),
    }
    out = {}
    for name in ("qwen3-235b-a22b", "deepseek-v3"):
        for label, (src, dst) in layouts.items():
            links = by_number(Topology.preset("h100-8"), math.prod(src.values()))
            figures = jreshard.plan(*model_case(name, src, dst), topology=links).figures
            ratio = figures.gather_and_broadcast / figures.predicted.total
            out[f"{name}, {label}"] = {"predicted_s": figures.predicted.total, "gather_and_broadcast": ratio}
            print(f"{name}, {label}: {figures.predicted.total:.2f} s, gather and broadcast {ratio:.1f} times that")
    return out


# --- many devices ----------------------------------------------------------------------------------------------------


def _fsdp_to_replicas(sources: int, targets: int) -> tuple[dict[str, int], dict[str, int]]:
    return {"fsdp": sources // 8, "tp": 8}, {"dp": targets // 8, "tp": 8}


def big_plans() -> dict[str, Any]:
    """CPU seconds of planning for 1,024 and for 4,096 devices a side."""
    deepseek = "deepseek-v3", {"dp": 8, "fsdp": 128}, {"dp": 128, "tp": 8}, False
    qwen = "qwen3.8-2.4t-a95b"
    cases = {
        "deepseek-v3, one array a weight, 1024 -> 1024": (*deepseek, "h100-8"),
        "deepseek-v3, one array a weight, 1024 -> 1024, gb200-72": (*deepseek, "gb200-72"),
        f"{qwen}, stacked, 1024 -> 1024": (qwen, *_fsdp_to_replicas(1024, 1024), True, "h100-8"),
        f"{qwen}, stacked, 4096 -> 4096": (qwen, *_fsdp_to_replicas(4096, 4096), True, "h100-8"),
        f"{qwen}, stacked, 4096 -> 4096, gb200-72": (qwen, *_fsdp_to_replicas(4096, 4096), True, "gb200-72"),
        f"{qwen}, stacked, 256 -> 1024 (passed on between domains)": (
            qwen, *_fsdp_to_replicas(256, 1024), True, "h100-8",
        ),
    }  # fmt: skip
    out = {}
    for label, (name, src, dst, stacked, links) in cases.items():
        case = model_case(name, src, dst, stacked=stacked)
        topology = Topology.preset(links)
        seconds = {}
        start = time.process_time()
        plan = jreshard.plan(*case, topology=topology)
        seconds["plan"] = time.process_time() - start
        plan.part(0)
        seconds["plan and one rank's part"] = time.process_time() - start
        start = time.process_time()
        jreshard.plan(*case, topology=topology)
        seconds["the same plan again"] = time.process_time() - start
        start = time.process_time()
        figures = plan.figures
        seconds["figures"] = time.process_time() - start
        gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        out[label] = {
            "leaves": plan.num_leaves,
            "moves": plan.num_moves,
            "over_bound": figures.over_bound,
            "cpu_s": seconds,
            "most_memory_so_far_gb": gigabytes,
        }
        times = ", ".join(f"{what} {value:.3f} s" for what, value in seconds.items())
        print(f"{label}: {plan.num_leaves:,} leaves, {plan.num_moves:,} moves; {times}; {gigabytes:.1f} GB", flush=True)
    return out


def cpu_name() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Runs the parts asked for and writes what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=["big", "random", "models"])
    parser.add_argument("--cases", type=int, default=10_000)
    args = parser.parse_args()
    out: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    out["host"] = f"{os.cpu_count()} x {cpu_name()}"
    out["versions"] = {"jax": jax.__version__, "jreshard": jreshard.__version__, "python": platform.python_version()}
    if args.only in (None, "big"):
        out["big"] = big_plans()
    if args.only in (None, "random"):
        out["random"] = random_plans(args.cases)
    if args.only in (None, "models"):
        out["models"], out["wide"] = all_models(), wide_models()
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
