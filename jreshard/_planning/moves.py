"""The moves of an array: boxes that go from rank to rank."""

from collections.abc import Sequence
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
