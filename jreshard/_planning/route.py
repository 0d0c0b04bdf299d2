"""A route: the leaves of a plan that go from one mesh to one other, with their moves."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh, NamedSharding

from jreshard._layout import AnyMesh, Layout, layout_of_sharding
from jreshard._planning.moves import Flows, Moves
from jreshard._planning.tables import copy_words, leaves_in_a_call, plan_words
from jreshard._planning.tally import Totals
from jreshard._wire import Wire, wire_of


@dataclass(slots=True)  # not frozen: models have tens of thousands, and those take four times as long to make
class Leaf:
    """One array of the tree that moves.

    Attributes:
        index: its place among the leaves of the tree that is moved.
        path: its key path, as text.
        shape: the global shape.
        dtype: the dtype on the destination.
        src: where it lies.
        dst: where it goes.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: Any
    src: NamedSharding
    dst: NamedSharding


class Target(NamedTuple):  # for the same reason
    """Where one leaf of the result comes from and goes to.

    Attributes:
        path: its key path, as text.
        shape: the global shape.
        dtype: the dtype on the destination.
        src: where it lies; `None` for a value of the host.
        src_dtype: the dtype there.
        dst: where it goes.
        same_as: the place of the leaf whose array it shares; its own place where it is the first or only one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    src: NamedSharding | None
    src_dtype: Any
    dst: NamedSharding
    same_as: int

    @property
    def is_made_in_place(self) -> bool:
        """Whether it is an array without elements, which takes no part in the programs.

        There is nothing to move, and XLA crashes where it compiles them with such operands (jaxlib 0.11.2).
        """
        return self.src is not None and 0 in self.shape


@dataclass(frozen=True)
class Kind:
    """What leaves of the same shape, dtype and shardings have in common.

    Attributes:
        dtype: the dtype on the destination.
        wire: the form in which they travel, where all boxes begin and end on a byte.
        src: how the travelling array lies on the source mesh.
        dst: how it lies on the destination mesh.
    """

    dtype: Any
    wire: Wire
    src: Layout
    dst: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of the travelling array."""
        return int(np.prod(self.src.shape, dtype=np.int64)) * self.wire.bits // 8


class Chooser(Protocol):
    """Chooses who sends which box of a leaf."""

    def moves(self, only: Sequence[int] | np.ndarray | None = None) -> Moves:
        """All moves of the leaf; with `only`, those that read or write one of these ranks of the route."""

    def totals(self) -> Totals | None:
        """What the moves add up to, where that can be told without listing them."""

    def flows(self) -> Iterator[Flows]:
        """The moves without their boxes, in runs of bounded length."""


class LeafMoves:
    """The moves of one leaf, shared by all leaves that are alike; worked out when they are looked at.

    Attributes:
        wire: the form in which it travels.
    """

    def __init__(self, kind: Kind, chooser: Chooser, src_ranks: np.ndarray, dst_ranks: np.ndarray) -> None:
        self._kind, self._chooser, self._src_ranks, self._dst_ranks = kind, chooser, src_ranks, dst_ranks
        self.wire = kind.wire
        if kind.wire.bits < 8 and (self.relays or self._words_at(kind.wire.bits) is None):
            self.wire = wire_of(kind.dtype, packed=False)

    @cached_property
    def moves(self) -> Moves:
        """Boxes of the travelling array, from rank to rank."""
        return self._chooser.moves()

    @cached_property
    def nbytes(self) -> np.ndarray:
        """`int64[moves]`, the bytes of each move."""
        return self.moves.elements * self.wire.bits // 8

    @cached_property
    def relays(self) -> bool:
        """Whether some move reads what another has written."""
        return bool(self.moves.phase.any())

    @cached_property
    def words(self) -> np.ndarray:
        """The same for the native core."""
        words = self._words_at(self.wire.bits)
        assert words is not None, "whole bytes are always expressible"
        return words

    def _words_at(self, bits: int) -> np.ndarray | None:
        return copy_words(self.moves, self._kind.src, self._kind.dst, self._src_ranks, self._dst_ranks, bits)

    def totals(self) -> Totals | None:
        """What the moves add up to, where that can be told without listing them; not kept."""
        return self._chooser.totals()

    def flows(self) -> Iterator[Flows]:
        """The moves without their boxes, in runs of bounded length; not kept."""
        return self._chooser.flows()

    def part(self, ranks: Sequence[int] | np.ndarray) -> Moves:
        """The moves that read or write one of these ranks of the route; not kept."""
        return self._chooser.moves(only=ranks)


