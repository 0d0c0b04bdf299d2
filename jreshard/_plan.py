"""A plan: the moves of a whole tree, with its figures, ready to be executed as often as wanted."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jreshard import _render
from jreshard._checks import check_host_values, check_into, check_leaves, check_timeout
from jreshard._deadline import Deadline
from jreshard._explain import explain
from jreshard._leaves import Path, paths_of
from jreshard._picture import picture
from jreshard._planning.figures import Figures, add_loads, figures_of, numbered, traffic_of
from jreshard._planning.loads import LOCAL, Loads
from jreshard._planning.moves import Moves, no_moves
from jreshard._planning.route import Kind, Route, Target, devices_of
from jreshard._planning.spread import Spread
from jreshard._planning.topology import Placement, Topology
from jreshard._runtime.execution import Execution
from jreshard._runtime.transform import SourceTransform
from jreshard._runtime.transport import choose_transport
from jreshard._signature import Signature, alias_pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Move:
    """One box copied from one device to one device.

    Attributes:
        src_rank: the rank that is read, an index of `Plan.devices`.
        dst_rank: the rank that is written.
        start: where the box starts along each dim, in global elements.
        stop: where it ends, exclusive.
        nbytes: its size in bytes.
        phase: 0 where the source array is read; later where `src_rank` passes on what it was sent in an earlier phase.
    """

    src_rank: int
    dst_rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    nbytes: int
    phase: int = 0


@dataclass(frozen=True)
class Part:
    """What one rank of a plan sends and receives.

    Attributes:
        rank: the rank.
        moves: the different sets of moves that it has a part in, ranks numbered as in the plan.
        nbytes: `int64[moves]` for each of them, the bytes of each move.
        leaf: for each leaf of the result its place among `moves`; -1 for a value of the host.
    """

    rank: int
    moves: tuple[Moves, ...]
    nbytes: tuple[np.ndarray, ...]
    leaf: tuple[int, ...]


class Plan:
    """How a tree of arrays gets from its source shardings to its destination shardings.

    Made by `jreshard.plan`; looking at it moves nothing. Byte figures count what the executor moves: after any cast.

    Attributes:
        targets: the leaves of the result: path, shape, dtype, shardings.
        routes: the leaves grouped by (source mesh, destination mesh), each with its moves.
        devices: the device of each rank: those of the source meshes first, then the others. Meshes on which only leaves
            without elements lie are not counted.
        topology: the links that it was made for, or `None`.
    """

    def __init__(
        self,
        signature: Signature,
        out_treedef: Any,
        targets: Sequence[Target],
        routes: Sequence[Route],
        transform: SourceTransform | None,
        replan: Callable[[Any], "Plan"],
        spread: Spread | None = None,
    ) -> None:
        self._signature, self._out_treedef, self._replan = signature, out_treedef, replan
        self.targets, self.routes = tuple(targets), tuple(routes)
        self._transform = transform
        self._execution = Execution(targets, routes, transform)
        self._chosen: dict[str, str] = {}  # what each transport asked for comes to
        self.devices = devices_of(routes)
        self._spread = spread
        self.topology: Topology | None = None if spread is None else spread.topology

    def execute(
        self,
        params: Any,
        *,
        donate: bool = False,
        into: Any = None,
        verify: bool = False,
        timeout: float = 300.0,
        transport: str = "auto",
    ) -> Any:
        """Moves `params`, a tree like the one that the plan was made for.

        The arguments, the result and the errors are those of `jreshard.transfer`.

        Raises:
            ValueError: `params` differs from the tree that the plan was made for.
        """
        leaves, treedef = jax.tree.flatten(params)
        check_leaves(leaves, treedef, params, self._signature)
        if alias_pattern(leaves) != self._signature.pattern:
            return self._replan(params).execute(
                params, donate=donate, into=into, verify=verify, timeout=timeout, transport=transport
            )
        return self.execute_leaves(
            leaves, treedef, donate=donate, into=into, verify=verify, timeout=timeout, transport=transport
        )

    def holds(self, timeout: float) -> bool:
        """Whether the plan may be used again; asks other processes where they had a part in making it."""
        return self._transform is None or self._transform.lies_as_told(timeout)

    def execute_leaves(
        self,
        leaves: Sequence[Any],
        treedef: Any,
        *,
        donate: bool,
        into: Any,
        verify: bool,
        timeout: float,
        transport: str,
    ) -> Any:
        """`execute` for leaves that are known to be those that the plan was made for."""
        check_timeout(timeout)
        check_host_values(leaves, self._signature.sources, self._host_values)
        timeout = float(timeout)
        if transport not in self._chosen:
            self._chosen[transport] = choose_transport(transport, self.devices, Deadline.after(timeout))
        chosen = self._chosen[transport]
        old = None if into is None else self._check_into(into, leaves)
        out = self._execution.run(leaves, old, donate=donate, verify=verify, timeout=timeout, transport=chosen)
        # Without a transform the result has the very structure handed over: what its containers carry beside their
        # leaves may equal the planned one's and yet differ from it, as 1 and True do.
        return jax.tree.unflatten(treedef if self._transform is None else self._out_treedef, out)

    def _check_into(self, into: Any, leaves: Sequence[Any]) -> list[Array]:
        fresh, suspects = self._execution.returned, self._suspects
        return check_into(into, self._out_treedef, self.targets, leaves, fresh=fresh, suspects=suspects)

    @cached_property
    def _host_values(self) -> list[tuple[int, Path]]:
        """The places and paths of values of the host among the leaves handed over."""
        sources = self._signature.sources
        if all(source.sharding is not None for source in sources):
            return []
        paths = paths_of(jax.tree.unflatten(self._signature.treedef, sources))
        return [(i, path) for i, path in enumerate(paths) if sources[i].sharding is None]

    @cached_property
    def _suspects(self) -> tuple[list[int], list[int]]:
        """The places among sources and targets whose arrays may be views of one memory: shards alike, devices shared.

        That is what re-wrapped shards, and a `device_put` that has nothing to do, leave behind.
        """
        sources = [(_shard_kind(s.shape, s.dtype, s.sharding), s.sharding) for s in self._signature.sources]
        targets = [(_shard_kind(t.shape, t.dtype, t.dst), t.dst) for t in self.targets]
        kinds = {kind for kind, _ in sources} & {kind for kind, _ in targets}
        devices = {d for _, s in sources if s for d in s.device_set} & {
            d for _, s in targets if s for d in s.device_set
        }
        ours, theirs = (
            [i for i, (kind, s) in enumerate(side) if s and kind in kinds and not devices.isdisjoint(s.device_set)]
            for side in (sources, targets)
        )
        return ours, theirs

    @cached_property
    def traffic(self) -> np.ndarray:
        """`int64[ranks, ranks]`: bytes copied from rank (row) to rank (column); the diagonal stays on the device."""
        return traffic_of(self.routes, len(self.devices))

    @property
    def domains(self) -> np.ndarray | None:
        """`int64[ranks]`, the domain of each rank; `None` without a topology."""
        return None if self._spread is None else self._spread.placement.domain

    @cached_property
    def _loads(self) -> Loads:
        ranks = len(self.devices)
        one_domain = Placement(*np.zeros((3, ranks), np.int64))
        loads = Loads(one_domain if self._spread is None else self._spread.placement)
        add_loads(self.routes, loads)
        return loads

    @cached_property
    def figures(self) -> Figures:
        """What the plan does to the links of its topology, beside the bound and the usual practice.

        Raises:
            ValueError: the plan was made without a topology.
        """
        if self._spread is None:
            raise ValueError("this plan has no figures of links; make it with topology=…")
        return figures_of(self.routes, self._spread, self._loads)

    @property
    def num_leaves(self) -> int:
        """Leaves of the result."""
        return len(self.targets)

    @property
    def num_moves(self) -> int:
        """Boxes that are copied, within devices and between them."""
        return int(self._loads.boxes_received.sum())

    @property
    def num_messages(self) -> int:
        """Boxes that cross from one device to another."""
        return self.num_moves - self._loads.boxes(LOCAL)

    @property
    def nbytes(self) -> int:
        """Bytes of all destination shards that are moved, replicas counted each."""
        return int(self._loads.received.sum())

    @property
    def bytes_local(self) -> int:
        """Bytes copied within a device."""
        return self._loads.total(LOCAL)

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross from one device to another."""
        return self.nbytes - self.bytes_local

    @property
    def sent(self) -> np.ndarray:
        """`int64[ranks]`: bytes that each rank sends to others."""
        out: np.ndarray = self._loads.sent[:, LOCAL + 1 :].sum(axis=(0, 1))
        return out

    @property
    def received(self) -> np.ndarray:
        """`int64[ranks]`: bytes that each rank receives from others."""
        out: np.ndarray = self._loads.received[:, LOCAL + 1 :].sum(axis=(0, 1))
        return out

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that must cross at least: what each destination device needs and does not hold.

        Counted from the layouts alone, not from the moves: for each destination device the size of its shard less the
        intersection with the source shard that the same device holds.
        """
        total = 0
        for route in self.routes:
            wires = [template.wire.bits for template in route.templates]
            alike = Counter(zip(route.kind_of, (wires[t] for t in route.template_of), strict=True))
            total += sum(_needed(route, route.kinds[kind], bits) * count for (kind, bits), count in alike.items())
        return total

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal where the same bytes would go the same ways."""
        digest = hashlib.blake2b(digest_size=8)
        if self._spread is not None:
            digest.update(self._spread.fingerprint)
        else:
            for route in self.routes:
                digest.update(route.fingerprint.to_bytes(8, "little"))
        return digest.hexdigest()

    def moves(self, leaf: str | int) -> list[Move]:
        """The moves of one leaf of the result.

        Args:
            leaf: its place among the leaves, or its path as `jax.tree_util.keystr` writes it.

        Raises:
            KeyError: there is no such leaf.
        """
        m, nbytes = self._moves_of(self._place_of(leaf))
        rows = zip(*(column.tolist() for column in (m.src, m.dst, m.start, m.stop, nbytes, m.phase)), strict=True)
        return [Move(s, d, tuple(start), tuple(stop), n, phase) for s, d, start, stop, n, phase in rows]

    def part(self, rank: int) -> Part:
        """What one rank sends and receives, worked out without the others.

        Raises:
            KeyError: there is no such rank.
        """
        if not 0 <= rank < len(self.devices):
            raise KeyError(f"no rank {rank} in this plan; it has {len(self.devices)}")
        moves: list[Moves] = []
        nbytes: list[np.ndarray] = []
        leaf = [-1] * len(self.targets)
        for route, in_plan in self._numbered:
            first, ranks = len(moves), np.flatnonzero(in_plan == rank)
            for template in route.templates:
                found = template.part(ranks)
                nbytes.append(found.elements * template.wire.bits // 8)
                moves.append(Moves(in_plan[found.src], in_plan[found.dst], found.start, found.stop, found.phase))
            for one, template_index in zip(route.leaves, route.template_of, strict=True):
                leaf[one.index] = first + template_index
        return Part(rank, tuple(moves), tuple(nbytes), tuple(leaf[target.same_as] for target in self.targets))

    @cached_property
    def _numbered(self) -> list[tuple[Route, np.ndarray]]:
        return list(numbered(self.routes))

    def _place_of(self, leaf: str | int) -> int:
        names = [target.path for target in self.targets]
        index = leaf if isinstance(leaf, int) else names.index(leaf) if leaf in names else None
        if index is None or not 0 <= index < len(names):
            some = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            raise KeyError(f"no leaf {leaf!r} in this plan; it has {len(names)}: {some}")
        return index

    def _moves_of(self, place: int) -> tuple[Moves, np.ndarray]:
        """The moves of the leaf at this place, with ranks numbered as in the plan, and the bytes of each."""
        place = self.targets[place].same_as
        for route, in_plan in self._numbered:
            for position, candidate in enumerate(route.leaves):
                if candidate.index == place:
                    of = route.moves_of(position)
                    m = of.moves
                    return Moves(in_plan[m.src], in_plan[m.dst], m.start, m.stop, m.phase), of.nbytes
        return no_moves(), np.zeros(0, np.int64)

    def explain(self, leaf: str | int) -> str:
        """Which boxes of a leaf come from where, and why, as text.

        Args:
            leaf: as for `moves`.

        Raises:
            KeyError: there is no such leaf.
        """
        place = self._place_of(leaf)
        return explain(self, place, *self._moves_of(place))

    def plot(self) -> "Figure":
        """Pictures: bytes from rank to rank, and with a topology the load of each link beside the bound.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return picture(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan's figures, devices, traffic and leaves as JSON."""
        return json.dumps(_render.as_dict(self), indent=indent)

    def __repr__(self) -> str:
        return _render.as_text(self)

    def _repr_html_(self) -> str:
        return _render.as_html(self)


def _shard_kind(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Any:
    return None if sharding is None else (sharding.shard_shape(shape), dtype)


def _needed(route: Route, kind: Kind, bits: int) -> int:
    """Bytes that the destination devices of a leaf lack, where each element travels as `bits`."""
    src, dst = kind.src, kind.dst
    shard = np.array(dst.shard_shape, np.int64)
    needed = len(route.dst_ranks) * math.prod(dst.shard_shape)
    _, at_src, at_dst = np.intersect1d(route.src_ranks, route.dst_ranks, return_indices=True)
    src_start = src.part_of[at_src] * np.array(src.shard_shape, np.int64)
    dst_start = dst.part_of[at_dst] * shard
    stop = np.minimum(src_start + np.array(src.shard_shape, np.int64), dst_start + shard)
    held = np.clip(stop - np.maximum(src_start, dst_start), 0, None)
    needed -= int(np.prod(held, axis=1, dtype=np.int64).sum())
    return needed * bits // 8
