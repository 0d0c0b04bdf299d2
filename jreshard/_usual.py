"""The usual practice, for comparison: gather and broadcast, and one sender for each shard."""

import numpy as np

from jreshard._loads import Loads
from jreshard._needs import Demand, feeds
from jreshard._spread import Spread


def one_sender_loads(spread: Spread) -> Loads:
    """The loads where the first holder of each shard sends to every rank that wants something of it.

    Bytes on the rank stay there; nothing is passed on, and no replica helps.
    """
    loads = Loads(spread.placement)
    for demand in spread.needs.demands:
        pair = demand.pair
        amounts = pair.amounts(demand.nbytes)
        for overlap, group in feeds(pair):
            feed, member = pair.dst.groups.members(group)
            reader, of = pair.dst.groups.rank[member], overlap[feed]
            box = pair.src_box[of]
            sender = np.where(pair.src.box[reader] == box, reader, pair.src.holders[box, 0])
            loads.add(sender, reader, np.zeros(len(reader), np.int64), amounts[of], boxes=demand.arrays)
    return loads


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
