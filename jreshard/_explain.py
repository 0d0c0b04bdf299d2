"""Why the boxes of a leaf come from where they come from, in words."""

import math
from typing import TYPE_CHECKING

import numpy as np

from jreshard._layout import AnyMesh, layout_of_sharding
from jreshard._planning.moves import Moves
from jreshard._render import human_bytes

if TYPE_CHECKING:
    from jreshard._plan import Plan

_RANKS_SHOWN = 2
_BOXES_SHOWN = 4  # of a rank, for each reason


def explain(plan: "Plan", index: int, moves: Moves, nbytes: np.ndarray) -> str:
    """See `Plan.explain`.

    Args:
        plan: the plan.
        index: the place of the leaf.
        moves: its moves, ranks numbered as in the plan.
        nbytes: `int64[moves]`.
    """
    target = plan.targets[index]
    lines = [f"{target.path}: {target.dtype}{list(target.shape)}"]
    if target.src is None:
        return "\n".join([*lines, f"  a value of the host, placed on the devices of {target.dst.mesh.shape}"])
    lines += [
        f"  from {target.src.spec} on {_mesh(target.src.mesh)}: shards of {list(target.src.shard_shape(target.shape))}",
        f"  to   {target.dst.spec} on {_mesh(target.dst.mesh)}: shards of {list(target.dst.shard_shape(target.shape))}",
    ]
    if target.same_as != index:
        lines.append(f"  the same array as {plan.targets[target.same_as].path}, which moves once")
    if not len(moves):
        return "\n".join([*lines, "  nothing to move: it has no elements"])
    layout = layout_of_sharding(target.shape, target.src)
    texts = _reasons(len(layout.part_of) // math.prod(layout.parts), plan.domains is not None)
    reason = _reason_of(moves, plan.domains)
    lines += [f"  {_summed(nbytes[reason == r])}: {texts[r]}" for r in _in_order(reason)]
    ranks = np.unique(moves.dst)
    for rank in ranks[:_RANKS_SHOWN].tolist():
        (own,) = np.nonzero(moves.dst == rank)
        lines.append(f"  rank {rank} ({plan.devices[rank]}) gets")
        for r in _in_order(reason[own]):
            rows = own[reason[own] == r]
            lines.append(f"    {_summed(nbytes[rows])}: {texts[r]}")
            lines += _boxes(moves.at(rows))
    if len(ranks) > _RANKS_SHOWN:
        lines.append(f"  … and {len(ranks) - _RANKS_SHOWN:,} more ranks get theirs")
    return "\n".join(lines)


def _boxes(moves: Moves) -> list[str]:
    """The first of some boxes, one a line, and how many more there are."""
    lines = []
    first = moves.at(np.arange(min(len(moves), _BOXES_SHOWN)))
    columns = (column.tolist() for column in (first.src, first.start, first.stop, first.phase))
    for src, start, stop, phase in zip(*columns, strict=True):
        box = ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True))
        lines.append(f"      [{box}] from rank {src}" + (f" in phase {phase}" if phase else ""))
    if len(moves) > _BOXES_SHOWN:
        rest = moves.src[_BOXES_SHOWN:]
        senders = len(np.unique(rest))
        lines.append(f"      … and {len(rest):,} more from {senders:,} rank{'s' if senders > 1 else ''}")
    return lines


def _reason_of(moves: Moves, domains: np.ndarray | None) -> np.ndarray:
    """`int64[moves]`: which of `_reasons` holds for each."""
    local = moves.src == moves.dst
    near = np.zeros_like(local) if domains is None else domains[moves.src] == domains[moves.dst]
    out: np.ndarray = np.where(local, 0, 1 + 2 * (moves.phase > 0) + near)
    return out


def _reasons(holders: int, placed: bool) -> list[str]:
    held_by = "the one rank that holds it" if holders == 1 else f"one of the {holders} ranks that hold it"
    taken = f"from {held_by}" + (", which take turns" if holders > 1 else "")
    return [
        "the device holds it already",
        f"no rank of the domain holds it: once over the network, from {held_by}" if placed else taken,
        f"from {held_by}, in the same domain",
        "passed on by another domain, so that its holders have less to send",
        "passed on within the domain by the rank that took it in",
    ]


def _in_order(reason: np.ndarray) -> list[int]:
    """The different ones, in order of appearance."""
    return list(dict.fromkeys(reason.tolist()))


def _summed(nbytes: np.ndarray) -> str:
    return f"{len(nbytes):,} box{'' if len(nbytes) == 1 else 'es'}, {human_bytes(int(nbytes.sum()))}"


def _mesh(mesh: AnyMesh) -> str:
    return "mesh " + ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
