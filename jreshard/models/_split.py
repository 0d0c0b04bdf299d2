"""How the dims of a weight are split over the axes of a mesh, and what is wrong where they cannot be."""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jreshard._layout import AnyMesh
from jreshard.models._weights import Weight, is_weight

#: Logical axes with few heads. Over the ranks beyond their number they are replicated, as serving engines do it, where
#: any other axis that does not divide is an error.
SHARED_HEADS = frozenset({"kv_heads", "ssm_groups"})

#: For each dim the mesh axes that split it, each with the number of parts that it makes: less than the axis has ranks
#: where these share.
Split: TypeAlias = tuple[tuple[tuple[str, int], ...], ...]

#: For each mesh axis the sizes of the axes that stand in its place; more than one where ranks share heads.
Parts: TypeAlias = Mapping[str, tuple[int, ...]]

_SIZES_SHOWN = 12
_LEAVES_SHOWN = 4


class Faults:
    """Collects what does not fit a mesh, alike weights together, to raise it all at once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Callable[[Weight], bool]]] = {}

    def add(self, what: str, message: str, concerns: Callable[[Weight], bool]) -> None:
        """Notes that `what` does not fit, in the weights that `concerns` tells from the others."""
        self._found.setdefault((what, message), []).append(concerns)

    def raise_any(self, tree: Any, sizes: Mapping[str, int]) -> None:
        """Raises `ValueError` with the paths that the bad weights have in `tree`, if there are any."""
        if not self._found:
            return
        flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)[0]
        lines = []
        for (what, message), tests in self._found.items():
            paths = [path for path, weight in flat if any(concerns(weight) for concerns in tests)]
            shown = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths[:_LEAVES_SHOWN]]
            more = f" and {len(paths) - _LEAVES_SHOWN} more" if len(paths) > _LEAVES_SHOWN else ""
            lines.append(f"  {what} {message}: {', '.join(shown)}{more}")
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError("\n".join([f"the weights do not fit the mesh {mesh}", *lines]))


def split_of(weight: Weight, axes_of_dims: Sequence[Sequence[str]], sizes: Mapping[str, int], faults: Faults) -> Split:
    """How `weight`, and all that are alike, is split by the mesh axes of each dim; faults are noted."""
    out = []
    for size, logical, axes in zip(weight.shape, weight.axes, axes_of_dims, strict=True):
        left = size
        dim: list[tuple[str, int]] = []
        for axis in axes:
            parts = sizes[axis]
            if left % parts and logical in SHARED_HEADS and parts % left == 0:
                parts = left
            if left % parts:
                faults.add(f"{logical} of size {size}", indivisible(size, axes, sizes, logical), weight.is_alike)
                break
            left //= parts
            if parts > 1:
                dim.append((axis, parts))
        out.append(tuple(dim))
    return tuple(out)


def indivisible(size: int, axes: Sequence[str], sizes: Mapping[str, int], logical: str | None) -> str:
    """Says that `size` does not divide among the mesh `axes`, and what would."""
    count = math.prod(sizes[axis] for axis in axes)
    named = ", ".join(f"{axis}={sizes[axis]}" for axis in axes)
    divisors = [n for n in range(1, min(size, 4 * count) + 1) if size % n == 0][-_SIZES_SHOWN:]
    would = f"{' x '.join(axes)} of {', '.join(map(str, divisors))} would"
    if logical in SHARED_HEADS:
        would += f", and so would multiples of {size}"
    if logical == "layers":
        would += f"; or stack the layers of each stage apart, with stages={count} and stage_axis={axes[0]!r}"
    return f"does not divide by {named}; {would}"


def parts_of(splits: Collection[Split], sizes: Mapping[str, int]) -> Parts:
    """The sizes into which each mesh axis is taken apart: any number of parts asked for is the product of the first.

    Raises:
        ValueError: two numbers of parts of one axis do not divide each other.
    """
    wanted: dict[str, set[int]] = {axis: {size} for axis, size in sizes.items()}
    for split in splits:
        for axis, count in itertools.chain.from_iterable(split):
            wanted[axis].add(count)
    out = {}
    for axis, counts in wanted.items():
        chain = list(itertools.pairwise(sorted(counts | {1})))
        if any(big % small for small, big in chain):
            some = " and ".join(map(str, sorted(counts - {sizes[axis]})))
            raise ValueError(f"{axis}={sizes[axis]} cannot be shared by {some} heads: neither divides the other")
        out[axis] = tuple(big // small for small, big in chain) or (1,)
    return out


def refined(mesh: AnyMesh, parts: Parts) -> AnyMesh:
    """The mesh of the same devices in the same order, with its axes taken apart."""
    if all(len(parts[axis]) == 1 for axis in mesh.axis_names):
        return mesh
    shape = [size for axis in mesh.axis_names for size in parts[axis]]
    names = [name for axis in mesh.axis_names for name in _part_names(axis, parts)]
    types = [t for axis, t in zip(mesh.axis_names, mesh.axis_types, strict=True) for _ in parts[axis]]
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices.reshape(shape), names, axis_types=tuple(types))
    return AbstractMesh(tuple(shape), tuple(names), axis_types=tuple(types))


def spec_of(split: Split, parts: Parts) -> PartitionSpec:
    """The spec for the refined mesh that splits as `split` says."""
    dims: list[tuple[str, ...]] = []
    for dim in split:
        names: list[str] = []
        for axis, count in dim:
            taken = list(itertools.accumulate(parts[axis], operator.mul)).index(count) + 1
            names += _part_names(axis, parts)[:taken]
        dims.append(tuple(names))
    return PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in dims))


def _part_names(axis: str, parts: Parts) -> list[str]:
    return [axis if i == 0 else f"{axis}_{i}" for i in range(len(parts[axis]))]
