"""Trees as people hold them, shardings as they give them, and the contexts in which they call."""

import dataclasses
import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.sharding import AxisType, NamedSharding
from oracle import assert_holds, assert_placed, assert_tree_holds, lendable, mesh, named, numbers, put, values

import jreshard

ROUNDS = 3
MATRIX = (8, 12)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="block", metadata={"static": True})


class Moments(NamedTuple):
    mean: Any
    variance: Any


class Policy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.norm(self.up(x), use_running_average=True)))


def source_sharding() -> NamedSharding:
    return named(mesh([0, 1, 2, 3], x=2, y=2), "x")


def destination_sharding() -> NamedSharding:
    return named(mesh([2, 3, 4, 5], x=2, y=2), "y")


def host_tree(kind: str, seed: int) -> Any:
    """Trees of NumPy arrays, all of them with a first dim that divides."""
    a, b, c = (values(MATRIX, seed=10 * seed + i) for i in range(3))
    return {
        "nested": {"layers": [{"w": a}, ({"w": b}, c)], "empty": {}, "none": None},
        "dataclass": {"first": Block(a, b), "second": Block(c, None, name="other")},
        "namedtuple": Moments(a, {"v": (b, None, c)}),
        "nothing": {"a": None, "b": [], "c": ()},
        "frozen": freeze({"params": {"dense": {"kernel": a, "bias": b}, "out": c}}),
        "partitioned": {"w": nn.Partitioned(a, names=("model", None)), "b": b, "c": c},
        "state": nnx.State(
            {"up": {"kernel": nnx.Param(a), "bias": nnx.Param(b)}, "empty": {}, "stat": nnx.BatchStat(c)}
        ),
    }[kind]


TREES = ["nested", "dataclass", "namedtuple", "nothing", "frozen", "partitioned", "state"]


@pytest.mark.parametrize("kind", TREES)
def test_tree(kind):
    """The result is the same tree, container by container, with the leaves where they belong."""
    src, dst = source_sharding(), destination_sharding()
    for seed in range(ROUNDS):
        host = host_tree(kind, seed)
        params = jax.tree.map(lambda value: put(value, src), host)
        assert_tree_holds(jreshard.transfer(params, src, dst), host, dst)


@pytest.mark.parametrize("kind", TREES)
def test_tree_of_shardings(kind):
    """The shardings come in the same containers as the weights: dicts, FrozenDicts, an nnx.State."""
    src_mesh, dst_mesh = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    host = host_tree(kind, 0)
    cycle = [("x",), (None, "y"), (("y", "x"),)]
    counter = iter(range(100))
    src = jax.tree.map(lambda _: named(src_mesh, *cycle[next(counter) % 3]), host)
    dst = jax.tree.map(lambda _: named(dst_mesh, *cycle[next(counter) % 3]), host)
    params = jax.tree.map(put, host, src)
    assert_tree_holds(jreshard.transfer(params, src, dst), host, dst)


def test_prefix_trees_of_shardings():
    src_mesh, dst_mesh = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    host = {
        "layers": [{"w": values(MATRIX, seed=i), "b": values((8,), seed=i)} for i in range(3)],
        "head": (values(MATRIX, seed=7), None, values(MATRIX, seed=8)),
    }
    src = {"layers": named(src_mesh, "x"), "head": named(src_mesh)}
    rows, columns, all_ = named(dst_mesh, "y"), named(dst_mesh, None, "x"), named(dst_mesh)
    dst = {"layers": [rows, {"w": columns, "b": all_}, rows], "head": (columns, None, all_)}
    full_src = {"layers": [{"w": src["layers"], "b": src["layers"]}] * 3, "head": (src["head"], None, src["head"])}
    full_dst = {
        "layers": [{"w": rows, "b": rows}, {"w": columns, "b": all_}, {"w": rows, "b": rows}],
        "head": (columns, None, all_),
    }
    params = jax.tree.map(put, host, full_src)
    for _ in range(ROUNDS):
        assert_tree_holds(jreshard.transfer(params, src, dst), host, full_dst)


def test_none_leaf_under_a_tree_of_shardings():
    src, dst = source_sharding(), destination_sharding()
    value = values(MATRIX)
    moved = jreshard.transfer({"w": put(value, src), "b": None}, {"w": src, "b": None}, {"w": dst, "b": None})
    assert moved["b"] is None
    assert_holds(moved["w"], value, dst)


def test_frozen_dict_against_dict_shardings():
    """Two kinds of mapping with the same keys say the same thing."""
    src, dst = source_sharding(), destination_sharding()
    host = freeze({"params": {"w": values(MATRIX), "b": values((8,))}})
    params = jax.tree.map(lambda value: put(value, src), host)
    moved = jreshard.transfer(params, {"params": src}, {"params": {"w": dst, "b": dst}})
    assert isinstance(moved, FrozenDict)
    assert_tree_holds(moved, host, dst)


