"""Arrays whose every element tells where it belongs, made and checked shard by shard on their own devices."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard.bench.shapes import DTYPE, Shapes

Shardings = dict[str, NamedSharding]
Tree = dict[str, Array]

#: What stands in memory that a transfer has still to write.
POISON = 0xFFFFFFFF

_PROGRAMS_KEPT = 512
_FREE_BITS = np.uint16(0x9FFF)  # all but the two highest bits of the exponent,
_EXPONENT_BITS = np.uint16(0x2000)  # of which one is set
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def make(shapes: Shapes, shardings: Shardings, *, poison: bool = False) -> Tree:
    """A tree in which each leaf has a pattern of its own; with `poison`, none of them right."""
    tables = _Tables(shapes, shardings, poison=poison)
    tree = {}
    for i, (name, shape) in enumerate(shapes.items()):
        sharding = shardings[name]
        if table := tables.of(name):
            tree[name] = _filler(shape, sharding)(table[0], i)
        else:
            tree[name] = jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=DTYPE)
    return tree


def wrong_leaves(tree: Tree, shapes: Shapes, shardings: Shardings) -> list[str]:
    """The leaves whose shards in this process are not, in every bit, those of `make`."""
    tables = _Tables(shapes, shardings, poison=False)
    verdicts: dict[str, list[Array]] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if tree[name].sharding != shardings[name]:
            return [name]
        if table := tables.of(name):
            differs = _comparer(shape, shardings[name])(tree[name], table[0], i)
            verdicts[name] = [shard.data for shard in differs.addressable_shards]
    found = jax.device_get(verdicts)  # all at once
    return [name for name in verdicts if any(map(np.any, found[name]))]


def part_of(tree: Tree, shardings: Shardings) -> Tree:
    """The arrays as some of their devices hold them, whose shards are those that `shardings` asks for."""

    def part(leaf: Array, sharding: NamedSharding) -> Array:
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        mine = [shards[device] for device in sharding.addressable_devices_indices_map(leaf.shape)]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, mine, dtype=leaf.dtype)

    return {name: part(leaf, shardings[name]) for name, leaf in tree.items()}


class _Tables:
    """For each device a table of all leaves: their seeds, and where the device's shards of them start."""

    def __init__(self, shapes: Shapes, shardings: Shardings, *, poison: bool) -> None:
        self._shape = len(shapes), 1 + max(map(len, shapes.values()))
        self._shardings = shardings
        self._rows: dict[Any, np.ndarray] = {}
        self._made: dict[Mesh, Array] = {}
        for i, (name, shape) in enumerate(shapes.items()):
            for device, index in shardings[name].addressable_devices_indices_map(shape).items():
                assert index is not None, "which JAX's types allow and NamedSharding does not do"
                table = self._rows.setdefault(device, np.zeros((1, *self._shape), np.uint32))
                starts = [part.indices(n)[0] for part, n in zip(index, shape, strict=True)]
                table[0, i, : 1 + len(shape)] = POISON - i if poison else i, *starts

    def of(self, name: str) -> list[Array]:
        """The tables as an array over the mesh of a leaf, one a device; none if this process has no device there."""
        mesh = self._shardings[name].mesh
        assert isinstance(mesh, Mesh), "not one without devices"
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        if not sharding.addressable_devices:
            return []
        if mesh not in self._made:
            mine = [jax.device_put(self._rows[d], d) for d in sharding.addressable_devices]
            shape = mesh.size, *self._shape
            self._made[mesh] = jax.make_array_from_single_device_arrays(shape, sharding, mine)
        return [self._made[mesh]]


# One program for all devices of a mesh, in which each does its own part by itself.


@lru_cache(_PROGRAMS_KEPT)
def _filler(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[Array, int], Array]:
    def fill(table: Array, leaf: Array) -> Array:
        return jax.lax.bitcast_convert_type(_bits(sharding.shard_shape(shape), table[0, leaf]), DTYPE)

    specs = PartitionSpec(sharding.mesh.axis_names), PartitionSpec()
    filled = jax.shard_map(fill, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
    return jax.jit(filled, out_shardings=sharding)


@lru_cache(_PROGRAMS_KEPT)
def _comparer(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[Array, Array, int], Array]:
    def differs(shard: Array, table: Array, leaf: Array) -> Array:
        expected = _bits(sharding.shard_shape(shape), table[0, leaf])
        return jnp.any(jax.lax.bitcast_convert_type(shard, jnp.uint16) != expected)[None]

    each = PartitionSpec(sharding.mesh.axis_names)
    specs = sharding.spec, each, PartitionSpec()
    return jax.jit(jax.shard_map(differs, mesh=sharding.mesh, in_specs=specs, out_specs=each, check_vma=False))


def _bits(shape: tuple[int, ...], place: Array) -> Array:
    """A hash of seed and position: a misplaced element passes once in 16,384, a misplaced box never.

    As bfloat16 they are normal numbers: where `device_put` goes through a program, the bits of NaNs may change.
    """
    hashed = jnp.full(shape, place[0] * _ODD[0])
    for dim in range(len(shape)):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, dim) + place[1 + dim]
        hashed = (hashed ^ position) * _ODD[dim + 1]
        hashed = hashed ^ (hashed >> 15)
    return (hashed >> 16).astype(jnp.uint16) & _FREE_BITS | _EXPONENT_BITS
