"""Arrays that tell where their elements belong: what is wrong must be seen."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jreshard.bench import pattern

SHAPES = {"matrix": (64, 48), "vector": (96,), "experts": (4, 16, 32)}


def shardings(spec: P, *ids: int) -> dict[str, NamedSharding]:
    mesh = Mesh(np.array([jax.devices("cpu")[i] for i in ids]), ("x",))
    return {name: NamedSharding(mesh, spec) for name in SHAPES}


def replace_shards(leaf: Any, change: Any) -> Any:
    shards = change([shard.data for shard in leaf.addressable_shards])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def test_it_does_not_depend_on_the_sharding() -> None:
    rows, whole = shardings(P("x"), 0, 1), shardings(P(), 2)
    made = pattern.make(SHAPES, rows)
    assert pattern.wrong_leaves(made, SHAPES, rows) == []
    moved = jax.device_put(made, whole)
    assert pattern.wrong_leaves(moved, SHAPES, whole) == []
    for name, leaf in pattern.make(SHAPES, whole).items():
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint16), np.asarray(made[name]).view(np.uint16))


def test_values_are_normal_numbers_and_mostly_different() -> None:
    for leaf in pattern.make(SHAPES, shardings(P(), 0)).values():
        bits = np.asarray(leaf).view(np.uint16)
        exponent = bits >> 7 & 0xFF
        assert exponent.min() > 0
        assert exponent.max() < 0xFF
        assert len(np.unique(bits)) > 0.85 * min(bits.size, 1 << 13)


@pytest.mark.parametrize("name", SHAPES)
def test_swapped_shards_are_seen(name: str) -> None:
    where = shardings(P("x"), 0, 1)
    tree = pattern.make(SHAPES, where)

    def swap(shards: list[Any]) -> list[Any]:
        first, second = (next(iter(shard.devices())) for shard in shards)
        return [jax.device_put(shards[1], first), jax.device_put(shards[0], second)]

    tree[name] = replace_shards(tree[name], swap)
    assert pattern.wrong_leaves(tree, SHAPES, where) == [name]


def test_one_wrong_element_of_one_replica_is_seen() -> None:
    where = shardings(P(), 0, 1)
    tree = pattern.make(SHAPES, where)
    tree["vector"] = replace_shards(tree["vector"], lambda shards: [shards[0], shards[1].at[7].set(0)])
    assert pattern.wrong_leaves(tree, SHAPES, where) == ["vector"]


def test_exchanged_leaves_are_seen() -> None:
    shapes, where = {"a": (8, 8), "b": (8, 8)}, {name: shardings(P(), 0)["matrix"] for name in "ab"}
    tree = pattern.make(shapes, where)
    assert pattern.wrong_leaves({"a": tree["b"], "b": tree["a"]}, shapes, where) == ["a", "b"]


def test_another_sharding_is_wrong() -> None:
    tree = pattern.make(SHAPES, shardings(P("x"), 0, 1))
    assert pattern.wrong_leaves(tree, SHAPES, shardings(P("x"), 1, 0)) == ["matrix"]


def test_poison_is_wrong_everywhere() -> None:
    where = shardings(P("x"), 0, 1)
    poison, right = pattern.make(SHAPES, where, poison=True), pattern.make(SHAPES, where)
    assert pattern.wrong_leaves(poison, SHAPES, where) == list(SHAPES)
    for name in SHAPES:
        assert np.mean(np.asarray(poison[name]) == np.asarray(right[name])) < 0.05
