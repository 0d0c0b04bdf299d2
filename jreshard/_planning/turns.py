"""Moves without a topology: each overlap is read from the own device or from a replica of the source, in turn."""

from collections.abc import Iterator, Sequence

import numpy as np

from jreshard._layout import Layout
from jreshard._planning.arrays import among, ranges
from jreshard._planning.moves import Flows, Moves, flows_of
from jreshard._planning.overlaps import overlaps


class Turns:
    """The replicas of a source shard take turns; `rotation` is the one that begins."""

    def __init__(
        self, src: Layout, dst: Layout, src_ranks: np.ndarray, dst_ranks: np.ndarray, rotation: int = 0
    ) -> None:
        self._layouts, self._ranks, self._rotation = (src, dst), (src_ranks, dst_ranks), rotation

    def moves(self, only: Sequence[int] | np.ndarray | None = None) -> Moves:
        """All moves; with `only`, those that read or write one of these ranks."""
        moves = plan_moves(*self._layouts, *self._ranks, rotation=self._rotation)
        return moves if only is None else moves.at(among(moves.src, only) | among(moves.dst, only))

    def totals(self) -> None:
        """Moves are few enough to be listed."""

    def flows(self) -> Iterator[Flows]:
        """The moves without their boxes."""
        yield flows_of(self.moves(), *self._layouts)


def plan_moves(src: Layout, dst: Layout, src_ranks: np.ndarray, dst_ranks: np.ndarray, *, rotation: int = 0) -> Moves:
    """The moves that fill every destination shard, each element written once.

    An overlap is read from the destination's own device where that holds it; otherwise the replicas of the source
    shard take turns over the destinations that want something of it, beginning with replica `rotation`, so that many
    leaves with different rotations load the replicas alike.

    Args:
        src: how the source array lies, with one row of `part_of` for each of `src_ranks`.
        dst: how the destination array lies; the same shape.
        src_ranks: `int64[source devices]`, the plan's rank of each device of the source mesh.
        dst_ranks: the same for the destination mesh.
        rotation: which replica takes the first turn.
    """
    src_box, dst_box, start, stop = overlaps(src, dst)
    overlap, reader = _readers(dst_box, dst.box_of)
    readers = dst_ranks[reader]
    sources = _choose_sources(src_box[overlap], readers, src.box_of, src_ranks, rotation)
    return Moves(sources, readers, start[overlap], stop[overlap], np.zeros(len(overlap), np.int64))


def _readers(dst_box: np.ndarray, box_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (overlap, index of a destination device): each overlap once for every replica of its destination box."""
    order = np.argsort(box_of, kind="stable")
    first = np.searchsorted(box_of[order], dst_box, side="left")
    count = np.searchsorted(box_of[order], dst_box, side="right") - first
    overlap = np.repeat(np.arange(len(dst_box)), count)
    return overlap, order[ranges(first, count)]


def _choose_sources(
    wanted: np.ndarray, readers: np.ndarray, box_of: np.ndarray, src_ranks: np.ndarray, rotation: int
) -> np.ndarray:
    """The rank that each move reads; `wanted` is the source box of each move, `readers` its destination rank."""
    held = np.full(max(readers.max(initial=-1), src_ranks.max(initial=-1)) + 1, -1, np.int64)
    held[src_ranks] = box_of
    chosen = readers.copy()
    (far,) = np.nonzero(held[readers] != wanted)
    order = np.argsort(box_of, kind="stable")
    first = np.searchsorted(box_of[order], wanted[far], side="left")
    count = np.searchsorted(box_of[order], wanted[far], side="right") - first
    chosen[far] = src_ranks[order[first + (_turns(wanted[far], readers[far]) + rotation) % count]]
    return chosen


def _turns(wanted: np.ndarray, readers: np.ndarray) -> np.ndarray:
    """For each move, how many other ranks with a lower number want something of the same source box."""
    pairs, where = np.unique(np.stack([wanted, readers], axis=1), axis=0, return_inverse=True)
    first = np.searchsorted(pairs[:, 0], pairs[:, 0], side="left")
    turns: np.ndarray = (np.arange(len(pairs)) - first)[where.reshape(-1)]
    return turns
