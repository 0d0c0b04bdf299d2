"""What is moved in each case, and from where to where."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard import models

DTYPE = jnp.dtype(jnp.bfloat16)

Shapes = dict[str, tuple[int, ...]]

#: The spec of a leaf, from its name and shape.
Rule = Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclass(frozen=True)
class Side:
    """Where a tree lies: on which of the two devices, and how its leaves are sharded over axis `x`."""

    devices: tuple[int, ...]
    rule: Rule

    def shardings(self, devices: Sequence[Any], shapes: Shapes) -> dict[str, NamedSharding]:
        """The sharding of every leaf."""
        mesh = Mesh(np.array([devices[i] for i in self.devices]), ("x",))
        return {name: NamedSharding(mesh, self.rule(name, shape)) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Case:
    """One move.

    Attributes:
        what: the tree, in words; `{size}` and `{leaf}` stand for the bytes of all and of one leaf.
        way: from where to where, in words.
        shapes: the leaves, of `DTYPE`.
        src: where they lie.
        dst: where they go.
    """

    what: str
    way: str
    shapes: Callable[[], Shapes]
    src: Side
    dst: Side

    def scaled(self, scale: float) -> Shapes:
        """The leaves with about `scale` times the bytes: as many of them, with shorter sides."""
        shapes = self.shapes()
        return shapes if scale == 1 else {name: _shrunk(shape, scale) for name, shape in shapes.items()}

    def title(self, shapes: Shapes) -> str:
        """The case in words."""
        sizes = [nbytes(shape) for shape in shapes.values()]
        return f"{self.what.format(size=amount(sum(sizes)), leaf=amount(sizes[0]))}, {self.way}"


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


def _shrunk(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    side = math.sqrt(scale)
    sides = shape[-2:]
    return (*shape[:-2], *(max(8, round(n * side / 8) * 8) for n in sides))


def _whole(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec()


def _rows(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec("x")


def _columns(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(*[None] * (len(shape) - 1), "x")


def _tensor_parallel(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """As inference engines shard a decoder: what follows a nonlinearity by rows, the norms not at all."""
    if len(shape) == 1:
        return PartitionSpec()
    return PartitionSpec("x") if name.split(".")[-1] in ("embed", "o", "down") else PartitionSpec(None, "x")


def _one(rows: int) -> Callable[[], Shapes]:
    return lambda: {"w": (rows, 4096)}


def _many(count: int, shape: tuple[int, ...]) -> Callable[[], Shapes]:
    return lambda: {f"w{i}": shape for i in range(count)}


def _model(name: str) -> Callable[[], Shapes]:
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


_FIRST, _SECOND = Side((0,), _whole), Side((1,), _whole)
_ROWS, _COLUMNS = Side((0, 1), _rows), Side((0, 1), _columns)
_TP = Side((0, 1), _tensor_parallel)

_8_GIB, _2_GIB = _one(1 << 20), _one(1 << 18)
_LLAMA = "Llama-3.1-8B shapes ({size})"
_LLAMA_SHAPES, _QWEN_SHAPES = _model("llama-3.1-8b"), _model("qwen3-30b-a3b")

CASES = {
    "one": Case("one array of {size}", "0 -> 1", _8_GIB, _FIRST, _SECOND),
    "llama-8b": Case(_LLAMA, "0 -> 1", _LLAMA_SHAPES, _FIRST, _SECOND),
    "qwen3-30b-a3b": Case("Qwen3-30B-A3B shapes ({size})", "0 -> 1", _QWEN_SHAPES, _FIRST, _SECOND),
    "medium": Case("400 x {leaf}", "0 -> 1", _many(400, (2560, 4096)), _FIRST, _SECOND),
    "small": Case("2,000 x {leaf}", "0 -> 1", _many(2000, (64, 128)), _FIRST, _SECOND),
    "one-rows-to-1": Case("one array of {size}", "rows of {0,1} -> 1", _2_GIB, _ROWS, _SECOND),
    "one-0-to-columns": Case("one array of {size}", "0 -> columns of {0,1}", _2_GIB, _FIRST, _COLUMNS),
    "one-rows-to-columns": Case("one array of {size}", "rows -> columns of {0,1}", _2_GIB, _ROWS, _COLUMNS),
    "llama-8b-rows-to-1": Case(_LLAMA, "rows of {0,1} -> 1", _LLAMA_SHAPES, _ROWS, _SECOND),
    "llama-8b-0-to-columns": Case(_LLAMA, "0 -> columns of {0,1}", _LLAMA_SHAPES, _FIRST, _COLUMNS),
    "llama-8b-rows-to-columns": Case(_LLAMA, "rows -> columns of {0,1}", _LLAMA_SHAPES, _ROWS, _COLUMNS),
    "llama-8b-fsdp-to-tp": Case(_LLAMA, "fsdp=2 -> tp=2 on {0,1}", _LLAMA_SHAPES, _ROWS, _TP),
}
