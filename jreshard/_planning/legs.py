"""Who sends a piece to whom: from the holders into each domain, from domain to domain, and on to the fellows there."""

from dataclasses import dataclass

import numpy as np

from jreshard._planning.arrays import among, ranges
from jreshard._planning.balance import Balance
from jreshard._planning.divisions import Pair
from jreshard._planning.filling import WHOLE
from jreshard._planning.needs import passers
from jreshard._planning.shares import Shares, positions, split

_OFTEN = 32  # times that each domain passes something on, so that they come to do so alike


@dataclass(frozen=True)
class Legs:
    """One row for each time that a piece goes from rank to rank.

    Attributes:
        piece: `int64[legs]`.
        src: `int64[legs]`, a rank of the plan.
        dst: `int64[legs]`.
        phase: `int64[legs]`.
    """

    piece: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    phase: np.ndarray

    def rows(self, keep: np.ndarray) -> "Legs":
        """Those where `keep` is true."""
        return Legs(self.piece[keep], self.src[keep], self.dst[keep], self.phase[keep])


@dataclass(frozen=True)
class Feeds:
    """One row for each domain, or group of ranks in it, that wants an overlap.

    Attributes:
        at: `int64[feeds]`, the place of the overlap among those chosen; sorted.
        group: `int64[feeds]`, of the destination's groups.
        near: `int64[feeds]`, the source's group in the same domain that holds it; -1 where none does.
        position: `int64[feeds]`, how many of the same overlap and kind (near or far) come before.
        passing: `int64[feeds]`, how many before it pass the same overlap on to other domains; -1 where it does not.
        domains: `int64[chosen overlaps]`, the far feeds of each.
        passers: `int64[chosen overlaps]`, those of them that pass it on.
    """

    at: np.ndarray
    group: np.ndarray
    near: np.ndarray
    position: np.ndarray
    passing: np.ndarray
    domains: np.ndarray
    passers: np.ndarray

    def rows(self, keep: np.ndarray) -> "Feeds":
        """Those where `keep` is true."""
        at, group, near, position, passing = (
            column[keep] for column in (self.at, self.group, self.near, self.position, self.passing)
        )
        return Feeds(at, group, near, position, passing, self.domains, self.passers)

    def of_pieces(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (piece, feed), given the overlap of each piece."""
        begin = np.searchsorted(self.at, at)
        count = np.searchsorted(self.at, at, side="right") - begin
        return np.repeat(np.arange(len(at)), count), ranges(begin, count)


def feeds_of(pair: Pair, chosen: np.ndarray, may_pass: np.ndarray) -> Feeds:
    """The feeds of some overlaps; `may_pass` tells the groups that pass on to other domains, if others do not."""
    at, group = pair.dst.groups.of_boxes(pair.dst_box[chosen])
    near = pair.src.group_at[pair.src_box[chosen[at]], pair.dst.groups.domain[group]].astype(np.int64)
    position = np.empty_like(at)
    for kind in (near < 0, near >= 0):
        position[kind] = positions(at[kind])
    (far,) = np.nonzero(near < 0)
    passes, count = passers(at[far], may_pass[group[far]], len(chosen))
    passing = np.full_like(at, -1)
    passing[far[passes]] = positions(at[far[passes]])
    return Feeds(at, group, near, position, passing, np.bincount(at[far], minlength=len(chosen)), count)


class Senders:
    """Finds the sender of each piece for each rank that wants it.

    The bytes of an overlap are thought of as laid out from 0 to `WHOLE`; a piece is known by its middle.

    What crosses the network is sent by the holders to every domain that wants it in the first part, as long as the
    source's `direct` share. In the rest each domain that passes on has an interval in turn that it alone gets from the
    holders and passes on to the other domains. In either, the ranks of a domain have intervals, as `entries` says,
    which they take in and pass on to their fellows. Where a destination box has many overlaps, each of these is passed
    on by some of the domains only, which makes fewer pieces. What holders in the domain send is divided alike: in the
    first part they send to each rank that reads it; in the rest each reader in turn has an interval that it alone gets
    and passes on.
    """

    def __init__(self, pair: Pair, balance: Balance) -> None:
        self.pair, self.shares = pair, balance.sources(pair.src)
        self.holders, self.near_holders = Shares(self.shares.cuts), Shares(self.shares.near_cuts)
        self.entries, self.may_pass = Shares(balance.entries(pair.dst)), balance.may_pass(pair.dst)

    @property
    def options(self) -> tuple[int, int]:
        """How many holders a box has, and how many ranks of a domain may take something in, at most."""
        return self.shares.cuts.shape[1] - 1, self.entries.cuts.shape[1] - 1

    @property
    def relays(self) -> bool:
        """Whether something is passed on from domain to domain, or within the domain of its holders."""
        return bool((self.shares.direct < WHOLE).any() or (self.shares.near_direct < WHOLE).any())

    @property
    def wanters(self) -> np.ndarray:
        """`int64[destination boxes]`: the ranks that want each."""
        groups = self.pair.dst.groups
        return np.bincount(groups.box, groups.size).astype(np.int64)

    def parts(self, passers: np.ndarray) -> np.ndarray:
        """How many of the domains that pass on do so with an overlap, each with its part."""
        fewest = self.pair.fewest[1]  # together, so many overlaps of a box come to all domains often enough
        parts: np.ndarray = np.minimum(passers, -(-_OFTEN * passers // fewest))
        return parts

    def legs(
        self, chosen: np.ndarray, feeds: Feeds, at: np.ndarray, middle: np.ndarray, only: np.ndarray | None
    ) -> Legs:
        """The legs of pieces.

        Args:
            chosen: overlaps.
            feeds: of these overlaps.
            at: `int64[pieces]`, the place of each piece's overlap in `chosen`.
            middle: `int64[pieces]`, the middle of its share.
            only: leave out most legs that have nothing to do with these ranks.
        """
        if only is not None:
            feeds = feeds.rows(self._concern(chosen, feeds, only))
        far = self._far(chosen, feeds.rows(feeds.near < 0), at, middle, only)
        near = self._near(chosen, feeds.rows(feeds.near >= 0), at, middle)
        parts = [Legs(*np.zeros((4, 0), np.int64)), *far, *near]
        columns = zip(*((legs.piece, legs.src, legs.dst, legs.phase) for legs in parts), strict=True)
        return Legs(*(np.concatenate(column) for column in columns))

    def _concern(self, chosen: np.ndarray, feeds: Feeds, ranks: np.ndarray) -> np.ndarray:
        """The feeds that may have to do with these ranks: of their domain, of what they hold, or passed on."""
        pair, src_box = self.pair, self.pair.src_box[chosen][feeds.at]
        near = among(pair.dst.groups.domain[feeds.group], pair.dst.domain[ranks])
        held = among(src_box, pair.src.box[ranks])
        concern: np.ndarray = near | held | (self.shares.direct[src_box] < WHOLE)
        return concern

    def _far(
        self, chosen: np.ndarray, feeds: Feeds, at: np.ndarray, middle: np.ndarray, only: np.ndarray | None
    ) -> list[Legs]:
        if not len(feeds.at):
            return []
        piece, feed = feeds.of_pieces(at)
        src_box, u = self.pair.src_box[chosen[at[piece]]], middle[piece]
        direct = self.shares.direct[src_box]
        is_direct = u < direct
        count, overlap = feeds.passers[at[piece]], chosen[at[piece]]
        parts = self.parts(count)
        turn, within = split(u - direct, WHOLE - direct, parts)
        within = np.where(is_direct, u * WHOLE // np.maximum(direct, 1), within)
        first = is_direct | (feeds.passing[feed] == (turn + parts * self.pair.place[overlap]) % count)
        groups, group = self.pair.dst.groups, feeds.group[feed]
        entry = groups.rank[groups.first[group] + self.entries.at(group, within)]
        holder = self.holders.turned_at(src_box, within, feeds.position[feed])
        passer = np.zeros(len(at), np.int64)
        passer[piece[first]] = entry[first]  # read only where one domain alone is first
        sender = np.where(first, self.pair.src.holders[src_box, holder], passer[piece])
        arriving = Legs(piece, sender, entry, np.where(first, 0, 1))
        if only is not None:
            here = among(groups.domain[group], self.pair.dst.domain[only])
            group, taken_in = group[here], arriving.rows(here)
            arriving = arriving.rows(here | among(sender, only))
        else:
            taken_in = arriving
        of, member = groups.members(group)
        fellow = groups.rank[member]
        of, fellow = of[other := fellow != taken_in.dst[of]], fellow[other]
        return [arriving, Legs(taken_in.piece[of], taken_in.dst[of], fellow, taken_in.phase[of] + 1)]

    def _near(self, chosen: np.ndarray, feeds: Feeds, at: np.ndarray, middle: np.ndarray) -> list[Legs]:
        if not len(feeds.at):
            return []
        piece, feed = feeds.of_pieces(at)
        src_box = self.pair.src_box[chosen[at[piece]]]
        of, reader, owner_of, owner = near_readers(self.pair, src_box, feeds.group[feed])
        near, u, position = feeds.near[feed[of]], middle[piece[of]], positions(of)
        direct = self.shares.near_direct[near]
        is_direct = u < direct
        turn, within = split(u - direct, WHOLE - direct, np.bincount(of, minlength=len(piece))[of])
        within = np.where(is_direct, u * WHOLE // np.maximum(direct, 1), within)
        first = is_direct | (position == turn)
        groups = self.pair.src.groups
        holder = groups.rank[groups.first[near] + self.near_holders.turned_at(near, within, position)]
        passer = np.zeros(len(piece), np.int64)
        passer[of[first]] = reader[first]  # read only where one reader alone is first
        return [
            Legs(piece[owner_of], owner, owner, np.zeros(len(owner), np.int64)),
            Legs(piece[of], np.where(first, holder, passer[of]), reader, np.where(first, 0, 1)),
        ]


def near_readers(
    pair: Pair, src_box: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The members of groups: those that must read a source box, and those that have it.

    Args:
        pair: the divisions.
        src_box: `int64[groups]`.
        group: `int64[groups]`, of the destination's groups.

    Returns:
        The place in `group` and the rank of each reader; the same of each rank that has it.
    """
    of, member = pair.dst.groups.members(group)
    rank = pair.dst.groups.rank[member]
    has = pair.src.box[rank] == src_box[of]
    return of[~has], rank[~has], of[has], rank[has]