class Route:
    """The leaves that go from `src_mesh` to `dst_mesh`.

    Attributes:
        leaves: the leaves, in the order in which they travel.
        kinds: the different kinds of leaf.
        kind_of: the kind of each leaf, an index of `kinds`.
        templates: the different moves; given by `use`.
        template_of: those of each leaf, an index of `templates`; given by `use`.
        src_devices: the source mesh's devices, in its order.
        dst_devices: the destination mesh's.
        devices: the device of each rank: the source mesh's first, then the destination's that are not in it. For
            meshes without devices (`AbstractMesh`), text in their place.
        part_ends: the leaf at which each part ends that is launched by itself.
    """

    def __init__(
        self, src_mesh: AnyMesh, dst_mesh: AnyMesh, leaves: list[Leaf], part_ends: Sequence[int] | None = None
    ) -> None:
        self.src_mesh, self.dst_mesh, self.leaves = src_mesh, dst_mesh, leaves
        self.part_ends = [len(leaves)] if part_ends is None else list(part_ends)
        self.src_devices, self.dst_devices = _devices(src_mesh, "source"), _devices(dst_mesh, "destination")
        self.devices = tuple(dict.fromkeys((*self.src_devices, *self.dst_devices)))
        rank_of = {device: rank for rank, device in enumerate(self.devices)}
        self.src_ranks = np.array([rank_of[device] for device in self.src_devices], np.int64)
        self.dst_ranks = np.array([rank_of[device] for device in self.dst_devices], np.int64)
        self.templates: list[LeafMoves] = []
        self.template_of: list[int] = []
        self._find_kinds()

    def _find_kinds(self) -> None:
        known: dict[Any, int] = {}
        same: dict[Any, int] = {}  # by the very shardings, which are slow to hash
        layouts = _Layouts()
        self.kinds: list[Kind] = []
        self.kind_of: list[int] = []
        for leaf in self.leaves:
            very = leaf.shape, leaf.dtype, id(leaf.src), id(leaf.dst)
            if (index := same.get(very, -1)) < 0:
                index = same[very] = known.setdefault((leaf.shape, leaf.dtype, leaf.src, leaf.dst), len(self.kinds))
            if index == len(self.kinds):
                wire = wire_of(leaf.dtype)
                shape = leaf.shape + wire.tail
                self.kinds.append(Kind(leaf.dtype, wire, layouts.get(shape, leaf.src), layouts.get(shape, leaf.dst)))
            self.kind_of.append(index)

    def use(self, templates: list[LeafMoves], template_of: list[int]) -> None:
        """Settles how the leaves move."""
        self.templates, self.template_of = templates, template_of

    def leaf_moves(self, kind: Kind, chooser: Chooser) -> LeafMoves:
        """The moves of leaves of a kind, as chosen."""
        return LeafMoves(kind, chooser, self.src_ranks, self.dst_ranks)

    def moves_of(self, leaf: int) -> LeafMoves:
        """The moves of the leaf at this position of `leaves`."""
        return self.templates[self.template_of[leaf]]

    @cached_property
    def uses(self) -> np.ndarray:
        """`int64[templates]`: how many leaves move as each says."""
        return np.bincount(self.template_of, minlength=len(self.templates))

    def in_parts(self, parts: Sequence[Sequence[int]]) -> "Route":
        """The same with the leaves in another order: those of each part, by their positions in `leaves`."""
        order = [i for part in parts for i in part]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        arranged = Route(self.src_mesh, self.dst_mesh, [self.leaves[i] for i in order], ends)
        arranged.use(self.templates, [self.template_of[i] for i in order])
        return arranged

    @cached_property
    def chunks_by_part(self) -> list[list[slice]]:
        """The leaves of each FFI call, by the part that is launched with it."""
        size = leaves_in_a_call(getattr(self.devices[0], "platform", "none"))
        begins = [0, *self.part_ends[:-1]]
        return [
            [slice(at, min(at + size, end)) for at in range(begin, end, size)]
            for begin, end in zip(begins, self.part_ends, strict=True)
        ]

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Every two ranks of which the second reads something from the first."""
        rows = [np.stack([t.moves.src, t.moves.dst], axis=1) for t in self.templates]
        pairs = np.unique(np.concatenate(rows), axis=0) if rows else np.zeros((0, 2), np.int64)
        return [(src, dst) for src, dst in pairs.tolist() if src != dst]

    @cached_property
    def table(self) -> np.ndarray:
        """The words of the whole route for the native core."""
        words = [template.words for template in self.templates]
        ends = [chunk.stop for part in self.chunks_by_part for chunk in part]
        return plan_words(len(self.devices), self.src_ranks, self.dst_ranks, self.template_of, words, ends)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that are equal where every rank would copy the same; the key of compiled programs."""
        digest = hashlib.blake2b(self.table.tobytes(), digest_size=8)
        digest.update(repr([str(device) for device in self.devices]).encode())
        return int.from_bytes(digest.digest(), "little") >> 1


