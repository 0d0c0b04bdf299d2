"""Patterns of shares, applied to leaves: where each leaf's boxes are split, and what of its pattern it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jreshard._planning.divisions import Pair
from jreshard._planning.moves import Flows, Moves, in_runs
from jreshard._planning.pattern import Grid, Hops, Pattern, Window, joined, moves_of, no_hops
from jreshard._planning.route import Kind, RouteRanks
from jreshard._planning.tally import Cut, Totals

_FINE = 16  # splits are placed with at least this many steps for each piece, where the dim is long enough
_RUN = 128  # bytes that the runs of a piece should be a multiple of


class Cutting:
    """How the leaves of a kind are cut: along which dim, and how many of them make up a whole pattern."""

    def __init__(self, kind: Kind, pattern: Pattern, count: int, smallest: int) -> None:
        self.pattern = pattern
        self._count, self._seen = count, 0
        self._windows: dict[tuple[int, int], Window] = {}
        pair, pieces = pattern.pair, pattern.pieces
        overlap_bytes = kind.nbytes // max(1, len(pair.src_box))
        self._whole = pieces == 1 or overlap_bytes < 2 * smallest or pattern.whole_after(count)
        self._of = pattern.turns if self._whole else min(count, -(-pieces * smallest // max(1, overlap_bytes)))
        self.grid = _grid(kind, pair, -(-pieces // max(1, self._of)), smallest // 4)

    def next_window(self, turns: dict[Pair, int]) -> Window:
        """The window of the next leaf; `turns` counts the whole ones over all kinds of a pair."""
        at, self._seen = self._seen, self._seen + 1
        if self._whole:
            turn = turns.get(self.pattern.pair, 0)
            turns[self.pattern.pair] = turn + 1
            return self._window(turn % self._of, self._of)
        rest = self._count % self._of
        if at >= self._count - rest:
            return self._window(at - (self._count - rest), rest)
        return self._window(at % self._of, self._of)

    def _window(self, index: int, count: int) -> Window:
        """Each window once, however many leaves have it."""
        found = self._windows.get((index, count))
        if found is None:
            found = self._windows[index, count] = Window(index, count, self._whole)
        return found


class Stripes:
    """One leaf's part of its pattern."""

    def __init__(self, kind: Kind, cutting: Cutting, window: Window, ranks: RouteRanks) -> None:
        self._kind, self._pattern, self._grid, self._window = kind, cutting.pattern, cutting.grid, window
        self._ranks = ranks

    def moves(self, only: Sequence[int] | np.ndarray | None = None) -> Moves:
        """The moves; with `only`, those that read or write one of these ranks of the route."""
        hops = joined(list(self._all_hops())) if only is None else self._hops_of(only)
        moves = moves_of(self._pattern.pair, hops, self._grid)
        src, dst = self._ranks.in_route[moves.src], self._ranks.in_route[moves.dst]
        return Moves(src, dst, moves.start, moves.stop, moves.phase)

    def totals(self) -> Totals | None:
        """What the moves add up to, where that can be told without listing them."""
        tally = self._pattern.tally()
        if tally is not None and all(self._kind.src.shape):
            measures = self._measures
            for overlap, middle, begin, end in self._pattern.all_pieces(self._window, self._grid):
                size = measures.length[overlap]
                elements, whole = measures.across[overlap] * (end - begin), _covered(overlap, end - begin) == size
                strided = np.stack([src | dst for src, dst in zip(*measures.strided, strict=True)])[:, overlap]
                tally.add(Cut(overlap, middle, elements, whole, strided))
        return None if tally is None else tally.totals()

    def flows(self) -> Iterator[Flows]:
        """The moves without their boxes, in runs of bounded length."""
        measures = self._measures
        for hops in self._all_hops():
            whole = hops.end - hops.begin == measures.length[hops.overlap]
            src, dst = (np.where(whole, all_[hops.overlap], part[hops.overlap]) for part, all_ in measures.strided)
            yield Flows(
                self._ranks.in_route[hops.src],
                self._ranks.in_route[hops.dst],
                hops.phase,
                measures.across[hops.overlap] * (hops.end - hops.begin),
                dst | np.where(hops.phase == 0, src, False),
            )

    @cached_property
    def _measures(self) -> "_Measures":
        pair, dim = self._pattern.pair, self._grid.dim
        extents = (pair.stop - pair.start) * self._grid.scale
        length = extents[:, dim] if extents.shape[1] else np.ones(len(extents), np.int64)
        across = np.prod(extents, axis=1, dtype=np.int64) // np.maximum(length, 1)
        part = extents.copy()
        if extents.shape[1]:
            part[:, dim] = np.maximum(length - 1, 1)  # one run or not, as any piece is
        src, dst = (layout.shard_shape for layout in (self._kind.src, self._kind.dst))
        strided = tuple((in_runs(part, shard), in_runs(extents, shard)) for shard in (src, dst))
        return _Measures(length, across, strided)

    def _all_hops(self) -> Iterator[Hops]:
        if all(self._kind.src.shape):
            yield from self._pattern.all_hops(self._window, self._grid)

    def _hops_of(self, only: Sequence[int] | np.ndarray) -> Hops:
        if not all(self._kind.src.shape):
            return no_hops()
        return self._pattern.hops_of(self._window, self._grid, self._ranks.in_plan[np.asarray(only, np.int64)])


@dataclass(frozen=True)
class _Measures:
    """Of the overlaps of a leaf.

    Attributes:
        length: `int64[overlaps]`, elements along the dim that is split.
        across: `int64[overlaps]`, elements in a step along it.
        strided: for the source and the destination, `bool[overlaps]` twice: whether a part of the overlap is several
            runs of memory there, and whether all of it is.
    """

    length: np.ndarray
    across: np.ndarray
    strided: tuple[tuple[np.ndarray, np.ndarray], ...]


def _covered(overlap: np.ndarray, length: np.ndarray) -> np.ndarray:
    """For each piece, the length of all pieces of its overlap; `overlap` is sorted."""
    first = np.append(True, np.diff(overlap) != 0)[: len(overlap)]
    of = np.cumsum(first) - 1
    total: np.ndarray = np.add.reduceat(length, np.flatnonzero(first))[of] if len(of) else length
    return total


def _grid(kind: Kind, pair: Pair, pieces: int, least: int) -> Grid:
    """Where overlaps are split: along the outermost dim that is long enough, so that pieces are few runs of memory.

    Args:
        kind: the leaves.
        pair: their divisions.
        pieces: into how many pieces an overlap will fall.
        least: bytes that no piece should be smaller than.
    """
    scale = np.array(kind.src.shape, np.int64) // np.array(pair.cells, np.int64)
    if not len(scale) or not len(pair.weight) or not scale.all():
        return Grid(scale, 0, 1)
    shortest = (pair.stop - pair.start).min(axis=0) * scale
    bits = kind.wire.bits
    units = np.ones(len(scale), np.int64)
    units[-1] = max(1, _RUN * 8 // bits) if shortest[-1] * bits >= pieces * _FINE * _RUN * 8 else max(1, 8 // bits)
    steps = shortest // units
    long = steps >= pieces * _FINE
    dim = int(np.argmax(long)) if long.any() else int(np.argmax(steps))
    row = int(np.prod(shortest, dtype=np.int64)) // int(shortest[dim]) * bits // 8 * int(units[dim])
    coarser = max(1, min(least // max(1, row), int(steps[dim]) // (pieces * _FINE)))
    return Grid(scale, dim, int(units[dim]) * coarser)
