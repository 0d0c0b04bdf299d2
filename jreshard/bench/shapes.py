"""Trees of weights to move: the names and shapes of their leaves, all of one dtype."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jreshard import models

DTYPE = jnp.dtype(jnp.bfloat16)

Shapes = dict[str, tuple[int, ...]]


def nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of a leaf."""
    return int(math.prod(shape) * DTYPE.itemsize)


def amount(size: int) -> str:
    """Bytes in words: `16.1 GB`, or `8 GiB` where that is exact."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size % (1 << power) == 0 and 1 <= size >> power < 1024:
            return f"{size >> power} {unit}"
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return f"{size} B"


def scaled(shapes: Shapes, scale: float, multiple: int = 8) -> Shapes:
    """The leaves with about `scale` times the bytes: as many of them, the last two sides shorter.

    Args:
        shapes: the leaves.
        scale: the factor on their bytes.
        multiple: what the shortened sides are multiples of, so that they can still be sharded.
    """
    if scale == 1:
        return shapes
    factor = math.sqrt(scale) / multiple

    def shorter(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], *(multiple * max(1, round(n * factor)) for n in shape[-2:]))

    return {name: shorter(shape) for name, shape in shapes.items()}


def one(rows: int) -> Callable[[], Shapes]:
    """One array, of 8 KiB a row."""
    return lambda: {"w": (rows, 4096)}


def many(count: int, shape: tuple[int, ...]) -> Callable[[], Shapes]:
    """Arrays that are all alike."""
    return lambda: {f"w{i}": shape for i in range(count)}


def model(name: str) -> Callable[[], Shapes]:
    """The weights of a model, one array a weight; the experts of a layer are stacked."""

    def shapes() -> Shapes:
        out: Shapes = {}
        weights, _ = jax.tree_util.tree_flatten_with_path(models.weights(name), is_leaf=_is_weight)
        for path, weight in weights:
            leaf, shape = jax.tree_util.keystr(path, simple=True, separator="."), _in_matrices(weight)
            if weight.axes[0] == "layers":
                out |= {leaf.replace("layers", str(i), 1): shape[1:] for i in range(shape[0])}
            else:
                out[leaf] = shape
        return out

    return shapes


def _is_weight(node: Any) -> bool:
    return isinstance(node, models.Weight)


def _in_matrices(weight: models.Weight) -> tuple[int, ...]:
    """The shape with the heads and their width as one dim, as in published checkpoints."""
    shape: list[int] = []
    for size, axis in zip(weight.shape, weight.axes, strict=True):
        if axis == "head_dim":
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)
