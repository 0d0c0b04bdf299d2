"""The usual practice, for comparison: gather and broadcast, and one sender for each shard."""

import numpy as np

from jreshard._planning.divisions import Pair
from jreshard._planning.loads import FAR, Loads
from jreshard._planning.needs import Demand
from jreshard._planning.spread import Spread


def one_sender_loads(spread: Spread) -> Loads:
    """The loads where the first holder of each shard sends to every rank that wants something of it.

    Bytes on the rank stay there; nothing is passed on, and no replica helps.
    """
    loads = Loads(spread.placement)
    for demand in spread.needs.demands:
        pair, amounts = demand.pair, demand.pair.amounts(demand.nbytes)
        first = pair.src.holders[pair.src_box, 0]
        wanters = np.bincount(pair.dst.box[pair.dst.ranks])
        of, reader = _near_readers(pair, first)
        # All across the network at first, by sums; then what is near goes where it belongs, one by one.
        for sent, received, added in (
            (loads.sent[0, FAR], loads.received[0, FAR], amounts),
            (loads.boxes_sent[0, FAR], loads.boxes_received[0, FAR], np.full_like(amounts, demand.arrays)),
        ):
            np.add.at(sent, first, added * wanters[pair.dst_box])
            by_box = np.zeros(len(wanters), np.int64)
            np.add.at(by_box, pair.dst_box, added)
            received[pair.dst.ranks] += by_box[pair.dst.box[pair.dst.ranks]]
            np.subtract.at(sent, first[of], added[of])
            np.subtract.at(received, reader, added[of])
        sender = np.where(pair.src.box[reader] == pair.src_box[of], reader, first[of])
        loads.add(sender, reader, np.zeros_like(of), amounts[of], boxes=demand.arrays)
    return loads


def _near_readers(pair: Pair, sender: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (overlap, rank that wants it) where the rank is in the domain of its sender, or holds it itself."""
    domain, groups = pair.dst.domain, pair.dst.groups
    group = pair.dst.group_at[pair.dst_box, domain[sender]]
    (fed,) = np.nonzero(group >= 0)
    at, member = groups.members(group[fed])
    of, reader = fed[at], groups.rank[member]
    (both,) = np.nonzero((pair.src.box >= 0) & (pair.dst.box >= 0))
    own = pair.overlap_of(pair.src.box[both], pair.dst.box[both])
    afar = (own >= 0) & (domain[sender[own]] != domain[both])
    return np.concatenate([of, own[afar]]), np.concatenate([reader, both[afar]])


def gather_and_broadcast_seconds(spread: Spread) -> float:
    """The time where each array is gathered on the trainer, and then broadcast by its first rank.

    Array by array: all ranks of the source mesh gather the whole array (a ring that uses every network card of every
    domain); then the first of them broadcasts it to all ranks of the destination, which keep their part. The
    broadcast's group has that one rank on the source side, so that the array leaves by its one card. Gathering one
    array does not overlap with broadcasting another.
    """
    topology = spread.topology
    return sum(
        _gather_seconds(demand, spread)
        + _broadcast_seconds(demand, spread)
        + 2 * demand.arrays * topology.costs.collective
        for demand in spread.needs.demands
    )


def _gather_seconds(demand: Demand, spread: Spread) -> float:
    src, topology = demand.pair.src, spread.topology
    boxes = len(src.holders)
    lacking = demand.nbytes - demand.nbytes // boxes  # of each rank
    seconds = lacking / topology.nvlink
    held = (src.group_at >= 0).sum(axis=0)
    for domain in np.unique(src.groups.domain).tolist():
        ports = len(np.unique(spread.placement.port[src.ranks[spread.placement.domain[src.ranks] == domain]]))
        entering = demand.nbytes * (boxes - int(held[domain])) / boxes
        seconds = max(seconds, entering / (ports * topology.nic))
    return seconds


def _broadcast_seconds(demand: Demand, spread: Spread) -> float:
    domain = spread.placement.domain
    root = int(demand.pair.src.ranks[0])
    afar = bool((domain[demand.pair.dst.ranks] != domain[root]).any())
    return demand.nbytes / (spread.topology.nic if afar else spread.topology.nvlink)
