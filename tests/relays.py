"""Moves in which destination devices pass on what they have received, whatever the links."""

import numpy as np

from jreshard._planning.moves import Moves
from jreshard._planning.turns import plan_moves


def relayed(src, dst, src_ranks, dst_ranks, *, rotation=0) -> Moves:
    """The first replica of each destination box reads the sources; each other one reads the replica before it."""
    moves = plan_moves(src, dst, src_ranks, dst_ranks, rotation=rotation)
    chains = {}
    for rank, box in zip(dst_ranks.tolist(), dst.box_of.tolist(), strict=True):
        chains.setdefault(box, []).append(rank)
    before = {rank: chain[max(i - 1, 0)] for chain in chains.values() for i, rank in enumerate(chain)}
    phase_of = {rank: i for chain in chains.values() for i, rank in enumerate(chain)}
    phase = np.array([phase_of[rank] for rank in moves.dst.tolist()], np.int64)
    sources = np.where(phase > 0, [before[rank] for rank in moves.dst.tolist()], moves.src)
    return Moves(sources, moves.dst, moves.start, moves.stop, phase)
