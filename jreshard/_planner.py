"""Two layouts to moves: how source and destination shards overlap, and which replica sends each overlap."""

from dataclasses import dataclass

import numpy as np

from jreshard._layout import Layout


@dataclass(frozen=True)
class Moves:
    """Copies of boxes from rank to rank, one row a move. Boxes are half-open, in global elements.

    Attributes:
        src: `int64[moves]`, the rank that is read.
        dst: `int64[moves]`, the rank that is written.
        start: `int64[moves, ndim]`.
        stop: `int64[moves, ndim]`.
        phase: `int64[moves]`: 0 reads the source array; k >= 1 reads the destination array of rank `src`, where moves
            of earlier phases have written.
    """

    src: np.ndarray
    dst: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    phase: np.ndarray

    def __len__(self) -> int:
        return len(self.src)

    @property
    def elements(self) -> np.ndarray:
        """`int64[moves]`: elements in each box."""
        count: np.ndarray = np.prod(self.stop - self.start, axis=1, dtype=np.int64)
        return count


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
    src_box, dst_box, start, stop = _overlaps(src, dst)
    overlap, reader = _readers(dst_box, dst.box_of)
    readers = dst_ranks[reader]
    sources = _choose_sources(src_box[overlap], readers, src.box_of, src_ranks, rotation)
    return Moves(sources, readers, start[overlap], stop[overlap], np.zeros(len(readers), np.int64))


def _dim_overlaps(size: int, src_parts: int, dst_parts: int) -> np.ndarray:
    """`int64[overlaps, 4]` along one dim: source part, destination part, start, stop; in order of start."""
    if size == 0:
        return np.zeros((0, 4), np.int64)
    src_step, dst_step = size // src_parts, size // dst_parts
    cuts = np.union1d(np.arange(0, size + 1, src_step), np.arange(0, size + 1, dst_step))
    start, stop = cuts[:-1], cuts[1:]
    return np.stack([start // src_step, start // dst_step, start, stop], axis=1)


def _overlaps(src: Layout, dst: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every pair of a source box and a destination box that share elements, and the box that they share.

    The boxes are products of intervals, so the overlaps are the product of the overlaps along each dim.
    """
    dims = [_dim_overlaps(*args) for args in zip(src.shape, src.parts, dst.parts, strict=True)]
    counts = [len(dim) for dim in dims]
    pick = np.indices(counts).reshape(len(dims), -1) if dims else np.zeros((0, 1), np.int64)
    total = pick.shape[1]
    src_box, dst_box = np.zeros(total, np.int64), np.zeros(total, np.int64)
    start, stop = np.zeros((total, len(dims)), np.int64), np.zeros((total, len(dims)), np.int64)
    for d, dim in enumerate(dims):
        rows = dim[pick[d]]
        src_box = src_box * src.parts[d] + rows[:, 0]
        dst_box = dst_box * dst.parts[d] + rows[:, 1]
        start[:, d], stop[:, d] = rows[:, 2], rows[:, 3]
    return src_box, dst_box, start, stop


def _readers(dst_box: np.ndarray, box_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (overlap, index of a destination device): each overlap once for every replica of its destination box."""
    order = np.argsort(box_of, kind="stable")
    first = np.searchsorted(box_of[order], dst_box, side="left")
    count = np.searchsorted(box_of[order], dst_box, side="right") - first
    overlap = np.repeat(np.arange(len(dst_box)), count)
    return overlap, order[_ranges(first, count)]


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


def _ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`first[0], first[0]+1, … first[0]+count[0]-1, first[1], …`."""
    ends = np.cumsum(count)
    ranges: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count - first, count)
    return ranges
