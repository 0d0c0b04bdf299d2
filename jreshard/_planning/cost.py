"""How long loads take: the link model, told in docs/planning.md."""

from dataclasses import dataclass

import numpy as np

from jreshard._planning.arrays import largest
from jreshard._planning.loads import FAR, LOCAL, NEAR, Loads
from jreshard._planning.topology import Topology


@dataclass(frozen=True)
class Link:
    """One direction of one link.

    Attributes:
        kind: `"nvlink"` or `"network"`.
        direction: `"out"` or `"in"`.
        number: the rank whose link it is; for the network, the number of the card.
        nbytes: what it carries.
        seconds: how long that takes.
    """

    kind: str
    direction: str
    number: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """How long a transfer takes, in seconds.

    Attributes:
        total: from the call to the last byte.
        links: how long the busiest link, or the copying within a rank, takes.
        fill: how much longer it takes because later phases wait for the first bytes of earlier ones.
        host: what the busiest process spends on launching.
    """

    total: float
    links: float
    fill: float
    host: float


def link_loads(loads: Loads, phases: slice = slice(None)) -> list[tuple[str, str, np.ndarray]]:
    """Kind, direction and `int64[links]` bytes of all links, over some phases together."""
    return [
        ("network", "out", loads.port_sent[phases].sum(axis=0)),
        ("network", "in", loads.port_received[phases].sum(axis=0)),
        ("nvlink", "out", loads.sent[phases, NEAR].sum(axis=0)),
        ("nvlink", "in", loads.received[phases, NEAR].sum(axis=0)),
    ]


def link_rates(topology: Topology) -> dict[str, float]:
    """Bytes a second, one way, by kind of link."""
    return {"network": topology.nic, "nvlink": topology.nvlink}


def busiest(loads: Loads, topology: Topology, phases: slice = slice(None)) -> Link:
    """The link that is busy longest."""
    rates = link_rates(topology)
    found = []
    for kind, direction, nbytes in link_loads(loads, phases):
        most = largest(nbytes)
        number = int(np.argmax(nbytes)) if most else 0
        found.append(Link(kind, direction, number, most, most / rates[kind]))
    return max(found, key=lambda link: link.seconds)


def predict(loads: Loads, topology: Topology, published: np.ndarray, received: np.ndarray, steps: int) -> Prediction:
    """The time that a plan takes.

    Args:
        loads: what the links carry.
        topology: how fast they carry it.
        published: `int64[ranks]`, how many arrays each rank has that are read.
        received: `int64[ranks]`, how many it has that are written.
        steps: leaves whose later phases overlap with earlier phases of other leaves.
    """
    costs = topology.costs
    within = largest(loads.sent[:, LOCAL].sum(axis=0)) / topology.memory
    links = max(busiest(loads, topology).seconds, within)
    later = [busiest(loads, topology, slice(phase, phase + 1)).seconds for phase in range(loads.phases)]
    fill = (sum(later) - max(later)) / max(1, steps) if later else 0.0
    messages = loads.boxes_sent[:, FAR].sum(axis=0) + loads.boxes_received[:, FAR].sum(axis=0)
    by_rank = (
        costs.publish * published
        + costs.receive * received
        + costs.copy * loads.boxes_received.sum(axis=(0, 1))
        + costs.message * messages
    )
    host = max(np.bincount(loads.placement.process, by_rank).tolist(), default=0.0)
    return Prediction(costs.call + max(links + fill + host, costs.launch * host), links, fill, host)