def test_dict_against_frozen_dict_shardings():
    src, dst = source_sharding(), destination_sharding()
    host = {"params": {"w": values(MATRIX), "b": values((8,))}}
    params = jax.tree.map(lambda value: put(value, src), host)
    moved = jreshard.transfer(params, src, freeze({"params": {"w": dst, "b": dst}}))
    assert_tree_holds(moved, host, dst)


# --- flax NNX --------------------------------------------------------------------------------------------------------


def nnx_policy(sharding: NamedSharding) -> tuple[Any, nnx.State, nnx.State]:
    graph, state = nnx.split(Policy(nnx.Rngs(0)))
    host = jax.tree.map(np.array, state)
    return graph, host, jax.tree.map(lambda value: put(value, sharding), host)


def test_nnx_state_of_a_module():
    src, dst_mesh = named(mesh([0, 1, 2, 3], x=2, y=2), "x"), mesh([4, 5], tp=2)
    graph, host, state = nnx_policy(src)
    dst = jax.tree.map(lambda leaf: named(dst_mesh, *([None] * (leaf.ndim - 1)), "tp"), state)
    for _ in range(ROUNDS):
        moved = jreshard.transfer(state, src, dst)
        assert isinstance(moved, nnx.State)
        assert_tree_holds(moved, host, dst)
    inputs = jax.device_put(numbers((4, 8)), named(dst_mesh))
    expected = nnx.merge(graph, host)(numbers((4, 8)))
    np.testing.assert_allclose(nnx.merge(graph, moved)(inputs), expected, rtol=1e-5, atol=1e-6)


def test_nnx_state_with_keys_and_counters():
    src, dst = named(mesh([0, 1])), named(mesh([1, 2]))
    _, state = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    state = jax.tree.map(lambda leaf: jax.device_put(leaf, src), state)
    moved = jreshard.transfer(state, src, dst)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        assert after.dtype == before.dtype
        assert_placed(after, dst)


def test_metadata_of_another_mesh_is_ignored():
    """Names in boxed parameters are no shardings: only the arrays know where they lie."""
    src, dst = source_sharding(), destination_sharding()
    host = {"w": nn.Partitioned(values(MATRIX), names=("no such axis", "nor this"))}
    params = jax.tree.map(lambda value: put(value, src), host)
    assert_tree_holds(jreshard.transfer(params, None, dst), host, dst)


# --- leaves that are no jax.Array ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "named"])
def test_python_and_numpy_leaves(source):
    src, dst = named(mesh([0, 1])), named(mesh([2, 3]))
    host = {
        "bool": True,
        "int": 3,
        "float": 0.1,
        "complex": 1 + 2j,
        "numpy scalar": np.float32(7.5),
        "numpy": values((4, 6)),
        "numpy bf16": values((4,), jnp.bfloat16),
        "numpy int8": values((3,), np.int8),
        "strided": values((8, 6))[::2, ::-1],
    }
    params = host | {"array": put(values(MATRIX), src)}
    expected = jax.tree.map(lambda leaf: np.asarray(leaf, jnp.asarray(leaf).dtype), host) | {"array": values(MATRIX)}
    moved = jreshard.transfer(params, src if source else None, dst)
    assert_tree_holds(moved, expected, dst)


def test_numpy_leaves_are_sharded_and_copied():
    """A NumPy array that its owner writes to afterwards must not reach into the result."""
    dst = named(mesh([2, 3, 4, 5], x=2, y=2), "y", "x")
    value = values(MATRIX)
    mine = lendable(value)
    moved = jreshard.transfer({"w": mine, "all": mine}, None, {"w": dst, "all": named(dst.mesh)})
    jax.block_until_ready(moved)
    mine[...] = 0
    assert_holds(moved["w"], value, dst)
    assert_holds(moved["all"], value, named(dst.mesh))


def test_numpy_leaves_of_wide_types_become_what_jax_makes_of_them():
    dst = named(mesh([2, 3]), "x")
    moved = jreshard.transfer({"w": numbers((4,), np.float64), "i": np.arange(4)}, None, dst)
    assert_holds(moved["w"], numbers((4,), np.float64).astype(np.float32), dst)
    assert_holds(moved["i"], np.arange(4, dtype=np.int32), dst)


# --- shared and scattered leaves -------------------------------------------------------------------------------------


