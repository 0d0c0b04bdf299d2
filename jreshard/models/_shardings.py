"""From weights, a mesh and rules to a tree of `NamedSharding`s."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import Mesh, NamedSharding

from jreshard._layout import AnyMesh
from jreshard.models._rules import DEFAULT_RULES, Rule, check_rules, mesh_axes_of
from jreshard.models._split import Faults, Split, indivisible, parts_of, refined, spec_of, split_of
from jreshard.models._trees import map_weights, weights_tree
from jreshard.models._weights import Weight, stage_of, weights_of

#: Coordinates along mesh axes: the devices there hold a weight, the others nothing of it.
_At: TypeAlias = tuple[tuple[str, int], ...]


def shardings(
    of: Any,
    mesh: AnyMesh,
    rules: Sequence[Rule] = DEFAULT_RULES,
    *,
    stacked: bool = True,
    stages: int | Collection[int] = 1,
    stage_axis: str | None = None,
) -> Any:
    """Where every weight lies on `mesh`: a tree of `NamedSharding`s.

    Some weights lie on a part of the devices only, a mesh of its own, for which `mesh` must have devices (real ones or
    `jreshard.paper_devices`): those of one expert, where experts are not stacked, on the ranks that the rule for
    `expert` gives it; and with `stage_axis` every weight on those of its pipeline stage.

    If a mesh axis has more ranks than there are heads that share keys and values (`kv_heads`, `ssm_groups`), each head
    is held by several ranks that follow one another: 4 heads over `tp=8` go to ranks 0, 0, 1, 1, 2, 2, 3, 3. A
    `NamedSharding` says that by two mesh axes, so all shardings are then over a mesh of the same devices in the same
    order with the axis in parts, `tp=4` and `tp_1=2`. The number of ranks must be a multiple of the heads.

    Args:
        of: a model's name, or a tree of `Weight`s; `stacked` and `stages` are then without effect.
        mesh: the devices, or an `AbstractMesh`.
        rules: (logical axis, mesh axes) in order of precedence; see `mesh_axes_of`.
        stacked: see `weights`.
        stages: see `weights`.
        stage_axis: a mesh axis along which the devices form pipeline stages. The layers, in order, are given to the
            stages as evenly as can be (`stage_sizes`), what comes before them to the first stage and what comes after
            them to the last. Without it, stacked layers can still be split along `pp` where they divide evenly.

    Raises:
        ValueError: an axis of the mesh or a rule is unknown; a dim does not divide; a weight has layers of several
            stages. Every bad leaf is named, with what would fit.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("fsdp", "tp"))
        >>> shardings("llama-3.1-8b", mesh)["layers"]["mlp"]["up"].spec
        P(None, 'fsdp', 'tp')
    """
    tree = weights_tree(of, stacked, stages)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    kinds = {weight.kind: weight for weight in weights_of(tree)}
    spans = {weight.layers: weight for weight in weights_of(tree)}
    _check_axes(list(kinds.values()), mesh, rules, stage_axis)
    faults = Faults()
    stage_at = {layers: _stage(weight, stage_axis, sizes, faults) for layers, weight in spans.items()}
    within = {axis: size for axis, size in sizes.items() if axis != stage_axis}
    splits: dict[Any, Split] = {}
    expert_axes: dict[Any, tuple[str, ...]] = {}
    for kind, weight in kinds.items():
        expert_axes[kind], dims = _expert_axes(weight, rules, within, faults)
        splits[kind] = split_of(weight, dims, within, faults)
    faults.raise_any(tree, sizes)
    parts = parts_of(set(splits.values()), sizes)
    specs = {kind: spec_of(split, parts) for kind, split in splits.items()}
    part_of_mesh = cache(lambda at: refined(_part_of_mesh(mesh, at), parts))
    named = cache(lambda at, spec: NamedSharding(part_of_mesh(at), spec))

    def sharding(weight: Weight) -> NamedSharding:
        kind = weight.kind
        return named(stage_at[weight.layers] + _expert_at(weight, expert_axes[kind], within), specs[kind])

    return map_weights(sharding, tree)


def _check_axes(weights: Sequence[Weight], mesh: AnyMesh, rules: Sequence[Rule], stage_axis: str | None) -> None:
    """Refuses axes that do not exist, and axes for layers that would silently hold copies."""
    logical_axes = {axis for weight in weights for axis in weight.axes if axis is not None}
    check_rules(rules, mesh.axis_names, logical_axes)
    if stage_axis is None:
        [axes] = mesh_axes_of(("layers",), rules, mesh.axis_names)
        if axes and "layers" not in logical_axes:
            found = (
                f"the mesh has {axes[0]}={mesh.shape[axes[0]]} for layers, and the weights are not stacked over layers"
            )
            how = (
                f"pass stage_axis={axes[0]!r} to give each to the devices of its stage, or rules that use it otherwise"
            )
            raise ValueError(f"{found}: {how}")
    elif stage_axis not in mesh.axis_names:
        raise ValueError(f"stage_axis is {stage_axis!r}; the mesh has the axes {', '.join(mesh.axis_names)}")
    elif any(weight.depth == 0 for weight in weights):
        raise ValueError(f"stage_axis is {stage_axis!r}, and the weights do not say which layers they belong to")


def _stage(weight: Weight, stage_axis: str | None, sizes: Mapping[str, int], faults: Faults) -> _At:
    """The pipeline stage of a weight."""
    if stage_axis is None:
        return ()
    count = sizes[stage_axis]
    stage = stage_of(weight, count)
    if stage is None:
        message = f"are on several of {count} stages; stack them with stages={count}"
        faults.add("layers", message, lambda other: other.layers == weight.layers)
        return ()
    return ((stage_axis, stage),)


def _expert_axes(
    weight: Weight, rules: Sequence[Rule], sizes: Mapping[str, int], faults: Faults
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """The mesh axes that give a single expert its ranks, and those that split each dim of the weight."""
    if weight.expert is None:
        return (), mesh_axes_of(weight.axes, rules, sizes)
    axes, *dims = mesh_axes_of(("expert", *weight.axes), rules, sizes)
    _, experts = weight.expert
    if experts % math.prod(sizes[axis] for axis in axes):
        faults.add(f"{experts} experts", indivisible(experts, axes, sizes, "expert"), weight.is_alike)
    return axes, dims


def _expert_at(weight: Weight, axes: Sequence[str], sizes: Mapping[str, int]) -> _At:
    """The coordinates of a single expert: the experts are dealt out in order, the last axis varying fastest."""
    if not (axes and weight.expert):
        return ()
    number, experts = weight.expert
    shape = [sizes[axis] for axis in axes]
    rank = number * math.prod(shape) // experts
    return tuple(zip(axes, map(int, np.unravel_index(rank, shape)), strict=True))


def _part_of_mesh(mesh: AnyMesh, at: _At) -> AnyMesh:
    """The devices at the coordinates, as a mesh with the other axes."""
    if not at:
        return mesh
    where = dict(at)
    if not isinstance(mesh, Mesh):
        some = " and ".join(map(repr, where))
        raise ValueError(f"weights lie on some of the devices along {some}, which an AbstractMesh does not have")
    devices = mesh.devices[tuple(where.get(axis, slice(None)) for axis in mesh.axis_names)]
    kept = [i for i, axis in enumerate(mesh.axis_names) if axis not in where]
    names, types = [mesh.axis_names[i] for i in kept], tuple(mesh.axis_types[i] for i in kept)
    return Mesh(np.asarray(devices, dtype=object), names, axis_types=types)
