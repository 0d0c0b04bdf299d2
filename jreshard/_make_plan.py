"""Reads what the caller hands over, and builds the plan or says all that is wrong with it."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jreshard._layout import AnyMesh, LayoutError, layout_of_sharding
from jreshard._leaves import FlatTree, LeafErrors, Path, PathText, describe, match_shardings
from jreshard._paper import on_paper
from jreshard._plan import Plan
from jreshard._planning.route import Leaf, Route, Target
from jreshard._planning.spread import Spread, take_turns
from jreshard._runtime.party import Party
from jreshard._runtime.transform import SourceTransform, Transform, cast_floating, device_sets
from jreshard._signature import Signature, alias_pattern
from jreshard._sources import Source, read_source
from jreshard._wire import UNUSABLE

# What is computed with in 64 bits stays exact below these.
_LARGEST_ARRAY = 1 << 45  # elements
_LARGEST_PLAN = 1 << 60  # bytes on all destination devices together


def build_plan(
    params: Any,
    src_sharding: Any,
    dst_sharding: Any,
    *,
    dtype: Any,
    transform: Transform | None,
    executes: bool,
    replan: Callable[[Any], Plan],
    timeout: float,
    spread: Callable[[Sequence[Route]], Spread | None] = take_turns,
) -> Plan:
    """The plan for a tree; see `jreshard.plan` for the arguments.

    Args:
        executes: whether the leaves must be arrays that can be moved now; otherwise `ShapeDtypeStruct`s and meshes
            without devices will do.
        replan: how the plan is made again for a tree whose leaves are shared in another way.
        timeout: seconds in which other processes have to come, where they tell how a transform's result lies.
        spread: chooses who sends what.
    """
    doing = "transfer" if executes else "plan"
    errors = LeafErrors(doing)
    dtype = _floating(dtype)
    given = FlatTree.of(params)
    sources = _read_sources(given, src_sharding, errors, executes)
    pattern = alias_pattern([x for _, x in given.leaves])
    applied: SourceTransform | None = None
    out_tree, made, out_pattern = given, sources, pattern
    if transform is not None:
        errors.raise_any()
        if not callable(transform):
            raise TypeError(
                f"transform is {transform!r}; expected a function from params to the tree that is to arrive"
            )
        applied = _apply(transform, params, cast(list[Source], sources), dst_sharding, dtype, errors, timeout)
        out_tree, made, out_pattern = FlatTree.of(applied.out_info), applied.sources, None
        errors = LeafErrors(doing, root="transform(params)")
    targets = _targets(out_tree, made, out_pattern, dst_sharding, dtype, errors, executes)
    errors.raise_any()
    signature = Signature(given.structure, tuple(cast(list[Source], sources)), pattern)
    routes = _routes(targets)
    _check_size(routes)
    spread_out = spread(routes)
    return Plan(signature, out_tree.structure, targets, routes, applied, replan, spread_out)


def _floating(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))
    except TypeError:
        raise TypeError(f"dtype is {dtype!r}; expected a floating dtype, such as jnp.bfloat16") from None
    if dtype.name in UNUSABLE:
        raise TypeError(f"dtype is {dtype}, which XLA cannot compute with; expected another")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype is {dtype}; expected a floating dtype: only floating leaves are cast")
    return dtype


def _read_sources(params: FlatTree, src_sharding: Any, errors: LeafErrors, executes: bool) -> list[Source | None]:
    """What each leaf is; `None` where that is a fault, noted in `errors`."""
    wanted = match_shardings(src_sharding, params, "src_sharding", errors)
    errors.raise_any()
    sources: list[Source | None] = []
    shardings = _Shardings(executes)
    alike: dict[tuple[int, int], Source] = {}  # models have many leaves of a kind, which share their descriptions
    for (path, x), sharding in zip(params.leaves, wanted, strict=True):
        source = alike.get((id(x), id(sharding)))
        if source is None:
            source = read_source(x, sharding, path, errors, structs=not executes)
            if source is not None and source.sharding is not None:
                shardings.check(source, source.sharding, "lies", path, errors)
                if type(x) is jax.ShapeDtypeStruct and not errors:
                    alike[id(x), id(sharding)] = source
        sources.append(source)
    return sources


def _apply(
    transform: Transform,
    params: Any,
    sources: Sequence[Source],
    dst_sharding: Any,
    dtype: Any,
    errors: LeafErrors,
    timeout: float,
) -> SourceTransform:
    if any(s.sharding and not isinstance(s.sharding.mesh, Mesh) for s in sources):
        raise ValueError("transform is compiled for the source devices; the meshes are abstract and have none")
    if len(sets := device_sets(sources)) > 1:
        raise ValueError(f"transform runs as one program; the leaves lie on {len(sets)} different sets of devices")
    party = _party_of([*(s.sharding for s in sources), *jax.tree.leaves(dst_sharding)])
    if not party.takes_part:
        raise ValueError(
            "transform is compiled for the source devices, and told to processes with destination devices; this one "
            "has neither"
        )
    applied = SourceTransform(transform, params, sources, dtype, party, timeout)
    applied.check(errors)
    return applied


def _party_of(shardings: Sequence[Any]) -> Party:
    """The processes of the devices in all of these that are shardings over devices."""
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)}
    return Party([device for mesh in meshes for device in mesh.devices.flat])


def _targets(
    tree: FlatTree,
    sources: Sequence[Source | None],
    pattern: tuple[int, ...] | None,
    dst_sharding: Any,
    dtype: Any,
    errors: LeafErrors,
    executes: bool,
) -> list[Target]:
    """Where each leaf goes; faults are noted in `errors`, those of leaves whose source is at fault too."""
    mismatches = len(errors)
    wanted = match_shardings(dst_sharding, tree, "dst_sharding", errors)
    if len(errors) > mismatches:
        return []
    targets: list[Target] = []
    shardings = _Shardings(executes)
    first: dict[Any, int] = {}
    text = PathText()
    alike: dict[tuple[int, int], Target] = {}  # by the very objects, which `sources` and `wanted` keep alive
    for i, ((path, _), source, dst) in enumerate(zip(tree.leaves, sources, wanted, strict=True)):
        if (first_alike := alike.get((id(source), id(dst)))) is None:
            if not isinstance(dst, NamedSharding):
                errors.add(path, f"dst_sharding is {dst}; expected a NamedSharding", kind=TypeError)
                continue
            if source is None:
                continue
            shardings.check(source, dst, "is to go", path, errors)
            out_dtype = cast_floating(source.dtype, dtype)
            first_alike = Target("", source.shape, out_dtype, source.sharding, source.dtype, dst, i)
            if not errors:
                alike[id(source), id(dst)] = first_alike
        _, shape, out_dtype, src, src_dtype, to, _ = first_alike
        same_as = first.setdefault((pattern[i], to), i) if pattern and src else i
        targets.append(Target(text.of(path), shape, out_dtype, src, src_dtype, to, same_as))
    return targets


def _routes(targets: Sequence[Target]) -> list[Route]:
    """The moving leaves, grouped by their pair of meshes."""
    groups: dict[Any, list[Leaf]] = {}
    group_of: dict[tuple[int, int], list[Leaf]] = {}  # by the very shardings, which most leaves share
    for i, t in enumerate(targets):
        if t.src is not None and t.same_as == i and not t.is_made_in_place:
            key = id(t.src), id(t.dst)
            if key not in group_of:
                group_of[key] = groups.setdefault((t.src.mesh, t.dst.mesh), [])
            group_of[key].append(Leaf(i, t.path, t.shape, t.dtype, t.src, t.dst))
    return [Route(src_mesh, dst_mesh, leaves) for (src_mesh, dst_mesh), leaves in groups.items()]


def _check_size(routes: Sequence[Route]) -> None:
    """Refuses plans whose bytes cannot be counted."""
    total = 0
    for route in routes:
        counts = Counter(route.kind_of)
        for i, kind in enumerate(route.kinds):
            total += math.prod(kind.dst.shard_shape) * len(route.dst_devices) * kind.wire.bits // 8 * counts[i]
    if total > _LARGEST_PLAN:
        raise ValueError(f"plan: all destination shards together have {total} bytes; expected {_LARGEST_PLAN} at most")


class _Shardings:
    """Checks where leaves lie or go, each combination of shape and sharding once."""

    def __init__(self, executes: bool) -> None:
        self._executes = executes
        self._faults: dict[tuple[tuple[int, ...], NamedSharding], str | None] = {}
        self._fine: dict[tuple[int, int], tuple[Source, NamedSharding]] = {}  # by the very objects, kept alive
        self._meshes: dict[AnyMesh, str | None] = {}

    def check(self, source: Source, sharding: NamedSharding, how: str, path: Path, errors: LeafErrors) -> None:
        """Notes in `errors` why a leaf cannot be on `sharding`, if it cannot."""
        if (id(source), id(sharding)) in self._fine:
            return
        key = source.shape, sharding
        if key not in self._faults:
            self._faults[key] = self._mesh_fault(sharding.mesh) or _layout_fault(*key)
        if (fault := self._faults[key]) is not None:
            errors.add(path, f"{how} on {describe(sharding)}: {fault}")
        else:
            self._fine[id(source), id(sharding)] = source, sharding

    def _mesh_fault(self, mesh: AnyMesh) -> str | None:
        if mesh not in self._meshes:
            self._meshes[mesh] = _mesh_fault(mesh, self._executes)
        return self._meshes[mesh]


def _layout_fault(shape: tuple[int, ...], sharding: NamedSharding) -> str | None:
    if math.prod(shape) > _LARGEST_ARRAY:
        return f"it has {math.prod(shape)} elements (shape {shape}); expected {_LARGEST_ARRAY} at most"
    try:
        layout_of_sharding(shape, sharding)
    except LayoutError as error:
        return str(error)
    return None


def _mesh_fault(mesh: AnyMesh, executes: bool) -> str | None:
    if not isinstance(mesh, Mesh):
        return "the mesh is abstract; expected one with devices" if executes else None
    if mesh.size == 0:
        return "the mesh has no devices"
    if len(set(mesh.devices.flat)) < mesh.size:
        return "the mesh has a device twice"
    if executes and on_paper(mesh):
        return "the mesh's devices exist only on paper; expected ones that can hold arrays"
    return None
