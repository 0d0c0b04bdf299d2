"""The figures of a plan: what its links carry, how that compares, and how long it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jreshard._planning.bound import Bound, lower_bound
from jreshard._planning.cost import Link, Prediction, busiest, predict
from jreshard._planning.loads import LINKS, Loads
from jreshard._planning.route import Route, ranks_of
from jreshard._planning.spread import Spread
from jreshard._planning.topology import Topology
from jreshard._planning.usual import gather_and_broadcast_seconds, one_sender_loads


@dataclass(frozen=True)
class Figures:
    """What a plan does to the links of its topology.

    Attributes:
        topology: the links.
        loads: bytes and boxes by phase, kind of link and rank.
        busiest: the link that is busy longest.
        bound: what the busiest link of any plan must carry.
        predicted: how long the plan takes.
        one_sender: how long it would take if the first holder of each shard sent to everybody.
        gather_and_broadcast: the same, in seconds, for gathering each array and broadcasting it from one rank.
    """

    topology: Topology
    loads: Loads
    busiest: Link
    bound: Bound
    predicted: Prediction
    one_sender: Prediction
    gather_and_broadcast: float

    @property
    def phases(self) -> int:
        """Moves of one phase do not wait for one another; those of a later phase read what earlier ones wrote."""
        return self.loads.phases

    @property
    def bytes_by_link(self) -> dict[str, int]:
        """Bytes over each kind of link: `"local"`, `"nvlink"`, `"network"`."""
        return {name: self.loads.total(link) for link, name in enumerate(LINKS)}

    @property
    def boxes_by_link(self) -> dict[str, int]:
        """Boxes over each kind of link."""
        return {name: self.loads.boxes(link) for link, name in enumerate(LINKS)}

    @property
    def staging(self) -> int:
        """Bytes that cross the network in boxes that are not one run of memory on both sides, so that they are packed
        into an executor's buffers on their way. Within a domain nothing is staged."""
        return self.loads.packed

    @property
    def over_bound(self) -> float:
        """How many times longer the busiest link is busy than the bound asks; 1 where nothing has to move."""
        return self.busiest.seconds / self.bound.seconds if self.bound.seconds else 1.0


def figures_of(routes: Sequence[Route], spread: Spread, loads: Loads) -> Figures:
    """The figures of the routes of a plan."""
    topology = spread.topology
    published, received = np.zeros((2, len(spread.placement.domain)), np.int64)
    for route, in_plan in numbered(routes):
        np.add.at(published, in_plan[route.src_ranks], len(route.leaves))
        np.add.at(received, in_plan[route.dst_ranks], len(route.leaves))
    usual = one_sender_loads(spread)
    steps = sum(demand.arrays for demand in spread.needs.demands)
    return Figures(
        topology=topology,
        loads=loads,
        busiest=busiest(loads, topology),
        bound=lower_bound(spread),
        predicted=predict(loads, topology, published, received, steps),
        one_sender=predict(usual, topology, published, received, steps),
        gather_and_broadcast=gather_and_broadcast_seconds(spread),
    )


def add_loads(routes: Sequence[Route], loads: Loads) -> None:
    """Adds what all leaves of the routes move."""
    for route, in_plan in numbered(routes):
        for template, times in zip(route.templates, route.uses.tolist(), strict=True):
            if (totals := template.totals()) is not None:
                loads.add_totals(totals, template.wire.bits, times)
                continue
            for flows in template.flows():
                nbytes = flows.elements * template.wire.bits // 8
                ends = in_plan[flows.src], in_plan[flows.dst]
                loads.add(*ends, flows.phase, nbytes, times=times, strided=flows.strided)


def numbered(routes: Sequence[Route]) -> Iterator[tuple[Route, np.ndarray]]:
    """Each route with the plan's rank of each of its ranks."""
    for route, ranks in zip(routes, ranks_of(routes), strict=True):
        yield route, ranks.in_plan


def traffic_of(routes: Sequence[Route], num_ranks: int) -> np.ndarray:
    """`int64[ranks, ranks]`: bytes that go from rank (row) to rank (column); the diagonal stays on the device."""
    out = np.zeros(num_ranks * num_ranks, np.int64)
    for route, in_plan in numbered(routes):
        for template, times in zip(route.templates, route.uses.tolist(), strict=True):
            for flows in template.flows():
                nbytes = flows.elements * template.wire.bits // 8 * times
                np.add.at(out, in_plan[flows.src] * num_ranks + in_plan[flows.dst], nbytes)
    return out.reshape(num_ranks, num_ranks)
