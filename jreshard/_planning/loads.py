"""What every rank and every link carries, added up over flows."""

from functools import cached_property

import numpy as np

from jreshard._planning.arrays import largest
from jreshard._planning.moves import PHASES
from jreshard._planning.tally import Totals
from jreshard._planning.topology import Placement

LOCAL, NEAR, FAR = range(3)  # within a rank, within a domain, across the network
LINKS = ("local", "nvlink", "network")


class Loads:
    """Bytes and messages by phase, kind of link and rank.

    Attributes:
        placement: where the ranks sit.
        sent: `int64[phases, links, ranks]`, bytes that each rank sends; `links` are `LINKS`.
        received: the same for what it receives.
        boxes_sent: the same, counting boxes.
        boxes_received: likewise.
        packed: bytes that cross the network in boxes that are not one run of memory on both sides.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        shape = (PHASES, len(LINKS), len(placement.domain))
        self.sent, self.received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.boxes_sent, self.boxes_received = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.packed = 0

    def add(
        self,
        src: np.ndarray,
        dst: np.ndarray,
        phase: np.ndarray,
        nbytes: np.ndarray,
        *,
        times: int = 1,
        boxes: int = 1,
        strided: np.ndarray | None = None,
    ) -> None:
        """Adds flows between ranks of the plan, each `times` over; each is so many `boxes`."""
        domain = self.placement.domain
        link = np.where(src == dst, LOCAL, np.where(domain[src] == domain[dst], NEAR, FAR))
        row = (phase * len(LINKS) + link) * len(domain)
        for nbytes_of, boxes_of, rank in (
            (self.sent, self.boxes_sent, src),
            (self.received, self.boxes_received, dst),
        ):
            # Sums of whole numbers below 2 ** 53 are exact in float64.
            weights = np.bincount(row + rank, nbytes, nbytes_of.size).reshape(nbytes_of.shape)
            nbytes_of += weights.astype(np.int64) * times
            boxes_of += np.bincount(row + rank, minlength=boxes_of.size).reshape(boxes_of.shape) * (times * boxes)
        if strided is not None:
            self.packed += int(nbytes[strided & (link == FAR)].sum()) * times

    def add_totals(self, totals: Totals, bits: int, times: int) -> None:
        """Adds what flows add up to, where an element has so many bits, each `times` over."""
        for phase, link, sent, received in (
            (0, FAR, totals.sent, totals.received),
            (1, NEAR, totals.passed_on, totals.passed_to),
        ):
            for nbytes_of, boxes_of, (elements, boxes) in (
                (self.sent, self.boxes_sent, sent),
                (self.received, self.boxes_received, received),
            ):
                nbytes_of[phase, link] += elements * bits // 8 * times
                boxes_of[phase, link] += boxes * times
        self.packed += totals.packed * bits // 8 * times

    @property
    def phases(self) -> int:
        """Phases that have something to move."""
        used = self.boxes_received.any(axis=(1, 2))
        return largest(np.flatnonzero(used) + 1)

    def total(self, link: int) -> int:
        """Bytes that go over links of a kind."""
        return int(self.received[:, link].sum())

    def boxes(self, link: int) -> int:
        """Boxes that go over links of a kind."""
        return int(self.boxes_received[:, link].sum())

    @cached_property
    def port_sent(self) -> np.ndarray:
        """`int64[phases, ports]`: bytes that each network card sends."""
        return self._by_port(self.sent)

    @cached_property
    def port_received(self) -> np.ndarray:
        """`int64[phases, ports]`: bytes that each network card receives."""
        return self._by_port(self.received)

    def _by_port(self, by_rank: np.ndarray) -> np.ndarray:
        out = np.zeros((PHASES, self.placement.num_ports), np.int64)
        for phase in range(PHASES):
            np.add.at(out[phase], self.placement.port, by_rank[phase, FAR])
        return out
