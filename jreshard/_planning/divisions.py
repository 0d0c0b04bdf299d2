"""How arrays of whatever size are divided among ranks, and which parts of two divisions overlap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jreshard._layout import Layout
from jreshard._planning.arrays import among, ranges
from jreshard._planning.overlaps import overlaps


@dataclass(frozen=True, eq=False)
class Division:
    """The parts of an array along each dim and the rank that holds each, whatever the sizes of the dims.

    Attributes:
        parts: the number of parts along each dim.
        part_of: `int64[mesh devices, ndim]`, as in `Layout`.
        ranks: `int64[mesh devices]`, the plan's rank of each device.
        num_ranks: ranks of the plan.
        domain: `int64[plan ranks]`, where they sit.
    """

    parts: tuple[int, ...]
    part_of: np.ndarray
    ranks: np.ndarray
    num_ranks: int
    domain: np.ndarray

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.parts, self.parts, self.part_of)

    @cached_property
    def holders(self) -> np.ndarray:
        """`int64[boxes, replicas]`: the ranks that hold each box, in order of rank."""
        held = np.lexsort((self.ranks, self._layout.box_of))
        return self.ranks[held].reshape(math.prod(self.parts), -1)

    @cached_property
    def box(self) -> np.ndarray:
        """`int64[plan ranks]`: the box that each holds, or -1."""
        box = np.full(self.num_ranks, -1, np.int64)
        box[self.ranks] = self._layout.box_of
        return box

    @cached_property
    def groups(self) -> "Groups":
        """The ranks that hold the same box within the same domain."""
        box, domain = self._layout.box_of, self.domain[self.ranks]
        order = np.lexsort((self.ranks, domain, box))
        box, domain, rank = box[order], domain[order], self.ranks[order]
        new = np.ones(len(box), bool)
        new[1:] = (box[1:] != box[:-1]) | (domain[1:] != domain[:-1])
        first = np.flatnonzero(new)
        return Groups(box[first], domain[first], rank, first, np.diff(np.append(first, len(box))))

    @cached_property
    def group_at(self) -> np.ndarray:
        """`int32[boxes, domains]`: the group that holds a box in a domain, or -1."""
        at = np.full((math.prod(self.parts), int(self.domain.max(initial=-1)) + 1), -1, np.int32)
        at[self.groups.box, self.groups.domain] = np.arange(len(self.groups.box))
        return at

    @cached_property
    def key(self) -> Any:
        """Equal for divisions that are the same."""
        return self.parts, self.ranks.tobytes(), self.part_of.shape, self.part_of.tobytes()


@dataclass(frozen=True)
class Groups:
    """Ranks in groups, those of group `g` at `rank[first[g] : first[g] + size[g]]`; sorted by box, then domain.

    Attributes:
        box: `int64[groups]`, what they hold.
        domain: `int64[groups]`, where they sit.
        rank: `int64[members]`.
        first: `int64[groups]`.
        size: `int64[groups]`.
    """

    box: np.ndarray
    domain: np.ndarray
    rank: np.ndarray
    first: np.ndarray
    size: np.ndarray

    @cached_property
    def first_of_box(self) -> np.ndarray:
        """`int64[boxes + 1]`: where the groups of each box begin."""
        return np.searchsorted(self.box, np.arange(int(self.box.max(initial=-1)) + 2))

    def of_boxes(self, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (place in `boxes`, group that holds that box)."""
        first = self.first_of_box[boxes]
        count = self.first_of_box[boxes + 1] - first
        return np.repeat(np.arange(len(boxes)), count), ranges(first, count)

    def members(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (place in `groups`, place in `rank`) for every member of these groups."""
        size = self.size[groups]
        return np.repeat(np.arange(len(groups)), size), ranges(self.first[groups], size)

    @cached_property
    def table(self) -> np.ndarray:
        """`int64[groups, largest]`: the members of each, -1 beyond its size."""
        out = np.full((len(self.size), int(self.size.max(initial=1))), -1, np.int64)
        of, member = self.members(np.arange(len(self.size)))
        out[of, member - self.first[of]] = self.rank[member]
        return out


@dataclass(frozen=True, eq=False)
class Pair:
    """A source division and a destination division, and which of their boxes overlap.

    An overlap has the same relative place in arrays of all sizes, as every dim divides evenly by the parts on both
    sides: boxes are kept in units of 1 / `cells` of each dim.
    """

    src: Division
    dst: Division

    @cached_property
    def cells(self) -> tuple[int, ...]:
        """Per dim, into how many equal cells the cuts of both sides divide it."""
        return tuple(math.lcm(a, b) for a, b in zip(self.src.parts, self.dst.parts, strict=True))

    @cached_property
    def _overlaps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        src = Layout(self.cells, self.src.parts, self.src.part_of)
        return overlaps(src, Layout(self.cells, self.dst.parts, self.dst.part_of))

    @property
    def src_box(self) -> np.ndarray:
        """`int64[overlaps]`."""
        return self._overlaps[0]

    @property
    def dst_box(self) -> np.ndarray:
        """`int64[overlaps]`."""
        return self._overlaps[1]

    @property
    def start(self) -> np.ndarray:
        """`int64[overlaps, ndim]`, in cells."""
        return self._overlaps[2]

    @property
    def stop(self) -> np.ndarray:
        """`int64[overlaps, ndim]`, in cells."""
        return self._overlaps[3]

    @cached_property
    def weight(self) -> np.ndarray:
        """`int64[overlaps]`: cells in each; they add up to the cells of the array."""
        weight: np.ndarray = np.prod(self.stop - self.start, axis=1, dtype=np.int64)
        return weight

    def amounts(self, total: int) -> np.ndarray:
        """`int64[overlaps]`: `total` divided among the overlaps by size, rounded down."""
        cells = math.prod(self.cells)
        amounts: np.ndarray = total // cells * self.weight + total % cells * self.weight // cells
        return amounts

    @cached_property
    def place(self) -> np.ndarray:
        """`int64[overlaps]`: how many overlaps of the same destination box come before."""
        return _places(self.dst_box)

    @cached_property
    def turn(self) -> np.ndarray:
        """`int64[overlaps]`: runs on over the overlaps of each source box and of each destination box."""
        turn: np.ndarray = _places(self.src_box) + self.place
        return turn

    @cached_property
    def fewest(self) -> tuple[int, int]:
        """The fewest overlaps that any source box has, and any destination box."""
        counts = (np.unique(box, return_counts=True)[1] for box in (self.src_box, self.dst_box))
        per_source, per_target = (int(np.min(count)) if count.size else 1 for count in counts)
        return per_source, per_target

    def near(self, overlaps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where a domain holds what it wants: place in `overlaps`, the source's group and the destination's."""
        by_source = int(np.diff(self.src.groups.first_of_box).max(initial=0)) <= self.most_feeds
        one, other = (self.src, self.dst) if by_source else (self.dst, self.src)
        boxes = (self.src_box, self.dst_box) if by_source else (self.dst_box, self.src_box)
        at, ours = one.groups.of_boxes(boxes[0][overlaps])
        theirs = other.group_at[boxes[1][overlaps[at]], one.groups.domain[ours]].astype(np.int64)
        at, ours, theirs = (column[theirs >= 0] for column in (at, ours, theirs))
        return (at, ours, theirs) if by_source else (at, theirs, ours)

    def overlap_of(self, src_boxes: np.ndarray, dst_boxes: np.ndarray) -> np.ndarray:
        """`int64[boxes]`: the overlap of each source box with each destination box, or -1."""
        if not len(self.src_box):
            return np.full(len(src_boxes), -1)
        code = self.src_box * math.prod(self.dst.parts) + self.dst_box
        order = np.argsort(code)
        wanted = src_boxes * math.prod(self.dst.parts) + dst_boxes
        found = order[np.minimum(np.searchsorted(code, wanted, sorter=order), len(code) - 1)]
        return np.where(code[found] == wanted, found, -1)

    @property
    def most_feeds(self) -> int:
        """The domains that want a box, at most."""
        return int(np.diff(self.dst.groups.first_of_box).max(initial=0))

    def of_ranks(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The overlaps that one of these ranks may read or write."""
        src, dst = self.src.box[ranks], self.dst.box[ranks]
        found: np.ndarray = np.flatnonzero(among(self.src_box, src[src >= 0]) | among(self.dst_box, dst[dst >= 0]))
        return found


def _places(box: np.ndarray) -> np.ndarray:
    """For each entry, how many before it are equal."""
    order = np.argsort(box, kind="stable")
    places = np.empty(len(box), np.int64)
    places[order] = np.arange(len(box)) - np.searchsorted(box[order], box[order])
    return places
