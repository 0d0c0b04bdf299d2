"""Arrays whose every element tells where it belongs, made and checked shard by shard on their own devices."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jreshard.bench.cases import DTYPE, Shapes

Shardings = Mapping[str, NamedSharding]
Tree = dict[str, Array]

#: What stands in memory that a transfer has still to write.
POISON = 0xFFFFFFFF

_FREE_BITS = np.uint16(0x9FFF)  # all but the two highest bits of the exponent,
_EXPONENT_BITS = np.uint16(0x2000)  # of which one is set
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def make(shapes: Shapes, shardings: Shardings, *, poison: bool = False) -> Tree:
    """A tree in which each leaf has a pattern of its own; with `poison`, none of them right."""
    return {
        name: _make_leaf(shape, shardings[name], POISON - i if poison else i)
        for i, (name, shape) in enumerate(shapes.items())
    }


def wrong_leaves(tree: Tree, shapes: Shapes, shardings: Shardings) -> list[str]:
    """The leaves whose shards in this process are not, in every bit, those of `make`."""
    verdicts: dict[str, list[Any]] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if tree[name].sharding != shardings[name]:
            return [name]
        places = _places(shape, shardings[name], i)
        shards = {shard.device: shard.data for shard in tree[name].addressable_shards}
        verdicts[name] = [_differs(shards[device], place) for device, (_, place) in places.items()]
    return [name for name, of_leaf in verdicts.items() if any(map(bool, of_leaf))]


def _make_leaf(shape: tuple[int, ...], sharding: NamedSharding, seed: int) -> Array:
    shards = [_fill(local, place) for local, place in _places(shape, sharding, seed).values()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=DTYPE)


def _places(shape: tuple[int, ...], sharding: NamedSharding, seed: int) -> dict[Any, tuple[tuple[int, ...], Array]]:
    """For each device of this process: the shape of its shard, and there the seed and where the shard starts."""
    out = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None, "which JAX's types allow and NamedSharding does not do"
        starts = [part.indices(n)[0] for part, n in zip(index, shape, strict=True)]
        place = jax.device_put(np.array([seed, *starts], np.uint32), device)
        out[device] = sharding.shard_shape(shape), place
    return out


@partial(jax.jit, static_argnums=0)
def _fill(shape: tuple[int, ...], place: Array) -> Array:
    return jax.lax.bitcast_convert_type(_bits(shape, place), DTYPE)


@jax.jit
def _differs(shard: Array, place: Array) -> Array:
    return jnp.any(jax.lax.bitcast_convert_type(shard, jnp.uint16) != _bits(shard.shape, place))


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
