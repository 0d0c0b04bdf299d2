"""Shares to boxes: which piece of which overlap goes from which rank to which, in which phase."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jreshard._planning.arrays import among, largest
from jreshard._planning.balance import Balance
from jreshard._planning.divisions import Pair
from jreshard._planning.filling import WHOLE
from jreshard._planning.legs import Feeds, Senders, feeds_of, near_readers
from jreshard._planning.moves import PHASES, Moves
from jreshard._planning.shares import side_by_side
from jreshard._planning.tally import Classes, Tally

_SAMPLE = 16  # overlaps looked at to learn how finely those of a pair are cut
_ENOUGH = 48  # turns of each sender, so that their shares differ by little
_MANY = 1 << 20  # cuts
_ROWS = 1 << 20  # hops worked out together
_SLIVER = 8  # shares that are no wider, in 1 / WHOLE, come of rounding


@dataclass(frozen=True)
class Window:
    """Which part of its pair's pattern of shares a leaf takes: part `index` of `count` equal ones.

    Leaves that are alike take turns, so that together they make up whole patterns with as few splits as can be.

    Attributes:
        index: from 0; each overlap takes a part further on than the one before it.
        count: parts.
        whole: whether overlaps stay whole: what holds in the middle of the part holds for all of it.
    """

    index: int
    count: int
    whole: bool

    def part_of(self, turn: np.ndarray) -> np.ndarray:
        """Which part each overlap takes, given its own turn among those of a leaf.

        Both over leaves and over overlaps, turns visit all parts, and spread over them however soon they end: they
        go on by (about) irrational shares of the whole, as in the sequences of Kronecker.
        """
        if not self.whole:
            return (self.index + turn) % self.count
        by_leaf, by_overlap = _coprime(self.count, (math.sqrt(5) - 1) / 2), _coprime(self.count, math.sqrt(2) - 1)
        return (self.index * by_leaf + turn * by_overlap) % self.count


def _coprime(count: int, share: float) -> int:
    """The first number from `share` of `count` on that has no divisor in common with it."""
    step = max(1, round(count * share))
    while math.gcd(step, count) > 1:
        step += 1
    return step


@dataclass(frozen=True)
class Grid:
    """How the overlaps of one leaf may be split.

    Attributes:
        scale: `int64[ndim]`, elements in a cell of the pair along each dim.
        dim: the dim along which overlaps are split.
        step: splits lie at multiples of this many elements from where an overlap begins.
    """

    scale: np.ndarray
    dim: int
    step: int


@dataclass(frozen=True)
class Hops:
    """Pieces of overlaps that go from rank to rank, one row each.

    Attributes:
        overlap: `int64[hops]`.
        src: `int64[hops]`.
        dst: `int64[hops]`.
        phase: `int64[hops]`, as in `Moves`.
        begin: `int64[hops]`, where the piece begins along the dim that is split, in elements from the overlap's
            own beginning.
        end: `int64[hops]`, exclusive.
    """

    overlap: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    phase: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Pattern:
    """How the bytes of every leaf of a pair of divisions travel, whatever its size: see `Senders`."""

    def __init__(self, pair: Pair, balance: Balance) -> None:
        self.pair, self._senders = pair, Senders(pair, balance)
        self._kept: tuple[bytes, Feeds, np.ndarray] | None = None

    def add_to(self, digest: Any) -> None:
        """Adds to a hash what the pattern depends on."""
        shares = self._senders.shares
        for part in (*self.pair.src.key, *self.pair.dst.key):
            digest.update(part if isinstance(part, bytes) else repr(part).encode())
        tables = shares.cuts, shares.direct, shares.near_cuts, shares.near_direct
        for table in (*tables, self._senders.entries.cuts, self._senders.may_pass):
            digest.update(table.tobytes())

    @cached_property
    def pieces(self) -> int:
        """Into how many pieces the most divided overlap falls."""
        if not len(self.pair.src_box):
            return 1
        cuts = np.sort(self._sample_cuts, axis=1)
        return max(1, largest((np.diff(cuts, axis=1) > _SLIVER).sum(axis=1)))

    @cached_property
    def turns(self) -> int:
        """How many leaves must take turns, each whole, to come to the shares of the pattern."""
        if self.pieces == 1:
            return 1
        cuts = np.unique(self._sample_cuts)
        if self.pieces * len(cuts) > _MANY // 16:
            return self.pieces
        counts = np.arange(self.pieces, 4 * self.pieces + 1)[:, None]
        fits = (np.abs((cuts * counts + WHOLE // 2) % WHOLE - WHOLE // 2) <= counts * 4).all(axis=1)
        return int(counts[np.argmax(fits), 0]) if fits.any() else 4 * self.pieces

    @cached_property
    def _sample_cuts(self) -> np.ndarray:
        count = len(self.pair.src_box)
        sample = np.linspace(0, count - 1, min(_SAMPLE, count)).astype(np.int64)
        return self._cuts(sample, feeds_of(self.pair, sample, self._senders.may_pass))

    def whole_after(self, leaves: int) -> bool:
        """Whether the overlaps of so many leaves are enough for shares to come out even without any being split."""
        per_source, per_target = self.pair.fewest
        holders, entries = self._senders.options
        enough = (holders == 1 or per_source * leaves >= _ENOUGH * holders) and (
            entries == 1 or per_target * leaves >= _ENOUGH * entries
        )
        return enough and not self._senders.relays

    def all_hops(self, window: Window, grid: Grid) -> Iterator[Hops]:
        """The hops of a leaf, in runs of bounded length."""
        each = max(1, largest(self._senders.wanters)) * max(1, self.pieces // window.count)
        step = max(1, _ROWS // each)
        for begin in range(0, len(self.pair.src_box), step):
            yield self._hops(np.arange(begin, min(begin + step, len(self.pair.src_box))), window, grid, None)

    def hops_of(self, window: Window, grid: Grid, ranks: np.ndarray) -> Hops:
        """The hops of a leaf that read or write one of some ranks."""
        return self._hops(self.pair.of_ranks(ranks), window, grid, ranks)

    @cached_property
    def classes(self) -> Classes | None:
        """The classes of domains, where moves can be added up without being listed."""
        return Classes.of_pair(self._senders)

    def tally(self) -> Tally | None:
        """For adding up moves without listing them; `None` where they have to be."""
        return None if self.classes is None else Tally(self._senders, self.classes)

    def all_pieces(self, window: Window, grid: Grid) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """The pieces of a leaf, where there is a tally for them: overlap, middle of the share, begin, end."""
        most = 1 if self.classes is None else self.classes.most
        step = max(1, _ROWS // (most * max(1, self.pieces // window.count)))
        for first in range(0, len(self.pair.src_box), step):
            chosen = np.arange(first, min(first + step, len(self.pair.src_box)))
            domains = np.diff(self.pair.dst.groups.first_of_box)[self.pair.dst_box[chosen]]
            cuts = np.concatenate([_ends(len(chosen)), *self._far_cuts(chosen, domains)], axis=1)
            at, *rest = self._pieces(chosen, cuts, window, grid)
            yield chosen[at], *rest

    def _hops(self, chosen: np.ndarray, window: Window, grid: Grid, ranks: np.ndarray | None) -> Hops:
        if not len(chosen):
            return no_hops()
        feeds, cuts = self._of_overlaps(chosen)
        at, middle, begin, end = self._pieces(chosen, cuts, window, grid)
        legs = self._senders.legs(chosen, feeds, at, middle, ranks)
        if ranks is not None:
            legs = legs.rows(among(legs.src, ranks) | among(legs.dst, ranks))
        found = Hops(chosen[at[legs.piece]], legs.src, legs.dst, legs.phase, begin[legs.piece], end[legs.piece])
        return found if len(at) == len(chosen) else _merged(found)

    def _of_overlaps(self, chosen: np.ndarray) -> tuple[Feeds, np.ndarray]:
        """The feeds and the cuts; kept for the next leaf, which is most often asked for the same overlaps."""
        key = chosen.tobytes()
        if self._kept is None or self._kept[0] != key:
            feeds = feeds_of(self.pair, chosen, self._senders.may_pass)
            self._kept = key, feeds, self._cuts(chosen, feeds)
        _, feeds, cuts = self._kept
        if cuts.size + len(feeds.at) > _MANY:
            self._kept = None
        return feeds, cuts

    def _pieces(
        self, chosen: np.ndarray, cuts: np.ndarray, window: Window, grid: Grid
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of overlaps: place in `chosen`, the middle of the share, begin and end in elements."""
        pair, count = self.pair, window.count
        length = (pair.stop[chosen] - pair.start[chosen]) * grid.scale
        size = length[:, grid.dim] if length.shape[1] else np.ones(len(chosen), np.int64)
        turn = window.part_of(pair.turn[chosen])
        if window.whole:
            return np.arange(len(chosen)), (2 * turn + 1) * WHOLE // (2 * count), np.zeros_like(size), size
        # Each overlap begins elsewhere in the pattern, so that what is lost by rounding to whole steps evens out.
        shift = pair.turn[chosen] % self.turns * WHOLE // self.turns
        cuts = np.concatenate([_ends(len(chosen)), (cuts - shift[:, None]) % WHOLE], axis=1)
        cuts = cuts * count - turn[:, None] * WHOLE  # from 0 to WHOLE within the window
        place = (cuts * size[:, None] // WHOLE + grid.step // 2) // grid.step * grid.step
        place = np.where(cuts >= WHOLE, size[:, None], np.clip(place, 0, size[:, None]))
        place = np.sort(np.where(cuts <= 0, 0, place), axis=1)
        at, column = np.nonzero(np.diff(place, axis=1))
        begin, end = place[at, column], place[at, column + 1]
        middle = turn[at] * WHOLE // count + (begin + end) * WHOLE // (2 * size[at] * count)
        middle = (middle + shift[at]) % WHOLE
        return at, middle, begin, end

    def _cuts(self, chosen: np.ndarray, feeds: Feeds) -> np.ndarray:
        """`int64[overlaps, cuts]`: wherever something changes along the bytes of an overlap; unsorted."""
        near = self._near_cuts(chosen, feeds.rows(feeds.near >= 0))
        return np.concatenate([_ends(len(chosen)), *self._far_cuts(chosen, feeds.passers), *near], axis=1)

    def _far_cuts(self, chosen: np.ndarray, passers: np.ndarray) -> list[np.ndarray]:
        if not passers.any():
            return []
        senders, src_box = self._senders, self.pair.src_box[chosen]
        entries, holders = self._entry_cuts[self.pair.dst_box[chosen]], senders.holders
        within = np.concatenate([entries, holders.turned_cuts[holders.kind[src_box]]], axis=1)
        parts = _in_parts(within, senders.shares.direct[src_box], senders.parts(passers))
        return [np.where(passers[:, None] > 0, cuts, 0) for cuts in parts]

    @cached_property
    def _entry_cuts(self) -> np.ndarray:
        """`int64[destination boxes, cuts]`: the cuts between ranks that take something in, in all domains."""
        box = self.pair.dst.groups.box
        return self._senders.entries.columns(int(box.max(initial=-1)) + 1, box, np.arange(len(box)))

    def _near_cuts(self, chosen: np.ndarray, feeds: Feeds) -> list[np.ndarray]:
        if not len(feeds.at):
            return []
        senders = self._senders
        of, *_ = near_readers(self.pair, self.pair.src_box[chosen[feeds.at]], feeds.group)
        readers = np.bincount(of, minlength=len(feeds.at))
        kind, direct = senders.near_holders.kind[feeds.near], senders.shares.near_direct[feeds.near]
        at, kind, direct, readers = np.unique(np.stack([feeds.at, kind, direct, readers]), axis=1)
        parts = _in_parts(senders.near_holders.turned_cuts[kind], direct, readers)
        return [side_by_side(len(chosen), at, np.concatenate(parts, axis=1))]


def _ends(overlaps: int) -> np.ndarray:
    """`int64[overlaps, 2]`: where each overlap begins and ends."""
    return np.broadcast_to(np.array([0, WHOLE]), (overlaps, 2))


def _in_parts(within: np.ndarray, direct: np.ndarray, parts: np.ndarray) -> list[np.ndarray]:
    """Cuts within the direct share, and within each of the equal parts that the rest is divided into."""
    direct, parts = direct[:, None], parts[:, None]
    found = [direct, direct * within // WHOLE]
    if (direct < WHOLE).any():
        turns = np.arange(int(parts.max(initial=0)))[:, None] * WHOLE
        inside = np.minimum((turns + within[:, None, :]).reshape(len(within), -1), parts * WHOLE)
        found.append(direct + (WHOLE - direct) * inside // np.maximum(parts, 1) // WHOLE)
    return found


def _merged(hops: Hops) -> Hops:
    """The same with pieces that follow one another between the same ranks made one."""
    if not len(hops.src):
        return hops
    ranks = int(max(hops.src.max(initial=0), hops.dst.max(initial=0))) + 1
    way = ((hops.overlap * ranks + hops.dst) * ranks + hops.src) * PHASES + hops.phase
    order = np.argsort(way, kind="stable")  # those of one way are in order of begin
    overlap, src, dst, phase, begin, end = (
        column[order] for column in (hops.overlap, hops.src, hops.dst, hops.phase, hops.begin, hops.end)
    )
    new = np.ones(len(order), bool)
    new[1:] = (begin[1:] != end[:-1]) | np.diff(way[order]).astype(bool)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order)) - 1
    return Hops(overlap[first], src[first], dst[first], phase[first], begin[first], end[last])


def no_hops() -> Hops:
    """What a leaf without elements needs."""
    return Hops(*np.zeros((6, 0), np.int64))


def joined(parts: Sequence[Hops]) -> Hops:
    """Hops of different overlaps together."""
    columns = zip(*((h.overlap, h.src, h.dst, h.phase, h.begin, h.end) for h in [no_hops(), *parts]), strict=True)
    return Hops(*(np.concatenate(column) for column in columns))


def moves_of(pair: Pair, hops: Hops, grid: Grid) -> Moves:
    """The hops of a leaf as moves, in order of phase."""
    order = np.lexsort((hops.begin, hops.dst, hops.overlap, hops.phase))
    overlap = hops.overlap[order]
    start, stop = pair.start[overlap] * grid.scale, pair.stop[overlap] * grid.scale
    if start.shape[1]:
        stop[:, grid.dim] = start[:, grid.dim] + hops.end[order]
        start[:, grid.dim] += hops.begin[order]
    return Moves(hops.src[order], hops.dst[order], start, stop, hops.phase[order])
