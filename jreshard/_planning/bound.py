"""What the busiest link of any plan must carry at least; proved in docs/planning.md."""

from dataclasses import dataclass

import numpy as np

from jreshard._planning.arrays import largest
from jreshard._planning.filling import Filling, settle
from jreshard._planning.needs import Needs
from jreshard._planning.spread import Spread


@dataclass(frozen=True)
class Bound:
    """No plan without staging is faster than the links allow.

    Attributes:
        seconds: the busiest link of any plan is busy at least this long.
        reason: which bytes must pass through which links.
        network_in: bytes that some network card must receive.
        network_out: bytes that some network card must send.
        nvlink_in: bytes that some rank must receive within its domain.
        nvlink_out: bytes that some rank must send within its domain.
    """

    seconds: float
    reason: str
    network_in: int
    network_out: int
    nvlink_in: int
    nvlink_out: int


def lower_bound(spread: Spread) -> Bound:
    """The largest of the bounds that hold for any plan."""
    needs, topology = spread.needs, spread.topology
    network_in, network_out = _entering(spread), max(_leaving(spread), _sent(spread))
    nvlink_in, nvlink_out = _confined_in(needs), _confined_out(spread)
    candidates = [
        (network_in / topology.nic, "what domains want and do not hold must enter through the network cards there"),
        (network_out / topology.nic, "what other domains want must leave through the network cards of its holders"),
        (nvlink_in / topology.nvlink, "what no other domain has must reach each rank within its domain"),
        (nvlink_out / topology.nvlink, "what no other domain has must leave its holders within their domain"),
        (_arriving(spread), "what ranks lack must reach them by their links within the domain or by their card"),
        (_near(spread), "what a domain holds must leave its holders within it, or enter it once more by its cards"),
    ]
    seconds, reason = max(candidates)
    return Bound(seconds, reason, network_in, network_out, nvlink_in, nvlink_out)


def _entering(spread: Spread) -> int:
    num_ports = spread.placement.num_ports
    fillings = []
    for target in spread.needs.targets.values():
        table = target.division.groups.table
        ports = np.where(table >= 0, spread.placement.port[np.maximum(table, 0)], -1)
        fillings.append(Filling(ports, target.entering, target.entering, num_ports))
    return _cut(fillings, num_ports)


def _leaving(spread: Spread) -> int:
    num_ports = spread.placement.num_ports
    fillings = [
        Filling(spread.placement.port[source.division.holders], source.least, source.least, num_ports)
        for source in spread.needs.sources.values()
    ]
    return _cut(fillings, num_ports)


def _sent(spread: Spread) -> int:
    """Everything that enters some domain is sent by some card of a rank that holds or wants something."""
    needs, port = spread.needs, spread.placement.port
    ranks = [s.division.ranks for s in needs.sources.values()] + [t.division.ranks for t in needs.targets.values()]
    total = sum(int(source.most.sum()) for source in needs.sources.values())
    return -(-total // max(1, len(np.unique(port[np.concatenate(ranks)])))) if ranks else 0


def _confined_in(needs: Needs) -> int:
    confined = sum((target.confined for target in needs.targets.values()), np.zeros(1, np.int64))
    return largest(confined)


def _confined_out(spread: Spread) -> int:
    num_ranks = len(spread.placement.domain)
    fillings = [
        Filling(source.division.groups.table, source.confined, source.confined, num_ranks)
        for source in spread.needs.sources.values()
    ]
    return _cut(fillings, num_ranks)


def _arriving(spread: Spread) -> float:
    """Seconds until all ranks that share a card, or some of them, have what they lack, from near and from afar."""
    placement, topology = spread.placement, spread.topology
    lacking = np.zeros(len(placement.domain), np.int64)
    for target in spread.needs.targets.values():
        groups = target.division.groups
        of, member = groups.members(np.arange(len(groups.size)))
        np.add.at(lacking, groups.rank[member], target.entering[of])
        lacking += target.near
    most_first = np.lexsort((-lacking, placement.port))
    total, count = _running(lacking[most_first], placement.port[most_first])
    return float(np.max(total / (count * topology.nvlink + topology.nic), initial=0.0))


def _near(spread: Spread) -> float:
    """Seconds until what domains hold and want has left its holders there, or entered by cards of who wants it.

    Sets of holders are tried as in `_cut`, those of each domain by themselves.
    """
    placement, topology = spread.placement, spread.topology
    num_ranks = len(placement.domain)
    if not num_ranks:
        return 0.0
    fillings = [
        Filling(source.division.groups.table, source.near_least, source.near_least, num_ranks)
        for source in spread.needs.sources.values()
    ]
    level = settle(fillings, np.zeros(num_ranks, np.int64))
    fullest_first = np.lexsort((-level, placement.domain))
    place = np.empty(num_ranks, np.int64)
    place[fullest_first] = np.arange(num_ranks)
    confined = np.zeros(num_ranks, np.int64)  # by the place of the least full rank that each group may use
    for filling in fillings:
        last = num_ranks - 1 - filling.emptiest(num_ranks - 1 - place)
        np.add.at(confined, last, filling.least)
    total, count = _running(confined, placement.domain[fullest_first])
    readers = np.unique(np.concatenate([target.division.ranks for target in spread.needs.targets.values()]))
    _, first = np.unique(placement.port[readers], return_index=True)
    cards_of = np.bincount(placement.domain[readers[first]], minlength=int(placement.domain.max()) + 1)
    either = count * topology.nvlink + cards_of[placement.domain[fullest_first]] * topology.nic
    return float(np.max(total / either, initial=0.0))


def _running(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Running totals and counts within runs of equal groups."""
    first = np.append(True, np.diff(group) != 0)[: len(group)]
    begin = np.maximum.accumulate(np.where(first, np.arange(len(group)), 0))
    total = np.cumsum(values)
    return total - (total - values)[begin], np.arange(len(group)) - begin + 1


def _cut(fillings: list[Filling], num_bins: int) -> int:
    """What the fullest bin holds at least, however the amounts are shared out.

    The amounts of groups that may use no bin outside a set of bins are all in that set, so one of its bins holds at
    least their sum over its size. Any set will do. Those tried are the bins that are at least so full when the amounts
    have been evened out: if that came out best, the fullest bins alone give the very load that was reached.
    """
    level = settle(fillings, np.zeros(num_bins, np.int64))
    thresholds, place = np.unique(level, return_inverse=True)
    place = place.reshape(-1)
    confined = np.zeros(len(thresholds), np.int64)  # by the least full bin that each group may use
    for filling in fillings:
        np.add.at(confined, filling.emptiest(place), filling.least)
    inside = np.cumsum(confined[::-1])
    bins = np.cumsum(np.bincount(place, minlength=len(thresholds))[::-1])
    return largest(-(-inside // bins))
