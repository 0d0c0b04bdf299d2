"""How one array lies on the devices of one mesh. Pure NumPy: no device is touched."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AnyMesh = Mesh | AbstractMesh


@dataclass(frozen=True)
class Layout:
    """The parts of an array along each dim, and which part each rank of the mesh holds.

    Ranks whose parts are equal are replicas. Every dim divides evenly, as JAX asks of a `NamedSharding`.

    Attributes:
        shape: the global shape, `ndim` sizes in elements.
        parts: the number of parts along each dim.
        part_of: `int64[ranks of the mesh, ndim]`, the index of each rank's part along each dim.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    part_of: np.ndarray

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of every shard, in elements."""
        return tuple(size // parts for size, parts in zip(self.shape, self.parts, strict=True))

    @cached_property
    def box_of(self) -> np.ndarray:
        """`int64[ranks]`: each rank's part as one number, row-major over `parts`. Replicas have the same."""
        box = np.zeros(len(self.part_of), np.int64)
        for dim, parts in enumerate(self.parts):
            box = box * parts + self.part_of[:, dim]
        return box

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that place an array alike."""
        return self.shape, *self.division

    @cached_property
    def division(self) -> tuple[Any, ...]:
        """Equal for layouts that divide arrays among the ranks alike, of whatever sizes."""
        return self.parts, self.part_of.shape, self.part_of.tobytes()


class LayoutError(ValueError):
    """A sharding that cannot lay out an array of this shape."""


def layout_of(shape: tuple[int, ...], mesh: AnyMesh, spec: PartitionSpec) -> Layout:
    """The layout of an array of `shape` under `NamedSharding(mesh, spec)`; rank order is `mesh.devices.flat`.

    Raises:
        LayoutError: the spec is longer than the shape, is unreduced or unconstrained, or a dim does not divide.

    Example:
        >>> layout_of((8, 6), AbstractMesh((2, 2), ("x", "y")), PartitionSpec(("x", "y"), None)).parts
        (4, 1)
    """
    if getattr(spec, "unreduced", None):
        raise LayoutError(f"the spec {spec} is unreduced over {sorted(spec.unreduced)}; reduce the array first")
    if getattr(spec, "reduced", None):
        raise LayoutError(f"the spec {spec} is reduced over {sorted(spec.reduced)}; give it without `reduced`")
    if len(spec) > len(shape):
        raise LayoutError(f"the spec {spec} names {len(spec)} dims, the array has {len(shape)}: shape {shape}")
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    ranks = math.prod(mesh.axis_sizes)
    coords, stride = {}, ranks
    for axis, size in sizes.items():
        stride //= size
        coords[axis] = np.arange(ranks) // stride % size
    parts, part_of = [], np.zeros((ranks, len(shape)), np.int64)
    for dim, size in enumerate(shape):
        axes = _axes_of(spec, dim)
        count = math.prod(sizes[axis] for axis in axes)
        if size % count:
            raise LayoutError(
                f"dim {dim} of size {size} (shape {shape}) does not divide by {count}, {_blame(axes, sizes)}"
            )
        for axis in axes:
            part_of[:, dim] = part_of[:, dim] * sizes[axis] + coords[axis]
        parts.append(count)
    return Layout(tuple(shape), tuple(parts), part_of)


def layout_of_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
    """The layout of an array of `shape` under `sharding`."""
    return layout_of(shape, sharding.mesh, sharding.spec)


def _axes_of(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    if entry is PartitionSpec.UNCONSTRAINED:
        raise LayoutError(f"dim {dim} is UNCONSTRAINED in the spec {spec}; name its mesh axes, or None")
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _blame(axes: tuple[str, ...], sizes: dict[str, int]) -> str:
    named = ", ".join(f"{axis!r} of size {sizes[axis]}" for axis in axes)
    return f"the mesh {'axis' if len(axes) == 1 else 'axes'} {named}"
