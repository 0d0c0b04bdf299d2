"""What the busiest link of any plan must carry at least; proved in docs/planning.md."""

from dataclasses import dataclass

import numpy as np

from jreshard._filling import Filling, settle
from jreshard._needs import Needs
from jreshard._planner import largest
from jreshard._spread import Spread


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
    lacking = _lacking(spread)
    candidates = [
        (network_in / topology.nic, "what domains want and do not hold must enter through the network cards there"),
        (network_out / topology.nic, "what other domains want must leave through the network cards of its holders"),
        (nvlink_in / topology.nvlink, "what no other domain has must reach each rank within its domain"),
        (nvlink_out / topology.nvlink, "what no other domain has must leave its holders within their domain"),
        (lacking / (topology.nvlink + topology.nic), "what a rank lacks must reach it by one of its two links"),
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


def _lacking(spread: Spread) -> int:
    """The most that any rank lacks, from near and from afar."""
    lacking = np.zeros(len(spread.placement.domain), np.int64)
    for target in spread.needs.targets.values():
        groups = target.division.groups
        of, member = groups.members(np.arange(len(groups.size)))
        np.add.at(lacking, groups.rank[member], target.entering[of])
        lacking += target.near
    return largest(lacking)


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