def test_shared_leaf_is_moved_once():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    value = values(MATRIX)
    for _ in range(ROUNDS):
        array = put(value, src)
        tied = {"embed": array, "head": {"w": array}, "own": put(value, src)}
        moved = jreshard.transfer(tied, src, dst)
        assert moved["embed"] is moved["head"]["w"]
        assert moved["own"] is not moved["embed"]
        assert_tree_holds(moved, {"embed": value, "head": {"w": value}, "own": value}, dst)
    alone = jreshard.plan({"embed": array}, src, dst)
    shared = jreshard.plan({"embed": array, "head": {"w": array}}, src, dst)
    assert alone.bytes_moved == value.nbytes
    assert shared.bytes_moved == alone.bytes_moved
    assert jreshard.plan(tied, src, dst).bytes_moved == 2 * alone.bytes_moved


def test_shared_leaf_to_two_layouts():
    src, dst_mesh = named(mesh([0, 1]), "x"), mesh([2, 3])
    value = values(MATRIX)
    array = put(value, src)
    dst = {"a": named(dst_mesh, "x"), "b": named(dst_mesh, None, "x"), "c": named(dst_mesh, "x")}
    moved = jreshard.transfer({"a": array, "b": array, "c": array}, src, dst)
    assert_tree_holds(moved, {"a": value, "b": value, "c": value}, dst)


def test_leaves_on_different_meshes():
    src = {
        "low": named(mesh([0, 1]), "x"),
        "high": named(mesh([4, 5, 6, 7], a=2, b=2), "b", "a"),
        "one": named(mesh([3])),
        "all": named(mesh(range(8)), "x"),
    }
    dst = {
        "low": named(mesh([2, 3]), None, "x"),
        "high": named(mesh([0, 1, 2], c=3), None, "c"),
        "one": named(mesh([7, 6, 5, 4], d=4), None, "d"),
        "all": named(mesh([1])),
    }
    for seed in range(ROUNDS):
        host = {label: values(MATRIX, seed=10 * seed + i) for i, label in enumerate(src)}
        params = jax.tree.map(put, host, src)
        assert_tree_holds(jreshard.transfer(params, src, dst), host, dst)


# --- where and how it is called --------------------------------------------------------------------------------------


def test_transfer_guard():
    """Nothing of a transfer passes through the host behind the caller's back."""
    src, dst = source_sharding(), destination_sharding()
    value = values(MATRIX)
    host = {"w": value, "n": value, "empty": np.zeros((0, 4), np.float32)}
    params = {**host, "w": put(value, src), "empty": put(host["empty"], src)}
    for _ in range(ROUNDS):
        with jax.transfer_guard("disallow"):
            moved = jax.block_until_ready(jreshard.transfer(params, src, dst))
        assert_tree_holds(moved, host, dst)


def test_transfer_guard_with_every_option():
    src, dst = source_sharding(), destination_sharding()
    value = numbers(MATRIX)
    expected = value.T.astype(jnp.bfloat16)
    params, old = {"w": put(value, named(src.mesh, None, "x"))}, {"v": put(expected, dst)}
    options = {"dtype": jnp.bfloat16, "transform": lambda tree: {"v": tree["w"].T}, "into": old, "donate": True}
    with jax.transfer_guard("disallow"):
        moved = jax.block_until_ready(jreshard.transfer(params, None, dst, verify=True, **options))
    assert_holds(moved["v"], expected, dst)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_under_a_mesh_that_is_neither(axis_type):
    src, dst = source_sharding(), destination_sharding()
    value = values(MATRIX)
    params = {"w": put(value, src)}
    with jax.set_mesh(mesh([6, 7], axis_type, other=2)):
        moved = jreshard.transfer(params, src, dst)
        assert_holds(moved["w"], value, dst)
    assert_holds(params["w"], value, src)


@pytest.mark.parametrize("under", ["source", "destination"])
def test_under_the_mesh_of_one_side(under):
    src, dst = source_sharding(), destination_sharding()
    value = values(MATRIX)
    params = {"w": put(value, src)}
    with jax.set_mesh(src.mesh if under == "source" else dst.mesh):
        assert_holds(jreshard.transfer(params, src, dst)["w"], value, dst)


AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("dst_type", AXIS_TYPES)
@pytest.mark.parametrize("src_type", AXIS_TYPES)
def test_axis_types(src_type, dst_type):
    """The result's type speaks of the destination's mesh, so that the next program accepts it."""
    src = named(mesh([0, 1, 2, 3], AXIS_TYPES[src_type], x=2, y=2), "x")
    dst = named(mesh([2, 3, 4, 5], AXIS_TYPES[dst_type], a=4), None, "a")
    value = numbers(MATRIX)
    moved = jreshard.transfer({"w": put(value, src)}, src, dst)["w"]
    assert_holds(moved, value, dst)
    typed = jax.typeof(moved).sharding
    assert typed.mesh == dst.mesh.abstract_mesh
    assert typed == jax.typeof(put(value, dst)).sharding
    doubled = jax.jit(lambda w: w * 2)(moved)
    assert doubled.sharding.device_set == dst.device_set
    assert np.array_equal(doubled, value * 2)


