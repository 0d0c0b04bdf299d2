"""Why the boxes of a leaf come from where they come from, in words."""

import math
from collections import Counter
from typing import TYPE_CHECKING

from jreshard._layout import AnyMesh, layout_of_sharding
from jreshard._render import human_bytes

if TYPE_CHECKING:
    from jreshard._plan import Move, Plan

_RANKS_SHOWN = 2
_MOVES_SHOWN = 24


def explain(plan: "Plan", leaf: str | int) -> str:
    """See `Plan.explain`."""
    moves = plan.moves(leaf)
    index = leaf if isinstance(leaf, int) else next(i for i, t in enumerate(plan.targets) if t.path == leaf)
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
    if not moves:
        return "\n".join([*lines, "  nothing to move: it has no elements"])
    layout = layout_of_sharding(target.shape, target.src)
    holders = len(layout.part_of) // math.prod(layout.parts)
    reasons = Counter[str]()
    nbytes = Counter[str]()
    for move in moves:
        reason = _reason(plan, move, holders)
        reasons[reason] += 1
        nbytes[reason] += move.nbytes
    lines += [f"  {count:,} boxes, {human_bytes(nbytes[reason])}: {reason}" for reason, count in reasons.items()]
    for rank in sorted({move.dst_rank for move in moves})[:_RANKS_SHOWN]:
        lines += _of_rank(plan, rank, [move for move in moves if move.dst_rank == rank], holders)
    return "\n".join(lines)


def _of_rank(plan: "Plan", rank: int, moves: "list[Move]", holders: int) -> list[str]:
    lines = [f"  rank {rank} ({plan.devices[rank]}) gets"]
    for move in moves[:_MOVES_SHOWN]:
        box = ", ".join(f"{a}:{b}" for a, b in zip(move.start, move.stop, strict=True))
        when = f" in phase {move.phase}" if move.phase else ""
        lines.append(f"    [{box}] from rank {move.src_rank}{when}: {_reason(plan, move, holders)}")
    if len(moves) > _MOVES_SHOWN:
        lines.append(f"    … and {len(moves) - _MOVES_SHOWN:,} more boxes")
    return lines


def _reason(plan: "Plan", move: "Move", holders: int) -> str:
    domain = plan.domains
    held_by = "the one rank that holds it" if holders == 1 else f"one of the {holders} ranks that hold it"
    if move.src_rank == move.dst_rank:
        return "the device holds it already"
    if domain is None:
        return f"from {held_by}" + (", which take turns" if holders > 1 else "")
    near = bool(domain[move.src_rank] == domain[move.dst_rank])
    if move.phase == 0:
        if near:
            return f"from {held_by}, in the same domain"
        return f"no rank of the domain holds it: once over the network, from {held_by}"
    if near:
        return "passed on within the domain by the rank that took it in"
    return "passed on by another domain, so that its holders have less to send"


def _mesh(mesh: AnyMesh) -> str:
    return "mesh " + ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
