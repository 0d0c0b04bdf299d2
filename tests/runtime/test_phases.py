"""Plans in which replicas of the destination read one another, executed as any other plan."""

import jax
import numpy as np
import pytest
from oracle import assert_tree_holds, mesh, named, put, values
from relays import relayed

import jreshard
from jreshard._planning import tables, turns

SHAPE = (24, 16, 6)


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
    monkeypatch.setattr(turns, "plan_moves", relayed)
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
    monkeypatch.setattr(turns, "plan_moves", relayed)
    src, dst = named(mesh([0]), None), named(mesh([0, 1, 2]), None)
    plan = jreshard.plan(jax.ShapeDtypeStruct((8,), np.float32), src, dst)
    assert [route.pairs for route in plan.routes] == [[(0, 1), (1, 2)]]