def test_explicit_mesh_on_the_same_devices():
    """Same devices, another mesh: the aval must not keep the old one."""
    src = named(mesh([0, 1, 2, 3], AxisType.Explicit, x=2, y=2), "x", "y")
    dst = named(mesh([0, 1, 2, 3], AxisType.Explicit, a=2, b=2), "a", "b")
    value = values(MATRIX)
    moved = jreshard.transfer({"w": put(value, src)}, src, dst)["w"]
    assert_holds(moved, value, dst)
    assert jax.typeof(moved).sharding.spec == dst.spec


SPELLINGS = [(), (None,), (None, None), ("y",), ("y", None), (("y",),), ("one", "y"), (None, ("one", "y"))]


def test_sharding_is_the_one_passed():
    """Not an equal layout in other words: trailing Nones, size-one axes and mesh order stay as written."""
    src = named(mesh([0, 1]), "x")
    on = mesh([3, 2], one=1, y=2)
    dst = {str(spec): named(on, *spec) for spec in SPELLINGS}
    host = {label: values(MATRIX, seed=i) for i, label in enumerate(dst)}
    params = jax.tree.map(lambda value: put(value, src), host)
    for _ in range(ROUNDS):
        moved = jreshard.transfer(params, src, dst)
        assert_tree_holds(moved, host, dst)
    for label, spec in zip(dst, SPELLINGS, strict=True):
        assert tuple(moved[label].sharding.spec) == tuple(dst[label].spec), spec


def test_source_released_while_in_flight():
    """The caller need not keep the source until the transfer is done."""
    src, dst = source_sharding(), destination_sharding()
    host = {str(i): values((512, 96), seed=i) for i in range(8)}
    for forget in ("drop", "delete"):
        params = jax.tree.map(lambda value: put(value, src), host)
        moved = jreshard.transfer(params, src, dst)
        if forget == "delete":
            jax.tree.map(lambda leaf: leaf.delete(), params)
        del params
        assert_tree_holds(moved, host, dst)


def test_python_numbers_stay_weakly_typed():
    dst = named(mesh([1, 2]))
    for value in (1.5, 3, True):
        arrived = jreshard.transfer({"n": value}, None, dst)["n"]
        assert arrived.weak_type == jnp.asarray(value).weak_type
        assert arrived.dtype == jnp.asarray(value).dtype
        assert arrived.sharding == dst
    assert not jreshard.transfer({"n": np.float32(1.5)}, None, dst)["n"].weak_type


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (2**40, "is 1099511627776; expected -2147483648 to 2147483647, which int32 holds; jax_enable_x64"),
        (2**70, "is 1180591620717411303424; expected -2147483648 to"),
        (np.int64(-(2**31) - 1), "is -2147483649; expected -2147483648 to"),
        (np.array([3, 2**40]), "has values from 3 to 1099511627776; expected"),
        (np.uint64(2**33), "is 8589934592; expected 0 to 4294967295, which uint32 holds"),
    ],
)
@pytest.mark.parametrize("transform", [None, lambda tree: {"m": tree["n"]}])
def test_whole_numbers_that_do_not_fit_are_refused(value, found, transform):
    dst = named(mesh([1, 2]))

    def move(n):
        with_array = {"n": n, "w": put(numbers((2, 2)), named(mesh([0])))}
        return jreshard.transfer(with_array, None, dst, transform=transform)

    refused = pytest.raises(ValueError, match=r"params\['n'\]: " + re.escape(found))
    with refused:
        move(value)
    [arrived, *_] = move(value * 0 + 1).values()  # another of the kind, which does fit
    assert (np.asarray(arrived) == 1).all()
    with refused:
        move(value)
    with pytest.raises(ValueError, match=re.escape(found)):
        jreshard.plan({"n": value}, None, dst)


def test_the_widest_whole_numbers():
    dst = named(mesh([1, 2]))
    with jax.enable_x64(True):
        assert int(jreshard.transfer({"n": 2**63 - 1}, None, dst)["n"]) == 2**63 - 1
        assert int(jreshard.transfer({"n": np.uint64(2**63)}, None, dst)["n"]) == 2**63
        with pytest.raises(ValueError, match=r"is 9223372036854775808; expected -\d+ to \d+, which int64 holds$"):
            jreshard.transfer({"n": 2**63}, None, dst)
