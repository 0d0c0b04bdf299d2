"""Other ways to choose senders, as published systems do it, as loads on the same tables as the planner's.

Each takes the arrays of a plan (their pair of divisions and their bytes) and says what every link would carry. None
passes anything on but `chains`; all leave bytes on the rank that holds them.
"""

from collections.abc import Callable, Iterator

import numpy as np

from jreshard._planning.divisions import Pair
from jreshard._planning.loads import Loads
from jreshard._planning.spread import Spread

Arrays = list[tuple[Pair, int]]


def wanted(pair: Pair, nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Overlap, rank that wants it and bytes, for every overlap and every such rank that does not hold it."""
    at, group = pair.dst.groups.of_boxes(pair.dst_box)
    feed, member = pair.dst.groups.members(group)
    overlap, rank = at[feed], pair.dst.groups.rank[member]
    lacks = pair.src.box[rank] != pair.src_box[overlap]
    return overlap[lacks], rank[lacks], pair.amounts(nbytes)[overlap[lacks]]


def one_holder(spread: Spread, arrays: Arrays) -> Loads:
    """The first holder of each shard (data-parallel rank 0) sends to everybody."""
    return _each(spread, arrays, lambda pair, overlap, rank: pair.src.holders[pair.src_box[overlap], 0])


def whole_replicas(spread: Spread, arrays: Arrays) -> Loads:
    """Each destination replica is served by one source replica throughout, in turn."""

    def sender(pair: Pair, overlap: np.ndarray, rank: np.ndarray) -> np.ndarray:
        replicas = pair.src.holders.shape[1]
        place = np.empty(len(spread.placement.domain), np.int64)
        place[pair.dst.holders] = np.arange(pair.dst.holders.shape[1])
        return pair.src.holders[pair.src_box[overlap], place[rank] % replicas]

    return _each(spread, arrays, sender)


def greedy(spread: Spread, arrays: Arrays) -> Loads:
    """Array by array, the largest first, each box is sent by the holder that has the least to send so far."""
    loads, sent = Loads(spread.placement), np.zeros(len(spread.placement.domain), np.int64)
    for pair, nbytes in sorted(arrays, key=lambda array: -array[1]):
        overlap, rank, amount = wanted(pair, nbytes)
        holders = pair.src.holders[pair.src_box[overlap]]
        sender = holders[:, 0].copy()
        if holders.shape[1] > 1:
            for i, options in enumerate(holders):
                sender[i] = options[np.argmin(sent[options])]
                sent[sender[i]] += amount[i]
        else:
            np.add.at(sent, sender, amount)
        loads.add(sender, rank, np.zeros(len(rank), np.int64), amount)
    return loads


def chains(spread: Spread, arrays: Arrays) -> Loads:
    """The first holder sends to the first rank that wants a shard, and each of them to the next (a broadcast chain)."""
    loads = Loads(spread.placement)
    for pair, nbytes in arrays:
        overlap, rank, amount = wanted(pair, nbytes)
        order = np.lexsort((rank, overlap))
        overlap, rank, amount = overlap[order], rank[order], amount[order]
        first = np.append(True, overlap[1:] != overlap[:-1])[: len(overlap)]
        sender = np.where(first, pair.src.holders[pair.src_box[overlap], 0], np.roll(rank, 1))
        loads.add(sender, rank, np.where(first, 0, 1), amount)
    return loads


def _each(spread: Spread, arrays: Arrays, sender: Callable[[Pair, np.ndarray, np.ndarray], np.ndarray]) -> Loads:
    loads = Loads(spread.placement)
    for pair, nbytes in _summed(arrays):
        overlap, rank, amount = wanted(pair, nbytes)
        loads.add(sender(pair, overlap, rank), rank, np.zeros(len(rank), np.int64), amount)
    return loads


def _summed(arrays: Arrays) -> Iterator[tuple[Pair, int]]:
    totals: dict[Pair, int] = {}
    for pair, nbytes in arrays:
        totals[pair] = totals.get(pair, 0) + nbytes
    yield from totals.items()


POLICIES = {"one holder": one_holder, "whole replicas": whole_replicas, "greedy": greedy, "chains": chains}
