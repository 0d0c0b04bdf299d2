"""Random meshes, specs, shapes and dtypes: what arrives, and what a plan says it will do."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from oracle import assert_tree_holds, mesh, named, poison, put, tree_pointers, values

import jreshard

MAX_RANK = 5
DTYPES = ["bool", "int8", "uint16", "bfloat16", "float32", "complex64", "float8_e5m2", "int4", "uint4"]
WHOLE_BYTE_DTYPES = [name for name in DTYPES if "int4" not in name]

# An execution compiles; a plan does not.
EXECUTIONS = settings.default.max_examples
PLANS = 5 * EXECUTIONS


# --- strategies ------------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    src: NamedSharding
    dst: NamedSharding

    def value(self, seed: int) -> np.ndarray:
        return values(self.shape, jnp.dtype(self.dtype), seed)


# Every way to write up to eight devices as up to three axes.
AXIS_SIZES = [
    (a, *rest)
    for a in range(1, 9)
    for rest in [(), *((b,) for b in range(1, 9)), *((b, c) for b in range(1, 5) for c in range(1, 5))]
    if math.prod((a, *rest)) <= 8
]


@st.composite
def meshes(draw, names: str) -> Mesh:
    sizes = draw(st.sampled_from(AXIS_SIZES))
    ids = draw(st.permutations(range(8)))[: math.prod(sizes)]
    return mesh(ids, **dict(zip(names, sizes, strict=False)))


@st.composite
def shardings(draw, on: Mesh, rank: int) -> NamedSharding:
    """Each axis on some dim or on none, in any order within a dim."""
    axes = draw(st.permutations(on.axis_names))
    dims = [draw(st.integers(-1, rank - 1)) for _ in axes]
    spec = [tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == d) for d in range(rank)]
    return named(on, *(entry or None for entry in spec))


def parts(sharding: NamedSharding, dim: int) -> int:
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


@st.composite
def leaves(draw, src: Mesh, dst: Mesh, dtypes: list[str]) -> Leaf:
    rank = draw(st.integers(0, MAX_RANK))
    one, other = draw(shardings(src, rank)), draw(shardings(dst, rank))
    scale = st.sampled_from([1, 1, 2, 3, 0] if rank < 4 else [1, 2])
    shape = tuple(math.lcm(parts(one, dim), parts(other, dim)) * draw(scale) for dim in range(rank))
    return Leaf(shape, draw(st.sampled_from(dtypes)), one, other)


@st.composite
def leaf_lists(draw, dtypes: list[str], max_size: int) -> list[Leaf]:
    """Leaves that share two meshes, as the weights of one model do."""
    src, dst = draw(meshes("xyz")), draw(meshes("abc"))
    return draw(st.lists(leaves(src, dst, dtypes), min_size=1, max_size=max_size))


# --- what arrives ----------------------------------------------------------------------------------------------------


class Trees(NamedTuple):
    src: dict[str, NamedSharding]
    dst: dict[str, NamedSharding]

    def host(self, drawn: list[Leaf], seed: int) -> dict[str, np.ndarray]:
        return {str(i): leaf.value(seed=100 * seed + i) for i, leaf in enumerate(drawn)}


def trees(drawn: list[Leaf]) -> Trees:
    return Trees({str(i): leaf.src for i, leaf in enumerate(drawn)}, {str(i): leaf.dst for i, leaf in enumerate(drawn)})


@settings(max_examples=EXECUTIONS)
@given(leaf_lists(DTYPES, max_size=4))
def test_every_byte_arrives(drawn):
    tree = trees(drawn)
    for seed in range(2):
        host = tree.host(drawn, seed)
        params = jax.tree.map(put, host, tree.src)
        assert_tree_holds(jreshard.transfer(params, tree.src, tree.dst), host, tree.dst)
        assert_tree_holds(params, host, tree.src)


@settings(max_examples=max(1, EXECUTIONS // 2))
@given(leaf_lists(DTYPES, max_size=3))
def test_every_byte_arrives_in_the_old_memory(drawn):
    tree = trees(drawn)
    old = jax.tree.map(put, jax.tree.map(poison, tree.host(drawn, 0)), tree.dst)
    for seed in range(3):
        host = tree.host(drawn, seed)
        addresses = tree_pointers(old)
        params = jax.tree.map(put, host, tree.src)
        new = jreshard.transfer(params, tree.src, tree.dst, into=old, donate=True)
        assert_tree_holds(new, host, tree.dst)
        found = zip(addresses, tree_pointers(new), jax.tree.leaves(new), strict=True)
        assert all(before == after for before, after, leaf in found if leaf.size)
        old = new


# --- what a plan says ------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __contains__(self, other: "Box") -> bool:
        inside = zip(self.start, other.start, other.stop, self.stop, strict=True)
        return all(a <= b <= c <= d for a, b, c, d in inside)

    def overlap(self, other: "Box") -> int:
        low, high = map(max, self.start, other.start), map(min, self.stop, other.stop)
        return math.prod(max(0, b - a) for a, b in zip(low, high, strict=True))


def shard_boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    def box(index: tuple[slice, ...]) -> Box:
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))

    return {device: box(index) for device, index in sharding.devices_indices_map(shape).items()}


def plan_of(drawn: list[Leaf]) -> Any:
    tree = trees(drawn)
    shapes = {str(i): jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for i, leaf in enumerate(drawn)}
    return jreshard.plan(shapes, tree.src, tree.dst)


def check_moves(leaf: Leaf, moves: list, devices: Any) -> None:
    """Each destination element is written once, from a device that holds it, and from afar only if it must be."""
    held, wanted = shard_boxes(leaf.src, leaf.shape), shard_boxes(leaf.dst, leaf.shape)
    counts = {device: np.zeros(leaf.shape, np.uint8) for device in wanted}
    for move in moves:
        sender, receiver = devices[move.src_rank], devices[move.dst_rank]
        box = Box(tuple(move.start), tuple(move.stop))
        assert box.size > 0, "a move of nothing"
        assert box in held[sender], f"{box} is not in what {sender} holds"
        assert box in wanted[receiver], f"{box} is not in what {receiver} wants"
        if sender != receiver and receiver in held:
            assert held[receiver].overlap(box) == 0, f"{receiver} has part of {box} already"
        counts[receiver][box.slices] += 1
    for device, count in counts.items():
        expected = np.zeros(leaf.shape, np.uint8)
        expected[wanted[device].slices] = 1
        assert np.array_equal(count, expected), f"on {device}"


@settings(max_examples=PLANS)
@given(leaf_lists(DTYPES, max_size=3))
def test_plan_writes_every_element_once(drawn):
    plan = plan_of(drawn)
    assert plan.num_leaves == len(drawn)
    moves = [plan.moves(i) for i in range(len(drawn))]
    for leaf, of_leaf in zip(drawn, moves, strict=True):
        check_moves(leaf, of_leaf, plan.devices)
    assert plan.num_moves == sum(map(len, moves))


def missing_bytes(leaf: Leaf) -> dict[jax.Device, int]:
    """What each destination device wants and does not hold."""
    held, wanted = shard_boxes(leaf.src, leaf.shape), shard_boxes(leaf.dst, leaf.shape)
    itemsize = jnp.dtype(leaf.dtype).itemsize
    return {
        device: itemsize * (box.size - (held[device].overlap(box) if device in held else 0))
        for device, box in wanted.items()
    }


@settings(max_examples=PLANS // 2)
@given(leaf_lists(WHOLE_BYTE_DTYPES, max_size=3))
def test_figures_of_a_plan(drawn):
    """The bytes on the wire are the payload: each missing byte once, nothing padded, nothing for what is there."""
    plan = plan_of(drawn)
    ranks = {plan.devices[rank]: rank for rank in range(len(plan.sent))}
    received = np.zeros(len(ranks), np.int64)
    for leaf in drawn:
        for device, size in missing_bytes(leaf).items():
            if size:  # arrays without elements have no ranks
                received[ranks[device]] += size
    total = sum(
        math.prod(leaf.dst.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize * leaf.dst.num_devices
        for leaf in drawn
    )
    assert np.array_equal(plan.received, received)
    assert plan.sent.sum() == plan.received.sum() == plan.bytes_moved
    assert plan.bytes_moved == plan.lower_bound
    assert plan.nbytes == total
    assert plan.bytes_local == total - plan.bytes_moved


@settings(max_examples=max(1, PLANS // 6))
@given(leaf_lists(DTYPES, max_size=3))
def test_plans_are_the_same_every_time(drawn):
    """All processes must come to the same plan by themselves."""
    one, other = plan_of(drawn), plan_of(drawn)
    assert one.to_json() == other.to_json()
    for i in range(len(drawn)):
        assert list(one.moves(i)) == list(other.moves(i))


def test_moves_by_path_and_by_index():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    shapes = {"w": [jax.ShapeDtypeStruct((4, 6), jnp.float32)], "b": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    plan = jreshard.plan(shapes, src, dst)
    assert list(plan.moves("['w'][0]")) == list(plan.moves(1))
    assert list(plan.moves("['b']")) == list(plan.moves(0))
    assert list(plan.moves(0)) != list(plan.moves(1))


def test_plan_of_arrays_is_that_of_their_shapes():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([1, 2]), None, "x")
    arrays = {"w": put(values((4, 6)), src), "b": put(values((4, 2), np.int8), src)}
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=src), arrays)
    assert jreshard.plan(arrays, src, dst).to_json() == jreshard.plan(shapes, None, dst).to_json()


def test_replicas_share_the_sending():
    """Four devices hold everything and four want it: none of the former sends more than its share."""
    src, dst = named(mesh([0, 1, 2, 3])), named(mesh([4, 5, 6, 7]))
    shapes = {str(i): jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}
    plan = jreshard.plan(shapes, src, dst)
    sent = sorted(plan.sent)[-4:]
    assert sum(sent) == 4 * 8 * 64 * 64 * 4
    assert sent[-1] <= 1.25 * sent[0]


def test_nothing_moves_to_where_it_lies():
    sharding = named(mesh([0, 1, 2, 3], x=2, y=2), "x")
    plan = jreshard.plan({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, sharding, sharding)
    assert plan.bytes_moved == plan.lower_bound == plan.num_messages == 0
    assert plan.bytes_local == plan.nbytes == 4 * 8 * 8 * 2
