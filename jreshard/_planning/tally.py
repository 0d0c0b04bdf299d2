"""What the links carry for a leaf, without listing its moves, where they are too many and much alike.

Where no domain holds any of what it wants, and nothing is passed on from domain to domain, what a domain takes in
depends on little: on its ranks' shares, and on which holder its turn begins with. Domains that agree in these are of a
*class*; one of them is worked out for all. Time then grows with the overlaps, not with overlaps times the ranks that
want them.
"""

import math
from dataclasses import dataclass

import numpy as np

from jreshard._planning.arrays import ranges
from jreshard._planning.filling import WHOLE
from jreshard._planning.legs import Senders


@dataclass(frozen=True)
class Cut:
    """Pieces of some overlaps of one leaf, in order, one row each.

    Attributes:
        overlap: `int64[pieces]`; sorted.
        middle: `int64[pieces]`, where in its overlap's bytes it lies, in 1 / `WHOLE`.
        elements: `int64[pieces]`.
        whole: `bool[pieces]`: whether the pieces of the overlap make up all of it.
        strided: `bool[2, pieces]`: whether a part of the overlap is several runs of memory, and whether all of it is.
    """

    overlap: np.ndarray
    middle: np.ndarray
    elements: np.ndarray
    whole: np.ndarray
    strided: np.ndarray


@dataclass(frozen=True)
class Totals:
    """Elements and boxes, in rows of two, by rank of the plan.

    Attributes:
        sent: `int64[2, ranks]`, what holders send across the network.
        received: `int64[2, ranks]`, what arrives from there.
        passed_on: `int64[2, ranks]`, what ranks that took something in pass on within their domain.
        passed_to: `int64[2, ranks]`, what arrives from those.
        packed: elements that cross the network in boxes that are several runs of memory.
    """

    sent: np.ndarray
    received: np.ndarray
    passed_on: np.ndarray
    passed_to: np.ndarray
    packed: int


class Tally:
    """Adds up what pieces make the ranks of a pair send and receive.

    Args:
        senders: of the pair.
        classes: of the domains that want something.
    """

    def __init__(self, senders: Senders, classes: "Classes") -> None:
        self._senders, self._classes, self._pair = senders, classes, senders.pair
        self._sent = np.zeros((2, senders.pair.src.num_ranks), np.int64)
        shape = len(classes.group), senders.options[1]
        self._taken, self._passed_boxes = np.zeros((2, *shape), np.int64), np.zeros(shape, np.int64)
        self._packed = 0

    def add(self, cut: Cut) -> None:
        """Adds pieces; all those of an overlap at once."""
        if not len(cut.overlap):
            return
        box, classes = self._pair.dst_box[cut.overlap], self._classes
        first = classes.first_of_box[box]
        count = classes.first_of_box[box + 1] - first
        piece, of = np.repeat(np.arange(len(box)), count), ranges(first, count)
        middle, times = cut.middle[piece], classes.size[of]
        src_box = self._pair.src_box[cut.overlap[piece]]
        entry = self._senders.entries.at(classes.group[of], middle)
        holder = self._senders.holders.turned_at(src_box, middle, classes.position[of])
        # The row of the same class and the piece before is as many rows up as its overlap has classes.
        before = np.maximum(np.arange(len(piece)) - count[piece], 0)
        follows = np.append(False, np.diff(cut.overlap) == 0)[piece]
        passes = ~(follows & (entry == entry[before]))
        crosses = passes | (holder != holder[before])
        elements = cut.elements[piece]
        holder = self._pair.src.holders[src_box, holder]
        for row, values in enumerate((elements, crosses)):
            np.add.at(self._sent[row], holder, values * times)
            np.add.at(self._taken[row], (of, entry), values)
        np.add.at(self._passed_boxes, (of, entry), passes)
        whole = cut.whole[piece] & self._in_one(cut.overlap, piece, of - first[piece], count, crosses)
        strided = np.where(whole, cut.strided[1][piece], cut.strided[0][piece])
        self._packed += int((elements * times)[strided].sum())

    def _in_one(
        self, overlap: np.ndarray, piece: np.ndarray, place: np.ndarray, count: np.ndarray, crosses: np.ndarray
    ) -> np.ndarray:
        """For each row whether all pieces of its overlap cross together to its class."""
        new = np.append(True, np.diff(overlap) != 0)
        begin = (np.cumsum(np.where(new, count, 0)) - count)[piece] + place  # the same for all pieces of an overlap
        boxes = np.bincount(begin, crosses)
        alone: np.ndarray = boxes[begin] == 1
        return alone

    def totals(self) -> Totals:
        """All that was added."""
        groups, of = self._pair.dst.groups, self._classes.of
        group, member = groups.members(np.arange(len(groups.size)))
        rank, option, others = groups.rank[member], member - groups.first[group], groups.size[group] - 1
        received, passed_on, passed_to = np.zeros((3, *self._sent.shape), np.int64)
        for row, passed in enumerate((self._taken[0], self._passed_boxes)):
            own = passed[of[group], option]
            received[row, rank] = self._taken[row, of[group], option]
            passed_on[row, rank] = own * others
            passed_to[row, rank] = passed.sum(axis=1)[of[group]] - own
        return Totals(self._sent, received, passed_on, passed_to, self._packed)


@dataclass(frozen=True)
class Classes:
    """Groups of a destination in classes, in order of box.

    Attributes:
        group: `int64[classes]`, one of the class.
        position: `int64[classes]`, with which turn they begin.
        size: `int64[classes]`, how many they are.
        of: `int64[groups]`, the class of each group.
        first_of_box: `int64[boxes + 1]`, where the classes of each box begin.
    """

    group: np.ndarray
    position: np.ndarray
    size: np.ndarray
    of: np.ndarray
    first_of_box: np.ndarray

    @staticmethod
    def of_pair(senders: Senders) -> "Classes | None":
        """The classes of a pair; `None` where a domain holds some of what it wants, or domains pass something on."""
        groups, holders = senders.pair.dst.groups, senders.holders
        if (senders.shares.direct < WHOLE).any() or np.isin(groups.domain, senders.pair.src.groups.domain).any():
            return None
        turns = math.lcm(*np.unique(holders.size).tolist())
        position = (np.arange(len(groups.box)) - groups.first_of_box[groups.box]) % turns
        (box, _, position), group, of, size = np.unique(
            np.stack([groups.box, senders.entries.kind, position]),
            axis=1,
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        first_of_box = np.searchsorted(box, np.arange(int(box.max(initial=-1)) + 2))
        return Classes(group, position, size, of.reshape(-1), first_of_box)

    @property
    def most(self) -> int:
        """The classes that want the same box, at most."""
        return int(np.diff(self.first_of_box).max(initial=1))
