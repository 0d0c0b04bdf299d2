"""Two layouts to moves: how source and destination shards overlap, and which replica sends each overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jreshard._layout import Layout

PHASES = 3  # of the moves of a plan, at most


@dataclass(frozen=True)
class Moves:
    """Copies of boxes from rank to rank, one row a move. Boxes are half-open, in global elements.

    Attributes:
        src: `int64[moves]`, the rank that is read.
        dst: `int64[moves]`, the rank that is written.
        start: `int64[moves, ndim]`.
        stop: `int64[moves, ndim]`.
        phase: `int64[moves]`. Phase 0 reads source arrays; a later phase reads, in the destination array of rank
            `src`, what moves of earlier phases have written there (a relay).
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

    def at(self, rows: np.ndarray) -> "Moves":
        """Some of the moves: those at these places, or where a mask is true."""
        return Moves(self.src[rows], self.dst[rows], self.start[rows], self.stop[rows], self.phase[rows])


def no_moves() -> Moves:
    """What a value of the host, or an array without elements, needs."""
    column, boxes = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    return Moves(column, column, boxes, boxes, column)


@dataclass(frozen=True)
class Flows:
    """Moves without their boxes, one row a move.

    Attributes:
        src: `int64[flows]`, the rank that is read.
        dst: `int64[flows]`, the rank that is written.
        phase: `int64[flows]`, as in `Moves`.
        elements: `int64[flows]`.
        strided: `bool[flows]`: whether the box is several runs of memory, on one side at least.
    """

    src: np.ndarray
    dst: np.ndarray
    phase: np.ndarray
    elements: np.ndarray
    strided: np.ndarray


def flows_of(moves: Moves, src: Layout, dst: Layout) -> Flows:
    """The flows of moves between two layouts."""
    extents = moves.stop - moves.start
    relayed = in_runs(extents, dst.shard_shape)
    strided = relayed | np.where(moves.phase == 0, in_runs(extents, src.shard_shape), False)
    return Flows(moves.src, moves.dst, moves.phase, moves.elements, strided)


def in_runs(extents: np.ndarray, shard: Sequence[int]) -> np.ndarray:
    """`bool[boxes]`: whether boxes of these extents are more than one run of memory in a row-major shard."""
    longer = extents > 1
    outermost = np.argmax(longer, axis=1) if longer.shape[1] else np.zeros(len(extents), np.int64)
    inner = np.arange(extents.shape[1]) > outermost[:, None]
    runs: np.ndarray = (inner & (extents != np.array(shard, np.int64))).any(axis=1)
    return runs


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


def _dim_overlaps(size: int, src_parts: int, dst_parts: int) -> np.ndarray:
    """`int64[overlaps, 4]` along one dim: source part, destination part, start, stop; in order of start."""
    if size == 0:
        return np.zeros((0, 4), np.int64)
    src_step, dst_step = size // src_parts, size // dst_parts
    cuts = np.union1d(np.arange(0, size + 1, src_step), np.arange(0, size + 1, dst_step))
    start, stop = cuts[:-1], cuts[1:]
    return np.stack([start // src_step, start // dst_step, start, stop], axis=1)


def overlaps(src: Layout, dst: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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


def among(values: np.ndarray, few: Sequence[int] | np.ndarray) -> np.ndarray:
    """`np.isin`, which is slow where there is next to nothing to do."""
    found: np.ndarray = values == few[0] if len(few) == 1 else np.isin(values, few)
    return found


def largest(values: np.ndarray) -> int:
    """The largest of whole numbers that are not negative; 0 of none."""
    return int(np.max(values)) if values.size else 0


def ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`first[0], first[0]+1, … first[0]+count[0]-1, first[1], …`."""
    ends = np.cumsum(count)
    places: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count - first, count)
    return places
