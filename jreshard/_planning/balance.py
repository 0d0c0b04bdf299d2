"""Who sends what share of everything: the loads of a whole plan, evened out over the links of a topology.

What is decided here holds for all leaves of a kind: shares of bytes, not boxes. `_pattern` turns shares into boxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jreshard._planning.arrays import largest
from jreshard._planning.divisions import Division
from jreshard._planning.filling import WHOLE, Filling, settle, settle_below
from jreshard._planning.needs import Needs, SourceNeeds, TargetNeeds, feeds, passers
from jreshard._planning.topology import Placement, Topology

_TRIES = 4  # of how much to pass on
_BITS = 44  # amounts are kept below 2 ** _BITS, so that products with fractions fit 64 bits


@dataclass(frozen=True)
class SourceShares:
    """Which share of each source box each of its holders sends, in 1 / `WHOLE`.

    Attributes:
        cuts: `int64[boxes, replicas + 1]`, the shares of the holders of a box in what crosses the network.
        direct: `int64[boxes]`, the share that the holders send to each domain that wants it; the rest they send to one
            domain, in equal parts to each, and it is passed on from there.
        near_cuts: `int64[groups, largest + 1]`, the shares of the holders in a domain in what their own domain reads.
        near_direct: `int64[groups]`, the share that they send to each reader; the rest to one, in equal parts.
    """

    cuts: np.ndarray
    direct: np.ndarray
    near_cuts: np.ndarray
    near_direct: np.ndarray


class Balance:
    """The shares of a whole plan.

    Bytes on the rank stay there. Bytes that some rank of the domain holds are read within the domain. All others cross
    the network once for each domain that wants them, to one of the domain's ranks that want them, which passes them on
    to the others.

    Args:
        needs: what has to move.
        placement: where the ranks sit.
        topology: what the links carry.
    """

    def __init__(self, needs: Needs, placement: Placement, topology: Topology) -> None:
        most = sum(int(n.most.sum() + n.near_most.sum()) for n in needs.sources.values())
        unit = 1 << max(0, most.bit_length() - _BITS)
        self._sources = {key: _Source(need, placement, unit) for key, need in needs.sources.items()}
        self._targets = {key: _Target(need, placement, unit) for key, need in needs.targets.items()}
        self._needs, self._unit = needs, unit
        self._settle(placement, topology)
        self._shares = {key: source.shares(*self._fullest) for key, source in self._sources.items()}
        entries = {key: target.filling.fractions(self._fullest[0]) for key, target in self._targets.items()}
        self._entries = entries

    def sources(self, division: Division) -> SourceShares:
        """The shares of the holders of a source division."""
        return self._shares[division.key]

    def entries(self, division: Division) -> np.ndarray:
        """`int64[groups, largest + 1]`: which share of what enters a domain each rank of the group takes in first."""
        return self._entries[division.key]

    def may_pass(self, division: Division) -> np.ndarray:
        """`bool[groups]`: whether what a group has taken in is passed on to other domains by it, if not by all."""
        return self._targets[division.key].may_pass

    def _settle(self, placement: Placement, topology: Topology) -> None:
        """Settles the network first, then the links within domains."""
        far = [source.filling for source in self._sources.values()]
        near = [source.near_filling for source in self._sources.values()]
        faster = max(1, round(topology.nvlink / topology.nic))
        leaving = settle(far, np.zeros(placement.num_ports, np.int64))
        # Evenly by card, unless ranks that have a card to themselves would then have too much to pass on.
        intake = self._take_in(placement, near, by_card=True)
        if placement.num_ports < len(placement.domain):
            by_rank = self._take_in(placement, near, by_card=False)
            if by_rank.slowest(faster) < intake.slowest(faster):
                intake = by_rank
            else:
                intake = self._take_in(placement, near, by_card=True)
        entering, received, passed_on, near_leaving = intake
        # No link need be less loaded than the one that takes longest anyway: what needs no relay goes without.
        network_limit = max(largest(entering), largest(leaving))
        near_limit = max(largest(received), largest(near_leaving))
        self._settle_network(placement, max(network_limit, near_limit // faster), leaving)
        settle_below(near, passed_on, max(near_limit, network_limit * faster))
        self._fullest = max(network_limit, near_limit // faster), max(near_limit, network_limit * faster)

    def _take_in(self, placement: Placement, near: Sequence[Filling], *, by_card: bool) -> "_Intake":
        """Settles who takes in what enters each domain: evenly over the cards there, or over the ranks."""
        for target in self._targets.values():
            target.by_card = by_card
        settle([target.filling for target in self._targets.values()], np.zeros(len(placement.domain), np.int64))
        entering = np.zeros(placement.num_ports, np.int64)
        received, passed_on = np.zeros((2, len(placement.domain)), np.int64)
        for target in self._targets.values():
            target.add_loads(placement, entering, received, passed_on)
        return _Intake(entering, received, passed_on, settle(near, passed_on))

    def _settle_network(self, placement: Placement, limit: int, leaving: np.ndarray) -> None:
        """Decides how much the holders send to every domain, and how much is passed on by domains that have it.

        Where cards that send for holders also pass on, each choice changes the room for the other: a few are tried, and
        the one whose fullest card is least full is kept. If that is too full, only those pass on whose cards have not
        much to send for holders.
        """
        best = self._try_relays(placement, limit)
        if best[0] <= limit:
            return
        targets = list(self._targets.values())
        for target in targets:
            target.let_pass(2 * leaving <= limit, placement)
        if self._try_relays(placement, limit)[0] < best[0]:
            return
        for target in targets:
            target.let_pass(np.ones_like(leaving, bool), placement)
        for source, state in zip(self._sources.values(), best[1], strict=True):
            source.filling.state = state

    def _try_relays(self, placement: Placement, limit: int) -> tuple[int, list[tuple[np.ndarray, np.ndarray]]]:
        """The best of a few tries, which the fillings are left at: how full the fullest card is, and their states."""
        far = [source.filling for source in self._sources.values()]
        relayed = np.zeros(placement.num_ports, np.int64)
        tried = []
        for _ in range(_TRIES):
            level = settle_below(far, relayed, limit) - relayed
            relayed = self._relayed(placement)
            tried.append((largest(level + relayed), [filling.state for filling in far]))
            if tried[-1][0] <= limit:
                break
        best = min(tried, key=lambda one: one[0])
        for filling, state in zip(far, best[1], strict=True):
            filling.state = state
        return best

    def _relayed(self, placement: Placement) -> np.ndarray:
        """`int64[ports]`: what each card passes on to other domains."""
        out = np.zeros(placement.num_ports, np.int64)
        passed = {key: np.zeros_like(target.entering) for key, target in self._targets.items()}
        for demand in self._needs.demands:
            pair = demand.pair
            extra = self._sources[pair.src.key].filling.extra
            if (extra == WHOLE).all():
                continue
            amounts = -(-pair.amounts(demand.nbytes) // self._unit)
            for overlap, group in feeds(pair):
                far = pair.src.group_at[pair.src_box[overlap], pair.dst.groups.domain[group]] < 0
                overlap, group = overlap[far], group[far]
                others = np.bincount(overlap, minlength=len(amounts)) - 1
                passes, count = passers(overlap, self.may_pass(pair.dst)[group], len(amounts))
                overlap, group = overlap[passes], group[passes]
                kept = amounts[overlap] * (WHOLE - extra[pair.src_box[overlap]]) // WHOLE
                np.add.at(passed[pair.dst.key], group, kept * others[overlap] // count[overlap])
        for key, target in self._targets.items():
            target.add_relayed(passed[key], placement, out)
        return out


class _Intake(NamedTuple):
    """What links carry of what domains take in.

    Attributes:
        entering: `int64[ports]`, what each card receives.
        received: `int64[ranks]`, what each rank receives within its domain.
        passed_on: `int64[ranks]`, what it passes on there of what it took in.
        near_leaving: `int64[ranks]`, all that it sends there.
    """

    entering: np.ndarray
    received: np.ndarray
    passed_on: np.ndarray
    near_leaving: np.ndarray

    def slowest(self, faster: int) -> int:
        """The fullest link in bytes of one within a domain, of which it carries `faster` times as many as a card."""
        return max(largest(self.entering) * faster, largest(self.received), largest(self.near_leaving))


class _Source:
    """What the holders of a division send."""

    def __init__(self, needs: SourceNeeds, placement: Placement, unit: int) -> None:
        division, ranks = needs.division, len(placement.domain)
        least, most, near_least, near_most = (
            -(-amount // unit) for amount in (needs.least, needs.most, needs.near_least, needs.near_most)
        )
        self.filling = Filling(placement.port[division.holders], least, most, placement.num_ports)
        self.near_filling = Filling(division.groups.table, near_least, near_most, ranks)

    def shares(self, far_fullest: int, near_fullest: int) -> SourceShares:
        """The shares of the holders, given how full the fullest links are."""
        far, near = self.filling, self.near_filling
        return SourceShares(far.fractions(far_fullest), far.extra, near.fractions(near_fullest), near.extra)


class _Target:
    """What the ranks of a division take in.

    Attributes:
        by_card: whether what enters is shared out over cards, or over ranks.
        may_pass: `bool[groups]`, as `Balance.may_pass`.
    """

    def __init__(self, needs: TargetNeeds, placement: Placement, unit: int) -> None:
        self._groups, table = needs.division.groups, needs.division.groups.table
        cards = np.where(table >= 0, placement.port[np.maximum(table, 0)], -1)
        self.entering, self._near = -(-needs.entering // unit), -(-needs.near // unit)
        self.by_card, self.may_pass = True, np.ones(len(self.entering), bool)
        self._by_card, self._by_rank = (
            Filling(bins, self.entering, self.entering, len(placement.domain)) for bins in (cards, table)
        )

    @property
    def filling(self) -> Filling:
        """Shares out what enters."""
        return self._by_card if self.by_card else self._by_rank

    def add_loads(
        self, placement: Placement, entering: np.ndarray, received: np.ndarray, passed_on: np.ndarray
    ) -> None:
        """Adds what each card takes in, and what each rank receives and passes on within its domain."""
        groups = self._groups
        of, member = groups.members(np.arange(len(groups.size)))
        taken = self.filling.poured[of, member - groups.first[of]]
        np.add.at(entering, placement.port[groups.rank[member]], taken)
        np.add.at(received, groups.rank[member], self.entering[of] - taken)
        np.add.at(passed_on, groups.rank[member], taken * (groups.size[of] - 1))
        received += self._near

    def let_pass(self, cards: np.ndarray, placement: Placement) -> None:
        """Lets those groups pass on to other domains that use none but these cards: `bool[ports]`."""
        groups = self._groups
        of, member = groups.members(np.arange(len(groups.size)))
        self.may_pass = np.bincount(of, ~cards[placement.port[groups.rank[member]]], len(groups.size)) == 0

    def add_relayed(self, passed: np.ndarray, placement: Placement, relayed: np.ndarray) -> None:
        """Adds to each card what its ranks pass on, given what each group does: in the shares in which they took in."""
        groups = self._groups
        of, member = groups.members(np.arange(len(groups.size)))
        taken = self.filling.poured[of, member - groups.first[of]]
        share = taken * WHOLE // np.maximum(self.entering[of], 1)
        np.add.at(relayed, placement.port[groups.rank[member]], passed[of] * share // WHOLE)