@dataclass(frozen=True)
class RouteRanks:
    """A route's ranks and the plan's.

    Attributes:
        in_plan: `int64[route ranks]`, the plan's rank of each.
        in_route: `int64[plan ranks]`, the reverse; -1 for ranks that have no part in the route.
    """

    in_plan: np.ndarray
    in_route: np.ndarray


def devices_of(routes: Sequence[Route]) -> tuple[Any, ...]:
    """The device of each rank of a plan: those of the source meshes first, then the others."""
    sides = {id(route.src_mesh): route.src_devices for route in routes}
    found = dict.fromkeys(device for devices in sides.values() for device in devices)
    sides = {id(route.dst_mesh): route.dst_devices for route in routes}
    found.update(dict.fromkeys(device for devices in sides.values() for device in devices))
    return tuple(found)


def ranks_of(routes: Sequence[Route]) -> list[RouteRanks]:
    """The ranks of each route among those of the plan that the routes make up."""
    rank_of = {device: rank for rank, device in enumerate(devices_of(routes))}
    known: dict[Any, np.ndarray] = {}

    def plan_ranks(side: str, mesh: AnyMesh, devices: Sequence[Any]) -> np.ndarray:
        if (side, mesh) not in known:
            known[side, mesh] = np.array([rank_of[device] for device in devices], np.int64)
        return known[side, mesh]

    out = []
    for route in routes:
        in_plan = np.empty(len(route.devices), np.int64)
        in_plan[route.src_ranks] = plan_ranks("source", route.src_mesh, route.src_devices)
        in_plan[route.dst_ranks] = plan_ranks("destination", route.dst_mesh, route.dst_devices)
        in_route = np.full(len(rank_of), -1, np.int64)
        in_route[in_plan] = np.arange(len(in_plan))
        out.append(RouteRanks(in_plan, in_route))
    return out


class _Layouts:
    """Layouts, with the parts of equal shardings worked out once."""

    def __init__(self) -> None:
        self._known: dict[Any, Layout] = {}

    def get(self, shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
        known = self._known.setdefault((len(shape), sharding), layout_of_sharding(shape, sharding))
        return known if known.shape == shape else Layout(shape, known.parts, known.part_of)


def _devices(mesh: AnyMesh, side: str) -> list[Any]:
    if isinstance(mesh, Mesh):
        return list(mesh.devices.flat)
    return [f"{side} {i}" for i in range(int(np.prod(mesh.axis_sizes, dtype=np.int64)))]
