"""Plans in which replicas of the destination read one another, executed as any other plan."""

import jax
import numpy as np
import pytest
from oracle import assert_tree_holds, mesh, named, put, values

import jreshard
from jreshard._planning import planner, tables
from jreshard._planning.planner import Moves, plan_moves

SHAPE = (24, 16, 6)


def relayed(src, dst, src_ranks, dst_ranks, *, rotation=0) -> Moves:
    """The first replica of each destination box reads the sources; each other one reads the replica before it."""
    moves = plan_moves(src, dst, src_ranks, dst_ranks, rotation=rotation)
    chains = {}
    for rank, box in zip(dst_ranks.tolist(), dst.box_of.tolist(), strict=True):
        chains.setdefault(box, []).append(rank)
    before = {rank: chain[max(i - 1, 0)] for chain in chains.values() for i, rank in enumerate(chain)}
    phase_of = {rank: i for chain in chains.values() for i, rank in enumerate(chain)}
    phase = np.array([phase_of[rank] for rank in moves.dst.tolist()], np.int64)
    sources = np.where(phase > 0, [before[rank] for rank in moves.dst.tolist()], moves.src)
    return Moves(sources, moves.dst, moves.start, moves.stop, phase)


@pytest.mark.parametrize("dtype", [np.float32, "int4"])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (([0, 1, 2, 3], ("x",)), ([4, 5, 6, 7], (None, "y"))),
        (([0, 1, 2, 3], ("x", "y")), ([4, 5, 6, 7], ())),
        (([0, 1, 2, 3], ("x",)), ([2, 3, 0, 5], (None, None, "y"))),
        (([0, 1, 2, 3], ("x",)), ([0, 1, 2, 3], ())),
    ],
)
def test_replicas_complete_each_other(monkeypatch, src, dst, dtype):
    monkeypatch.setattr(planner, "plan_moves", relayed)
    monkeypatch.setattr(tables, "_CHUNK", 2)
    (src_ids, src_spec), (dst_ids, dst_spec) = src, dst
    src_sharding = named(mesh(src_ids, x=2, y=2), *src_spec)
    dst_sharding = named(mesh(dst_ids, x=2, y=2), *dst_spec)
    host = {f"leaf {i}": values(SHAPE, jax.numpy.dtype(dtype), seed=i) for i in range(5)}
    params = jax.tree.map(lambda value: put(value, src_sharding), host)
    plan = jreshard.plan(params, src_sharding, dst_sharding)
    assert any((t.moves.phase > 0).any() for route in plan.routes for t in route.templates)
    old = None
    for _ in range(3):
        old = plan.execute(params, into=old)
        assert_tree_holds(old, host, dst_sharding)
    assert_tree_holds(params, host, src_sharding)


def test_the_pairs_of_every_phase_are_known(monkeypatch):
    monkeypatch.setattr(planner, "plan_moves", relayed)
    src, dst = named(mesh([0]), None), named(mesh([0, 1, 2]), None)
    plan = jreshard.plan(jax.ShapeDtypeStruct((8,), np.float32), src, dst)
    assert [route.pairs for route in plan.routes] == [[(0, 1), (1, 2)]]
