"""Where a tree lies: on which devices, and how its leaves are sharded there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard.bench.shapes import Shapes

#: The spec of a leaf over the axis `x`, from its name and shape.
Rule = Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclass(frozen=True)
class Side:
    """The source or the destination of a case.

    Attributes:
        devices: their places among all devices.
        rule: how leaves are sharded over axis `x`.
        replicas: how many times the devices hold the tree, along an axis of its own.
    """

    devices: tuple[int, ...]
    rule: Rule
    replicas: int = 1

    def shardings(self, devices: Sequence[Any], shapes: Shapes) -> dict[str, NamedSharding]:
        """The sharding of every leaf."""
        mine = np.array([devices[i] for i in self.devices], dtype=object).reshape(self.replicas, -1)
        mesh = Mesh(mine, ("replica", "x"))
        return {name: NamedSharding(mesh, self.rule(name, shape)) for name, shape in shapes.items()}


def whole(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Not split: every device holds all."""
    return PartitionSpec()


def rows(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """By the first dim, as FSDP does; experts that are stacked are thereby dealt out."""
    return PartitionSpec("x")


def columns(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """By the last dim."""
    return PartitionSpec(*[None] * (len(shape) - 1), "x")


def tensor_parallel(name: str, shape: tuple[int, ...]) -> PartitionSpec:
    """As inference engines shard a decoder: what follows a nonlinearity by rows, the norms not at all.

    The matrices of stacked experts are split like single ones.
    """
    if len(shape) == 1:
        return PartitionSpec()
    by_rows = name.split(".")[-1] in ("embed", "o", "down")
    return PartitionSpec(*[None] * (len(shape) - (2 if by_rows else 1)), "x")
