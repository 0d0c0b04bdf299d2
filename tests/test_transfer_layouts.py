"""Any layout to any layout, as explicit tables; every path runs three times with other values."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from oracle import assert_holds, assert_tree_holds, cpus, mesh, named, numbers, pointers, put, values

import jreshard

SHAPE = (24, 48)  # every number of parts below divides both dims
ROUNDS = 3

# Device ids and axes of the source and of the destination.
ROUTES = {
    "disjoint": (([0, 1, 2, 3], {"x": 2, "y": 2}), ([4, 5, 6, 7], {"x": 2, "y": 2})),
    "disjoint, other factors": (([0, 1, 2, 3], {"x": 4}), ([4, 5, 6, 7], {"a": 2, "b": 2})),
    "overlapping": (([0, 1, 2, 3], {"x": 2, "y": 2}), ([2, 3, 4, 5], {"x": 2, "y": 2})),
    "overlapping, interleaved": (([0, 2, 4, 6], {"x": 2, "y": 2}), ([5, 4, 3, 2], {"x": 2, "y": 2})),
    "source inside destination": (([2, 5], {"x": 2}), (range(8), {"x": 4, "y": 2})),
    "destination inside source": ((range(8), {"x": 2, "y": 4}), ([6, 1, 3], {"x": 3})),
    "identical": (([0, 1, 2, 3], {"x": 2, "y": 2}), ([0, 1, 2, 3], {"x": 2, "y": 2})),
    "permuted": (([0, 1, 2, 3], {"x": 2, "y": 2}), ([3, 0, 2, 1], {"x": 2, "y": 2})),
    "same devices, other axes": (([0, 1, 2, 3], {"x": 4}), ([0, 1, 2, 3], {"a": 2, "b": 2})),
    "one to another": (([3], {"x": 1}), ([5], {"x": 1})),
    "one to itself": (([3], {"x": 1}), ([3], {"y": 1})),
    "one to eight": (([2], {"x": 1}), (range(8), {"x": 2, "y": 4})),
    "eight to one": ((range(8), {"x": 2, "y": 4}), ([5], {"x": 1})),
    "eight to eight, three axes": ((range(8), {"x": 2, "y": 2, "z": 2}), ([7, 6, 5, 4, 3, 2, 1, 0], {"a": 4, "b": 2})),
    "three to four": (([0, 1, 2], {"x": 3}), ([3, 4, 5, 6], {"x": 2, "y": 2})),
    "four to three, overlapping": (([0, 1, 2, 3], {"x": 2, "y": 2}), ([3, 1, 5], {"x": 3})),
    "six to four, overlapping": (([0, 1, 2, 3, 4, 5], {"x": 3, "y": 2}), ([4, 5, 6, 7], {"x": 4})),
    "size-one axes": (([0, 1], {"x": 1, "y": 2}), ([1, 2], {"a": 2, "b": 1})),
}


def specs(on: Mesh) -> list[tuple]:
    """Replicated, each axis on each dim, several axes on one dim in both orders, an axis on each dim."""
    axes = on.axis_names
    single = [spec for axis in axes for spec in ((axis,), (None, axis))]
    stacked = [spec for pair in itertools.permutations(axes, 2) for spec in ((pair,), (None, pair), pair)]
    everything = [(axes[::-1], None)] if len(axes) > 2 else []
    return [(), *single, *stacked, *everything]


def spec_pairs(src: Mesh, dst: Mesh) -> list[tuple[tuple, tuple]]:
    """All pairs where there are few; else some 40 that hold every spec of either side."""
    sources, destinations = specs(src), specs(dst)
    every = max(1, len(sources) * len(destinations) // 40)
    return [(a, b) for i, a in enumerate(sources) for j, b in enumerate(destinations) if (i + j) % every == 0]


def layout_trees(src: Mesh, dst: Mesh) -> tuple[dict[str, NamedSharding], dict[str, NamedSharding]]:
    pairs = spec_pairs(src, dst)
    labels = [f"{a} -> {b}" for a, b in pairs]
    return (
        {label: named(src, *a) for label, (a, _) in zip(labels, pairs, strict=True)},
        {label: named(dst, *b) for label, (_, b) in zip(labels, pairs, strict=True)},
    )


def host_tree(labels, shape=SHAPE, dtype=np.float32, seed=0) -> dict[str, np.ndarray]:
    return {label: values(shape, dtype, seed * 1000 + i) for i, label in enumerate(labels)}


def move_three_times(src_shardings, dst_shardings, make_host) -> None:
    """Other values each time; the source stays as it was, and its end does not reach the result."""
    for seed in range(ROUNDS):
        host = make_host(seed)
        params = jax.tree.map(put, host, src_shardings)
        moved = jreshard.transfer(params, src_shardings, dst_shardings)
        assert_tree_holds(moved, host, dst_shardings)
        assert_tree_holds(params, host, src_shardings)
        jax.tree.map(lambda leaf: leaf.delete(), params)
        assert_tree_holds(moved, host, dst_shardings)


@pytest.mark.parametrize("route", ROUTES)
def test_route(route):
    (src_ids, src_axes), (dst_ids, dst_axes) = ROUTES[route]
    src_shardings, dst_shardings = layout_trees(mesh(src_ids, **src_axes), mesh(dst_ids, **dst_axes))
    move_three_times(src_shardings, dst_shardings, lambda seed: host_tree(src_shardings, seed=seed))


def test_tables_cover_every_spec():
    for (src_ids, src_axes), (dst_ids, dst_axes) in ROUTES.values():
        src, dst = mesh(src_ids, **src_axes), mesh(dst_ids, **dst_axes)
        pairs = spec_pairs(src, dst)
        assert {a for a, _ in pairs} == set(specs(src))
        assert {b for _, b in pairs} == set(specs(dst))


def ranked(rank: int) -> tuple[int, ...]:
    return (4, 2, 3, 2, 4, 1, 3, 2, 2)[:rank]


@pytest.mark.parametrize(("src_ids", "dst_ids"), [([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 3], [2, 3, 0, 5])])
def test_every_rank(src_ids, dst_ids):
    src, dst = mesh(src_ids, x=2, y=2), mesh(dst_ids, x=2, y=2)
    src_specs = [(), ("x",), ("x", "y"), ("y", "x"), (None, "y", None, "x"), (("x", "y"),), ("x", None, None, "y"),
                 (None, "x", None, None, "y"), (("y", "x"), None, None, None, None, None, None, None)]  # fmt: skip
    dst_specs = [(), (("y", "x"),), ("y",), (None, "x"), (("x", "y"),), (None, "y", None, None, "x"), (None, "x"),
                 ("y", None, None, "x"), (None, "y", None, None, None, None, None, "x")]  # fmt: skip
    host = {f"rank {rank}": values(ranked(rank), seed=rank) for rank in range(9)}
    src_shardings = {label: named(src, *spec) for label, spec in zip(host, src_specs, strict=True)}
    dst_shardings = {label: named(dst, *spec) for label, spec in zip(host, dst_specs, strict=True)}
    move_three_times(
        src_shardings,
        dst_shardings,
        lambda seed: {f"rank {rank}": values(ranked(rank), seed=100 * seed + rank) for rank in range(9)},
    )


def test_strided_in_every_dim():
    """No two dims of such boxes can be merged into one."""
    src, dst = mesh(range(8), x=2, y=2, z=2), mesh([1, 0, 3, 2, 5, 4, 7, 6], a=2, b=2, c=2)
    src_shardings = {"w": named(src, "x", None, "y", None, "z", None, None)}
    dst_shardings = {"w": named(dst, None, "c", None, "b", None, "a", None)}
    shape = (2, 4, 6, 2, 4, 2, 3)
    move_three_times(src_shardings, dst_shardings, lambda seed: {"w": values(shape, seed=seed)})


def test_tensor_parallel_degree_above_the_number_of_heads():
    """Four devices share two key-value heads: each head lies on two of them, and nothing is padded."""
    trainer, rollout = mesh([0, 1, 2, 3], fsdp=4), mesh([4, 5, 6, 7], head=2, copy=2)
    src_shardings, dst_shardings = {"kv": named(trainer, "fsdp")}, {"kv": named(rollout, None, "head")}
    move_three_times(src_shardings, dst_shardings, lambda seed: {"kv": values((8, 2, 16), seed=seed)})


def test_large_leaf():
    """Bigger than any cache line, page or staging block."""
    src, dst = mesh([0, 1, 2], x=3), mesh([2, 3, 4, 5], x=2, y=2)
    shape = (1536, 1028)
    move_three_times(
        {"rows": named(src, "x"), "columns": named(src, "x")},
        {"rows": named(dst, ("y", "x")), "columns": named(dst, None, ("x", "y"))},
        lambda seed: {"rows": values(shape, seed=seed), "columns": values(shape, seed=seed + 10)},
    )


def test_many_small_leaves():
    src, dst = mesh([0, 1], x=2), mesh([1, 2], x=2)
    names = [f"{i:03d}" for i in range(300)]
    src_shardings = {name: named(src, "x") for name in names}
    dst_shardings = {name: named(dst, None, "x") for name in names}
    move_three_times(src_shardings, dst_shardings, lambda seed: host_tree(names, shape=(4, 6), seed=seed))


SAME_LAYOUTS = {
    "sharded": (([0, 1, 2, 3], {"x": 2, "y": 2}), ("x", "y")),
    "replicated": (([0, 1, 2, 3], {"x": 2, "y": 2}), ()),
    "one device": (([6], {"x": 1}), ()),
    "spec with a trailing None": (([0, 1], {"x": 2}), ("x", None)),
}


@pytest.mark.parametrize("layout", SAME_LAYOUTS)
def test_identical_sharding_is_a_copy(layout):
    (ids, axes), spec = SAME_LAYOUTS[layout]
    sharding = named(mesh(ids, **axes), *spec)
    for seed in range(ROUNDS):
        value = values(SHAPE, seed=seed)
        source = put(value, sharding)
        moved = jreshard.transfer(source, sharding, sharding)
        assert_holds(moved, value, sharding)
        assert not set(pointers(moved)) & set(pointers(source))
        source.delete()
        assert_holds(moved, value, sharding)


def test_identical_sharding_survives_a_donated_source():
    """The next step writes the source's memory; a result that shares it would change."""
    sharding = named(mesh([0, 1, 2, 3], x=2, y=2), "x", "y")
    value = numbers(SHAPE)
    step = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
    source = put(value, sharding)
    step(put(value, sharding)).block_until_ready()
    moved = jreshard.transfer(source, sharding, sharding)
    updated = step(source)
    assert_holds(moved, value, sharding)
    assert_holds(updated, value * 2 + 1, sharding)


