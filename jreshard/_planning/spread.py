"""The two ways to choose senders: turns among replicas, or shares that even out the links of a topology."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jreshard._layout import Layout
from jreshard._planning.balance import Balance
from jreshard._planning.divisions import Division, Pair
from jreshard._planning.needs import Demand, Needs
from jreshard._planning.pattern import Pattern
from jreshard._planning.route import Kind, LeafMoves, Route, RouteRanks, devices_of, ranks_of
from jreshard._planning.stripes import Cutting, Stripes
from jreshard._planning.topology import Placement, Topology
from jreshard._planning.turns import Turns


def take_turns(routes: Sequence[Route]) -> None:
    """Lets replicas take turns, leaf by leaf, so that many leaves load them alike."""
    for route in routes:
        templates: list[LeafMoves] = []
        template_of: list[int] = []
        known: dict[Any, int] = {}
        turns: dict[Any, int] = {}
        for k in route.kind_of:
            kind = route.kinds[k]
            replicas = len(kind.src.part_of) // math.prod(kind.src.parts)
            rotation = turns.get(kind.src.division, 0)
            turns[kind.src.division] = (rotation + 1) % replicas
            index = known.setdefault((kind.src.key, kind.dst.key, kind.dtype, rotation), len(templates))
            if index == len(templates):
                chooser = Turns(kind.src, kind.dst, route.src_ranks, route.dst_ranks, rotation)
                templates.append(route.leaf_moves(kind, chooser))
            template_of.append(index)
        route.use(templates, template_of)


@dataclass(frozen=True)
class Spread:
    """What was known when the loads of a plan were evened out.

    Attributes:
        topology: the links.
        placement: where the ranks sit.
        needs: what has to move.
        fingerprint: equal where the same bytes would go the same ways.
    """

    topology: Topology
    placement: Placement
    needs: Needs
    fingerprint: bytes = b""


def place(routes: Sequence[Route], topology: Topology) -> tuple[Spread, list[RouteRanks], list[list[Pair]]]:
    """Where the ranks of a plan sit and what has to move; each route's ranks, and the pair of each of its kinds."""
    devices = devices_of(routes)
    sources = {device for route in routes for device in route.src_devices}
    placement = topology.place(devices, len(sources))
    divisions = _Divisions(placement)
    ranks = ranks_of(routes)
    pairs = [
        [divisions.pair(route, kind, of_route) for kind in route.kinds]
        for route, of_route in zip(routes, ranks, strict=True)
    ]
    totals: dict[Pair, Demand] = {}
    for route, of_route in zip(routes, pairs, strict=True):
        counts = np.bincount(route.kind_of, minlength=len(route.kinds)).tolist()
        for kind, pair, count in zip(route.kinds, of_route, counts, strict=True):
            before = totals.get(pair, Demand(pair, 0, 0))
            totals[pair] = Demand(pair, before.nbytes + kind.nbytes * count, before.arrays + count)
    return Spread(topology, placement, Needs(list(totals.values()))), ranks, pairs


def even_out(routes: Sequence[Route], topology: Topology) -> Spread:
    """Shares the sending out so that the busiest link has as little to carry as can be."""
    spread, ranks, pairs = place(routes, topology)
    balance = Balance(spread.needs, spread.placement, topology)
    patterns = {demand.pair: Pattern(demand.pair, balance) for demand in spread.needs.demands}
    turns: dict[Pair, int] = {}
    for route, of_route, of_kinds in zip(routes, ranks, pairs, strict=True):
        _stripe(route, of_route, [patterns[pair] for pair in of_kinds], turns, topology.smallest_piece)
    return replace(spread, fingerprint=_fingerprint(routes, ranks, patterns.values(), topology.smallest_piece))


def _fingerprint(
    routes: Sequence[Route], ranks: Sequence[RouteRanks], patterns: Iterable[Pattern], smallest: int
) -> bytes:
    """Of all that the moves follow from."""
    digest = hashlib.blake2b(repr(smallest).encode(), digest_size=8)
    for pattern in patterns:
        pattern.add_to(digest)
    for route, of_route in zip(routes, ranks, strict=True):
        digest.update(of_route.in_plan.tobytes())
        digest.update(np.array(route.kind_of, np.int64).tobytes())
        for kind in route.kinds:
            digest.update(repr((kind.src.shape, str(kind.dtype), kind.src.parts, kind.dst.parts)).encode())
    return digest.digest()


def _stripe(
    route: Route, ranks: RouteRanks, patterns: Sequence[Pattern], turns: dict[Pair, int], smallest: int
) -> None:
    """Gives each leaf its window of its pattern."""
    counts = np.bincount(route.kind_of, minlength=len(route.kinds)).tolist()
    cuts = [
        Cutting(kind, pattern, count, smallest)
        for kind, pattern, count in zip(route.kinds, patterns, counts, strict=True)
    ]
    templates: list[LeafMoves] = []
    template_of: list[int] = []
    known: dict[Any, int] = {}
    for k in route.kind_of:
        window = cuts[k].next_window(turns)
        index = known.setdefault((k, id(window)), len(templates))
        if index == len(templates):
            templates.append(route.leaf_moves(route.kinds[k], Stripes(route.kinds[k], cuts[k], window, ranks)))
        template_of.append(index)
    route.use(templates, template_of)


class _Divisions:
    """The divisions and pairs of a plan, each made once."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._divisions: dict[Any, Division] = {}
        self._pairs: dict[Any, Pair] = {}

    def pair(self, route: Route, kind: Kind, ranks: RouteRanks) -> Pair:
        src = self._division(kind.src, ranks.in_plan[route.src_ranks])
        dst = self._division(kind.dst, ranks.in_plan[route.dst_ranks])
        return self._pairs.setdefault((src, dst), Pair(src, dst))

    def _division(self, layout: Layout, ranks: np.ndarray) -> Division:
        domain = self._placement.domain
        return self._divisions.setdefault(
            (layout.division, ranks.tobytes()), Division(layout.parts, layout.part_of, ranks, len(domain), domain)
        )
