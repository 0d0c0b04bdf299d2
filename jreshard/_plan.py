"""A plan: the moves of a whole tree, with its figures, ready to be executed as often as wanted."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jreshard import _render
from jreshard._checks import check_into, check_leaves, check_timeout
from jreshard._deadline import Deadline
from jreshard._execution import Execution
from jreshard._layout import layout_of_sharding
from jreshard._route import LeafMoves, Route, Target
from jreshard._sources import Source, alias_pattern
from jreshard._transform import SourceTransform
from jreshard._transport import choose_transport


@dataclass(frozen=True)
class Move:
    """One box copied from one device to one device.

    Attributes:
        src_rank: the rank that is read, an index of `Plan.devices`.
        dst_rank: the rank that is written.
        start: where the box starts along each dim, in global elements.
        stop: where it ends, exclusive.
        nbytes: its size in bytes.
    """

    src_rank: int
    dst_rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Signature:
    """What a plan was made for: the tree handed over, before any transform.

    Attributes:
        treedef: its structure.
        sources: what each leaf is.
        pattern: which leaves are the same array (`alias_pattern`).
    """

    treedef: Any
    sources: tuple[Source, ...]
    pattern: tuple[int, ...] | None


class Plan:
    """How a tree of arrays gets from its source shardings to its destination shardings.

    Made by `jreshard.plan`; looking at it moves nothing. Byte figures count what the executor moves: after any cast.

    Attributes:
        targets: the leaves of the result: path, shape, dtype, shardings.
        routes: the leaves grouped by (source mesh, destination mesh), each with its moves.
        devices: the device of each rank: those of the source meshes first, then the others.
    """

    def __init__(
        self,
        signature: Signature,
        out_treedef: Any,
        targets: Sequence[Target],
        routes: Sequence[Route],
        transform: SourceTransform | None,
        replan: Callable[[Any], "Plan"],
    ) -> None:
        self._signature, self._out_treedef, self._replan = signature, out_treedef, replan
        self.targets, self.routes = tuple(targets), tuple(routes)
        self._transform = transform
        self._execution = Execution(targets, routes, transform)
        self._chosen: dict[str, str] = {}  # what each transport asked for comes to
        sources = [device for route in routes for device in route.devices[: len(route.src_ranks)]]
        self.devices = tuple(dict.fromkeys([*sources, *(d for route in routes for d in route.devices)]))

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
        check_leaves(leaves, treedef, params, self._signature.treedef, self._signature.sources)
        if alias_pattern(leaves) != self._signature.pattern:
            return self._replan(params).execute(
                params, donate=donate, into=into, verify=verify, timeout=timeout, transport=transport
            )
        return self.execute_leaves(
            leaves, treedef, donate=donate, into=into, verify=verify, timeout=timeout, transport=transport
        )

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
        if transport not in self._chosen:
            self._chosen[transport] = choose_transport(transport, self.devices, Deadline.after(timeout))
        chosen = self._chosen[transport]
        old = None if into is None else self._check_into(into, leaves)
        out = self._execution.run(leaves, old, donate=donate, verify=verify, timeout=float(timeout), transport=chosen)
        # Without a transform the result has the very structure handed over: what its containers carry beside their
        # leaves may equal the planned one's and yet differ from it, as 1 and True do.
        return jax.tree.unflatten(treedef if self._transform is None else self._out_treedef, out)

    def _check_into(self, into: Any, leaves: Sequence[Any]) -> list[Array]:
        fresh, suspects = self._execution.returned, self._suspects
        return check_into(into, self._out_treedef, self.targets, leaves, fresh=fresh, suspects=suspects)

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
        rank = {device: i for i, device in enumerate(self.devices)}
        out = np.zeros((len(self.devices), len(self.devices)), np.int64)
        for route in self.routes:
            at = np.array([rank[device] for device in route.devices], np.int64)
            out[np.ix_(at, at)] += route.traffic
        return out

    @property
    def num_leaves(self) -> int:
        """Leaves of the result."""
        return len(self.targets)

    @cached_property
    def num_moves(self) -> int:
        """Boxes that are copied, within devices and between them."""
        return sum(len(route.moves_of(i).moves) for route in self.routes for i in range(len(route.leaves)))

    @cached_property
    def num_messages(self) -> int:
        """Boxes that cross from one device to another."""
        count = 0
        for route in self.routes:
            uses = np.bincount(route.template_of, minlength=len(route.templates))
            count += sum(
                n * int((t.moves.src != t.moves.dst).sum()) for n, t in zip(uses.tolist(), route.templates, strict=True)
            )
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all destination shards that are moved, replicas counted each."""
        return int(self.traffic.sum())

    @property
    def bytes_local(self) -> int:
        """Bytes copied within a device."""
        return int(self.traffic.trace())

    @property
    def bytes_moved(self) -> int:
        """Bytes that cross from one device to another."""
        return self.nbytes - self.bytes_local

    @property
    def sent(self) -> np.ndarray:
        """`int64[ranks]`: bytes that each rank sends to others."""
        out: np.ndarray = self.traffic.sum(axis=1) - self.traffic.diagonal()
        return out

    @property
    def received(self) -> np.ndarray:
        """`int64[ranks]`: bytes that each rank receives from others."""
        out: np.ndarray = self.traffic.sum(axis=0) - self.traffic.diagonal()
        return out

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that must cross at least: what each destination device needs and does not hold.

        Counted from the layouts alone, not from the moves: for each destination device the size of its shard less the
        intersection with the source shard that the same device holds.
        """
        return sum(_needed(route, i) for route in self.routes for i in range(len(route.leaves)))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that are equal where the same bytes would go the same ways."""
        digest = hashlib.blake2b(digest_size=8)
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
        found = self._leaf_moves(leaf)
        if found is None:
            return []
        route, of = found
        rank = [self.devices.index(device) for device in route.devices]
        m = of.moves
        rows = zip(m.src.tolist(), m.dst.tolist(), m.start.tolist(), m.stop.tolist(), of.nbytes.tolist(), strict=True)
        return [Move(rank[s], rank[d], tuple(start), tuple(stop), n) for s, d, start, stop, n in rows]

    def _leaf_moves(self, leaf: str | int) -> tuple[Route, LeafMoves] | None:
        names = [target.path for target in self.targets]
        index = leaf if isinstance(leaf, int) else names.index(leaf) if leaf in names else None
        if index is None or not 0 <= index < len(names):
            some = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            raise KeyError(f"no leaf {leaf!r} in this plan; it has {len(names)}: {some}")
        index = self.targets[index].same_as
        for route in self.routes:
            for position, candidate in enumerate(route.leaves):
                if candidate.index == index:
                    return route, route.moves_of(position)
        return None

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan's figures, devices, traffic and leaves as JSON."""
        return json.dumps(_render.as_dict(self), indent=indent)

    def __repr__(self) -> str:
        return _render.as_text(self)

    def _repr_html_(self) -> str:
        return _render.as_html(self)


def _shard_kind(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Any:
    return None if sharding is None else (sharding.shard_shape(shape), dtype)


def _needed(route: Route, position: int) -> int:
    leaf, bits = route.leaves[position], route.moves_of(position).wire
    src = layout_of_sharding(leaf.shape + bits.tail, leaf.src)
    dst = layout_of_sharding(leaf.shape + bits.tail, leaf.dst)
    shard = np.array(dst.shard_shape, np.int64)
    needed = len(route.dst_ranks) * int(np.prod(shard, dtype=np.int64))
    _, at_src, at_dst = np.intersect1d(route.src_ranks, route.dst_ranks, return_indices=True)
    src_start = src.part_of[at_src] * np.array(src.shard_shape, np.int64)
    dst_start = dst.part_of[at_dst] * shard
    stop = np.minimum(src_start + np.array(src.shard_shape, np.int64), dst_start + shard)
    held = np.clip(stop - np.maximum(src_start, dst_start), 0, None)
    needed -= int(np.prod(held, axis=1, dtype=np.int64).sum())
    return needed * bits.bits // 8
