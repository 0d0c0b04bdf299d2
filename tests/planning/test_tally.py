"""Sums over moves against the moves themselves, one by one."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from oracle import named

import jreshard
from jreshard import PaperDevice, Topology
from jreshard._planning.loads import Loads

LINKS = Topology(domain_size=4, nvlink=400e9, nic=50e9, smallest_piece=64)


def paper(first: int, **axes: int) -> Mesh:
    sizes = tuple(axes.values())
    return Mesh(np.array([PaperDevice(first + i) for i in range(int(np.prod(sizes)))]).reshape(sizes), tuple(axes))


def loads_of(plan: jreshard.Plan) -> Loads:
    """What the links carry, added up over the moves of each leaf."""
    loads = Loads(plan._spread.placement)
    for leaf in range(plan.num_leaves):
        moves, nbytes = plan._moves_of(leaf)
        loads.add(moves.src, moves.dst, moves.phase, nbytes)
    return loads


def assert_tallied(plan: jreshard.Plan) -> None:
    assert all(template.totals() is not None for route in plan.routes for template in route.templates)
    listed, tallied = loads_of(plan), plan.figures.loads
    for name in ("sent", "received", "boxes_sent", "boxes_received"):
        assert np.array_equal(getattr(tallied, name), getattr(listed, name)), name
    packed = 0
    for route in plan.routes:
        for template, times in zip(route.templates, route.uses.tolist(), strict=True):
            for flows in template.flows():
                crosses = flows.strided & (plan.domains[flows.src] != plan.domains[flows.dst])
                packed += int(flows.elements[crosses].sum()) * template.wire.bits // 8 * times
    assert tallied.packed == packed


SOURCES = {"sharded": {"x": 6}, "replicas": {"x": 3, "r": 2}, "both": {"x": 2, "y": 3, "r": 2}}
SPECS = [("x", None), (None, "x"), ("y", "x")]


@pytest.mark.parametrize("leaves", [1, 7])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dst_spec", [("tp", None), (None, "tp"), (None, None)])
def test_sums_are_those_of_the_moves(leaves, source, spec, dst_spec):
    mesh = paper(0, **SOURCES[source])
    spec = [axis if axis in mesh.axis_names else None for axis in spec]
    dst = NamedSharding(paper(100, dp=5, tp=2), jax.P(*dst_spec))
    shapes = {f"{i}": jax.ShapeDtypeStruct((60, 96), "int8") for i in range(leaves)}
    # Enough for holders to send to all domains themselves.
    plan = jreshard.plan(shapes, named(mesh, *spec), dst, topology=dataclasses.replace(LINKS, nic=400e9, nvlink=50e9))
    assert_tallied(plan)


def test_thousands_of_ranks():
    """Five million moves, of which none is listed."""
    mesh, to = paper(0, fsdp=128, tp=8), paper(1024, dp=128, tp=8)
    shapes = {f"{i}": jax.ShapeDtypeStruct((1024, 1024), "bfloat16") for i in range(40)}
    plan = jreshard.plan(shapes, named(mesh, ("fsdp", "tp")), named(to, None, "tp"), topology="h100-8")
    assert plan.num_moves == 40 * 1024 * 1024
    assert plan.nbytes == plan.lower_bound == 40 * 128 * 1024 * 1024 * 2
    assert plan.figures.over_bound < 1.01
