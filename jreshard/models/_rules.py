"""Rules from logical axes to mesh axes, as Flax has them."""

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from jreshard.models._weights import Axes

#: A logical axis, and the mesh axis or axes that split it; `None` for none.
Rule: TypeAlias = tuple[str, str | tuple[str, ...] | None]

#: Mesh axes whose ranks hold copies, and which no rule need name.
REPLICA_AXES = frozenset({"dp", "data", "replica"})

#: For meshes with any of the axes `fsdp`, `tp`, `ep`, `pp` and `dp`, of a trainer as of a rollout engine.
DEFAULT_RULES: tuple[Rule, ...] = (
    ("layers", "pp"),
    ("expert", "ep"),
    ("vocab", "tp"),
    ("heads", "tp"),
    ("kv_heads", "tp"),
    ("mlp", "tp"),
    ("ssm_heads", "tp"),
    ("ssm_groups", "tp"),
    # Each weight is split once by fsdp: along the model's width, or else along a latent one.
    ("embed", "fsdp"),
    ("q_lora", "fsdp"),
    ("kv_lora", "fsdp"),
    ("moe_latent", "fsdp"),
    ("head_dim", None),
    ("ssm_state", None),
    ("conv", None),
    ("norm", None),
)


def mesh_axes_of(axes: Axes, rules: Sequence[Rule], mesh_axes: Collection[str]) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim of an array with the logical `axes`.

    The rules are tried in order, as `flax.linen.logical_to_mesh_axes` does: one applies if its logical axis is not
    settled yet and none of its mesh axes is used by another dim. Mesh axes that the mesh does not have are passed over,
    so that one set of rules serves meshes with different axes.

    Args:
        axes: the logical axis of each dim; `None` for dims that stay whole.
        rules: in order of precedence.
        mesh_axes: the axes that the mesh has.

    Example:
        >>> mesh_axes_of(("expert", "embed", "mlp"), DEFAULT_RULES, ("ep", "tp"))
        [('ep',), (), ('tp',)]
    """
    settled: dict[int, tuple[str, ...]] = {}
    for logical, targets in rules:
        if logical not in axes or (dim := axes.index(logical)) in settled:
            continue
        wanted = tuple(axis for axis in as_tuple(targets) if axis in mesh_axes)
        used = {axis for taken in settled.values() for axis in taken}
        if targets is None or (wanted and used.isdisjoint(wanted)):
            settled[dim] = wanted
    return [settled.get(dim, ()) for dim in range(len(axes))]


def check_rules(rules: Sequence[Rule], mesh_axes: Iterable[str], logical_axes: Collection[str]) -> None:
    """Refuses meshes with an axis that no rule names, rules for logical axes that do not exist, and axes named twice.

    Raises:
        ValueError: with the names that exist.
    """
    logical = set(logical_axes) | {name for name, _ in DEFAULT_RULES}
    for name, targets in rules:
        if name not in logical:
            raise ValueError(f"there is no logical axis {name!r}{near(name, logical)}; there are {_listed(logical)}")
        axes = as_tuple(targets)
        if len(set(axes)) < len(axes):
            raise ValueError(f"the rule for {name!r} names a mesh axis twice: {', '.join(axes)}")
    named = {axis for _, targets in rules for axis in as_tuple(targets)}
    for axis in mesh_axes:
        if axis not in named | REPLICA_AXES:
            hint = near(axis, named | REPLICA_AXES)
            copies = f"the ranks along {_listed(REPLICA_AXES)} hold copies"
            raise ValueError(
                f"no rule names the mesh axis {axis!r}{hint}; the rules name {_listed(named)}, and {copies}"
            )


def as_tuple(targets: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of a rule."""
    return () if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)


def near(name: str, existing: Collection[str]) -> str:
    """A question that offers what `name` may have been meant to be; empty if nothing is like it."""
    found = difflib.get_close_matches(name, sorted(existing), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