def test_single_array_is_a_tree():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    value = values(SHAPE)
    assert_holds(jreshard.transfer(put(value, src), src, dst), value, dst)


def test_source_of_an_equivalent_sharding():
    """Another mesh, other axis names, the same bytes on the same devices: that is where the array lies."""
    lies_on = named(mesh([0, 1, 2, 3], x=2, y=2), ("x", "y"))
    said = named(mesh([0, 1, 2, 3], shard=4), "shard", None)
    dst = named(mesh([4, 5], x=2), None, "x")
    value = values(SHAPE)
    assert_holds(jreshard.transfer(put(value, lies_on), said, dst), value, dst)


def test_source_sharding_can_be_left_out():
    src, dst = named(mesh([0, 1, 2, 3], x=2, y=2), "y", "x"), named(mesh([4, 5]), None, "x")
    value = values(SHAPE)
    assert_holds(jreshard.transfer(put(value, src), None, dst), value, dst)


def test_source_on_one_device_without_a_mesh():
    """Arrays made without a mesh, committed or not, have a SingleDeviceSharding."""
    dst = named(mesh([2, 3]), "x")
    value = values(SHAPE)
    committed = jax.device_put(value, cpus()[1])
    with jax.default_device(cpus()[0]):
        uncommitted = jax.numpy.array(value)
    assert_tree_holds(jreshard.transfer([committed, uncommitted], None, dst), [value, value], dst)
    assert_holds(jreshard.transfer(committed, named(mesh([1])), dst), value, dst)
