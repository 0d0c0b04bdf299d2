"""What has to move, whoever moves it: counted from the layouts, before any choice is made."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jreshard._planning.divisions import Division, Pair

_CHUNK = 1 << 20  # (overlap, group) pairs looked at together


@dataclass(frozen=True)
class Demand:
    """All arrays that go from one division to one other, taken together.

    Attributes:
        pair: the divisions.
        nbytes: what these arrays hold, each counted once.
        arrays: how many they are.
    """

    pair: Pair
    nbytes: int
    arrays: int


@dataclass(frozen=True)
class SourceNeeds:
    """What the holders of a source division must give, in bytes.

    Attributes:
        division: the division.
        least: `int64[boxes]`: what must cross the network from some holder, at least once.
        most: `int64[boxes]`: the same times the domains that want it.
        near_least: `int64[groups]`: what other ranks of the holders' own domain must read, at least once.
        near_most: `int64[groups]`: the same times the ranks that want it.
        confined: `int64[groups]`: the part of `near_least` that no rank outside the domain holds or wants.
    """

    division: Division
    least: np.ndarray
    most: np.ndarray
    near_least: np.ndarray
    near_most: np.ndarray
    confined: np.ndarray


@dataclass(frozen=True)
class TargetNeeds:
    """What the ranks of a destination division must get, in bytes.

    Attributes:
        division: the division.
        entering: `int64[groups]`: what must enter the domain through its ranks of this group.
        near: `int64[plan ranks]`: what each rank lacks and another rank of its domain holds.
        confined: `int64[plan ranks]`: the part of `near` that no rank outside the domain holds or wants.
    """

    division: Division
    entering: np.ndarray
    near: np.ndarray
    confined: np.ndarray


class Needs:
    """The needs of a whole plan.

    Attributes:
        demands: what goes from where to where.
        sources: by the source division's key.
        targets: by the destination division's key.
    """

    def __init__(self, demands: Sequence[Demand]) -> None:
        self.demands = tuple(demands)
        self.sources = {d.pair.src.key: _no_source_needs(d.pair.src) for d in demands}
        self.targets = {d.pair.dst.key: _no_target_needs(d.pair.dst) for d in demands}
        for demand in demands:
            self._add(demand)

    def _add(self, demand: Demand) -> None:
        pair = demand.pair
        source, target = self.sources[pair.src.key], self.targets[pair.dst.key]
        amounts = pair.amounts(demand.nbytes)
        groups = pair.dst.groups
        wanted = np.zeros(len(groups.first_of_box) - 1, np.int64)  # by destination box
        np.add.at(wanted, pair.dst_box, amounts)
        entering = wanted[groups.box]
        domains = np.diff(groups.first_of_box)[pair.dst_box]  # that want an overlap and do not hold it
        for chosen in runs(len(amounts), _CHUNK // max(1, pair.most_feeds)):
            at, near, group = pair.near(chosen)
            overlap = chosen[at]
            np.subtract.at(entering, group, amounts[overlap])
            np.subtract.at(domains, overlap, 1)
            _add_near(pair, source, target, amounts, overlap, group, near)
        target.entering[:] += entering
        np.add.at(source.least, pair.src_box, np.where(domains > 0, amounts, 0))
        np.add.at(source.most, pair.src_box, amounts * domains)


def runs(count: int, length: int) -> Iterator[np.ndarray]:
    """The numbers below `count`, so many at a time."""
    length = max(1, length)
    for begin in range(0, count, length):
        yield np.arange(begin, min(begin + length, count))


def feeds(pair: Pair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (overlap, destination group that wants it), all of an overlap's together, in runs of bounded length."""
    for chosen in runs(len(pair.src_box), _CHUNK // max(1, pair.most_feeds)):
        at, group = pair.dst.groups.of_boxes(pair.dst_box[chosen])
        yield chosen[at], group


def passers(overlap: np.ndarray, may: np.ndarray, overlaps: int) -> tuple[np.ndarray, np.ndarray]:
    """Who passes an overlap on to other domains: those that may, or all where none may.

    Args:
        overlap: `int64[feeds]`, of feeds across the network; sorted.
        may: `bool[feeds]`.
        overlaps: how many there are.

    Returns:
        `bool[feeds]`, whether each passes on; `int64[overlaps]`, how many do.
    """
    passes = may | (np.bincount(overlap, may, overlaps) == 0)[overlap]
    return passes, np.bincount(overlap[passes], minlength=overlaps)


def _add_near(
    pair: Pair,
    source: SourceNeeds,
    target: TargetNeeds,
    amounts: np.ndarray,
    overlap: np.ndarray,
    group: np.ndarray,
    near: np.ndarray,
) -> None:
    """Feeds whose domain has holders: `near` is their group."""
    feed, member = pair.dst.groups.members(group)
    reader = pair.dst.groups.rank[member]
    reads = pair.src.box[reader] != pair.src_box[overlap[feed]]  # the others have it
    feed, reader = feed[reads], reader[reads]
    readers = np.bincount(feed, minlength=len(overlap))
    amount = np.where(readers > 0, amounts[overlap], 0)
    only_here = (np.diff(pair.src.groups.first_of_box)[pair.src_box[overlap]] == 1) & (
        np.diff(pair.dst.groups.first_of_box)[pair.dst_box[overlap]] == 1
    )
    np.add.at(source.near_least, near, amount)
    np.add.at(source.near_most, near, amount * readers)
    np.add.at(source.confined, near, amount * only_here)
    np.add.at(target.near, reader, amount[feed])
    np.add.at(target.confined, reader, (amount * only_here)[feed])


def _zeros(count: int) -> Callable[[], np.ndarray]:
    return lambda: np.zeros(count, np.int64)


def _no_source_needs(division: Division) -> SourceNeeds:
    box, group = _zeros(math.prod(division.parts)), _zeros(len(division.groups.box))
    return SourceNeeds(division, box(), box(), group(), group(), group())


def _no_target_needs(division: Division) -> TargetNeeds:
    group, rank = _zeros(len(division.groups.box)), _zeros(division.num_ranks)
    return TargetNeeds(division, group(), rank(), rank())
