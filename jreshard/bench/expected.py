"""What a case comes to before anything moves: worked out on paper, with the planner's own figures."""

from dataclasses import asdict
from functools import cache
from typing import Any

import jax
import numpy as np

import jreshard
from jreshard.bench.cases import CASES
from jreshard.bench.ceilings import AT_ONCE, BOTH_WAYS, COPY_ENGINE
from jreshard.bench.contenders import one_domain
from jreshard.bench.shapes import DTYPE


@cache
def expected(key: str, scale: float, processes: int, link: float) -> dict[str, Any]:
    """The figures of a case.

    Args:
        key: the case's.
        scale: the factor on its bytes.
        processes: how many drive the devices.
        link: what a link carries, bytes a second one way.

    Returns:
        In words what it is; its leaves and bytes; the bytes that cross between devices, and those that the busiest link
        carries at least, whatever the plan; which ceiling is to be held against it (of links); and `predicted`, the
        seconds that the link model gives for the plan that makes use of replicas.
    """
    case = CASES[key]
    shapes = case.scaled(scale)
    devices = jreshard.paper_devices(case.num_devices)
    src, dst = case.src.shardings(devices, shapes), case.dst.shardings(devices, shapes)
    structs = {name: jax.ShapeDtypeStruct(shape, DTYPE) for name, shape in shapes.items()}
    topology = one_domain(len(devices), link, ranks_per_process=len(devices) if processes == 1 else 1)
    plan = jreshard.plan(structs, src, dst, topology=topology)
    return {
        "title": case.title(shapes),
        "base": case.base and case.base.name,
        "leaves": len(shapes),
        "bytes": plan.nbytes,
        "bytes_crossing": plan.bytes_moved,
        "bytes_busiest_link": round(plan.figures.bound.seconds * link),
        "ceiling": _ceiling(jreshard.plan(structs, src, dst).traffic),
        "predicted": asdict(plan.figures.predicted),
    }


def _ceiling(traffic: np.ndarray) -> str:
    """Which of the ceilings does what the case does, going by the bytes from rank to rank without relays."""
    crossing = traffic - np.diag(traffic.diagonal())
    sends, receives = crossing.any(axis=1), crossing.any(axis=0)
    if min(sends.sum(), receives.sum()) <= 1:
        return COPY_ENGINE
    return BOTH_WAYS if (sends & receives).any() else AT_ONCE
