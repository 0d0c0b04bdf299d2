"""A route: the leaves of a plan that go from one mesh to one other, with their moves."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jreshard._layout import AnyMesh, Layout, layout_of_sharding
from jreshard._planner import Moves, plan_moves
from jreshard._tables import copy_words, leaves_in_a_call, plan_words
from jreshard._wire import Wire, wire_of


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Target:
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
        """Whether it is an empty array that takes no part in the programs.

        Over several processes XLA crashes where it compiles custom calls on GPUs with such operands (jaxlib 0.11.2).
        """
        if self.src is None or 0 not in self.shape or jax.dtypes.issubdtype(self.dtype, jax.dtypes.prng_key):
            return False
        return any(isinstance(s.mesh, Mesh) and not s.is_fully_addressable for s in (self.src, self.dst))


@dataclass(frozen=True)
class LeafMoves:
    """The moves of one leaf, shared by all leaves that are alike.

    Attributes:
        wire: the form in which it travels.
        moves: boxes of the travelling array, from rank to rank.
        words: the same for the native core.
        nbytes: `int64[moves]`, the bytes of each move.
    """

    wire: Wire
    moves: Moves
    words: np.ndarray
    nbytes: np.ndarray


class Route:
    """The leaves that go from `src_mesh` to `dst_mesh`.

    Attributes:
        leaves: the leaves, in the order in which they travel.
        devices: the device of each rank: the source mesh's first, then the destination's that are not in it. For
            meshes without devices (`AbstractMesh`), text in their place.
    """

    def __init__(self, src_mesh: AnyMesh, dst_mesh: AnyMesh, leaves: list[Leaf]) -> None:
        self.src_mesh, self.dst_mesh, self.leaves = src_mesh, dst_mesh, leaves
        src_devices, dst_devices = _devices(src_mesh, "source"), _devices(dst_mesh, "destination")
        rank_of: dict[Any, int] = {}
        for device in (*src_devices, *dst_devices):
            rank_of.setdefault(device, len(rank_of))
        self.devices = tuple(rank_of)
        self.src_ranks = np.array([rank_of[device] for device in src_devices], np.int64)
        self.dst_ranks = np.array([rank_of[device] for device in dst_devices], np.int64)
        self._plan_leaves()

    def _plan_leaves(self) -> None:
        self.templates: list[LeafMoves] = []
        self.template_of: list[int] = []
        known: dict[Any, int] = {}
        turns: dict[Any, int] = {}
        for leaf in self.leaves:
            wire = wire_of(leaf.dtype)
            src = layout_of_sharding(leaf.shape + wire.tail, leaf.src)
            dst = layout_of_sharding(leaf.shape + wire.tail, leaf.dst)
            replicas = len(src.part_of) // int(np.prod(src.parts, dtype=np.int64))
            rotation = turns.get(src.division, 0)
            turns[src.division] = (rotation + 1) % replicas
            key = (src.key, dst.key, leaf.dtype, rotation)
            if key not in known:
                known[key] = len(self.templates)
                self.templates.append(self._plan_leaf(leaf, src, dst, wire, rotation))
            self.template_of.append(known[key])

    def _plan_leaf(self, leaf: Leaf, src: Layout, dst: Layout, wire: Wire, rotation: int) -> LeafMoves:
        moves = plan_moves(src, dst, self.src_ranks, self.dst_ranks, rotation=rotation)
        words = copy_words(moves, src, dst, self.src_ranks, self.dst_ranks, wire.bits)
        if words is None:
            wire = wire_of(leaf.dtype, packed=False)
            words = copy_words(moves, src, dst, self.src_ranks, self.dst_ranks, wire.bits)
            assert words is not None, "whole bytes are always expressible"
        return LeafMoves(wire, moves, words, moves.elements * wire.bits // 8)

    def moves_of(self, leaf: int) -> LeafMoves:
        """The moves of the leaf at this position of `leaves`."""
        return self.templates[self.template_of[leaf]]

    @cached_property
    def table(self) -> np.ndarray:
        """The words of the whole route for the native core."""
        words = [template.words for template in self.templates]
        chunk = leaves_in_a_call(getattr(self.devices[0], "platform", "none"))
        return plan_words(len(self.devices), self.src_ranks, self.dst_ranks, self.template_of, words, chunk)

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that are equal where every rank would copy the same; the key of compiled programs."""
        digest = hashlib.blake2b(self.table.tobytes(), digest_size=8)
        digest.update(repr([str(device) for device in self.devices]).encode())
        return int.from_bytes(digest.digest(), "little") >> 1

    @cached_property
    def traffic(self) -> np.ndarray:
        """`int64[ranks, ranks]`: bytes that go from rank (row) to rank (column); the diagonal stays on the device."""
        count = np.bincount(self.template_of, minlength=len(self.templates))
        out = np.zeros((len(self.devices), len(self.devices)), np.int64)
        for times, template in zip(count, self.templates, strict=True):
            np.add.at(out, (template.moves.src, template.moves.dst), template.nbytes * times)
        return out


def _devices(mesh: AnyMesh, side: str) -> list[Any]:
    if isinstance(mesh, Mesh):
        return list(mesh.devices.flat)
    return [f"{side} {i}" for i in range(int(np.prod(mesh.axis_sizes, dtype=np.int64)))]
