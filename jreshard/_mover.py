"""Executes the routes of a plan on the leaves of a tree."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jreshard import _verify
from jreshard._engine import Engine
from jreshard._route import Route
from jreshard._transform import SourceTransform


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


class Mover:
    """Moves trees that look alike, as often as wanted.

    Args:
        targets: the leaves of the result.
        routes: which of them go from which mesh to which.
        transform: what is applied on the source side, if anything.
    """

    def __init__(self, targets: Sequence[Target], routes: Sequence[Route], transform: SourceTransform | None) -> None:
        self._targets, self._routes, self._transform = targets, routes, transform
        self._engines: list[Engine] | None = None
        self._lock = threading.Lock()
        self._host = [i for i, t in enumerate(targets) if t.src is None]

    def run(self, leaves: Sequence[Any], into: Sequence[Array] | None, *, donate: bool, verify: bool, timeout: float) -> list[Array]:
        """The leaves of the result, in the order of the targets.

        Args:
            leaves: the leaves of the tree handed over, checked.
            into: the leaves of the old result, checked; or `None`.
            donate: delete the arrays among `leaves`.
            verify: compare checksums of both sides; waits for the result.
            timeout: seconds until a transfer that has not ended fails.
        """
        engines = self._compiled(into=into is not None)
        made = leaves if self._transform is None else self._transform(leaves)
        if donate and self._transform is not None:
            _delete(leaves)
        out: list[Any] = [None] * len(self._targets)
        for engine, route in zip(engines, self._routes, strict=True):
            places = [leaf.index for leaf in route.leaves]
            published = engine.prepare(_in_device_memory([made[i] for i in places]))
            old = None if into is None else _in_device_memory([into[i] for i in places])
            new = engine.run(published, old, timeout)
            if verify:
                self._compare(route, published, new)
            for i, array in zip(places, new, strict=True):
                out[i] = array
        self._place_host_values(made, out)
        self._finish(out, into)
        if donate:
            _delete(made)
        return out

    def _compiled(self, *, into: bool) -> list[Engine]:
        """The engines, with every program compiled before anything is moved."""
        with self._lock:
            if self._engines is None:
                dtypes = [[self._targets[leaf.index].src_dtype for leaf in route.leaves] for route in self._routes]
                self._engines = [Engine(*args) for args in zip(self._routes, dtypes, strict=True)]
        for engine in self._engines:
            engine.compile(into=into)
        return self._engines

    def _compare(self, route: Route, published: Sequence[Array], new: Sequence[Array]) -> None:
        dtypes = [leaf.dtype for leaf in route.leaves]
        sides = []
        for arrays, shardings in (
            (published, [leaf.src for leaf in route.leaves]),
            (new, [leaf.dst for leaf in route.leaves]),
        ):
            boxes = [_verify.boxes_of(leaf.shape, s) for leaf, s in zip(route.leaves, shardings, strict=True)]
            sides.append(list(zip(_verify.checksums(arrays, shardings, dtypes), boxes, strict=True)))
        _verify.compare([leaf.path for leaf in route.leaves], *sides)

    def _place_host_values(self, made: Sequence[Any], out: list[Any]) -> None:
        if not self._host:
            return
        values = [_cast_host(made[i], self._targets[i].dtype) for i in self._host]
        placed = jax.device_put(values, [self._targets[i].dst for i in self._host])
        for i, array in zip(self._host, placed, strict=True):
            out[i] = array

    def _finish(self, out: list[Any], into: Sequence[Array] | None) -> None:
        """Puts results into the memory that their sharding names, shares those that are one array, drops the old."""
        far = [i for i, t in enumerate(self._targets) if t.same_as == i and t.src is not None and not in_default_memory(t.dst)]
        if far:
            for i, array in zip(far, jax.device_put([out[i] for i in far], [self._targets[i].dst for i in far]), strict=True):
                out[i] = array
        for i, target in enumerate(self._targets):
            if target.same_as != i:
                out[i] = out[target.same_as]
        if into is not None:
            _delete(into)


def in_default_memory(sharding: NamedSharding) -> bool:
    """Whether the sharding names the memory that computations use."""
    device = next(iter(sharding.device_set))
    return sharding.memory_kind in (None, device.default_memory().kind)


def _in_device_memory(arrays: list[Array]) -> list[Array]:
    """The same arrays, those in another memory of their devices copied to the default one."""
    far = [i for i, x in enumerate(arrays) if not in_default_memory(x.sharding)]
    if far:
        near = [arrays[i].sharding.with_memory_kind(_default_kind(arrays[i])) for i in far]
        for i, array in zip(far, jax.device_put([arrays[i] for i in far], near), strict=True):
            arrays[i] = array
    return arrays


def _default_kind(x: Array) -> str:
    return next(iter(x.sharding.device_set)).default_memory().kind


def _cast_host(value: Any, dtype: Any) -> Any:
    """The value as it is where its dtype stays (a Python number keeps its weak type), else cast by NumPy."""
    return value if np.asarray(value).dtype == dtype else np.asarray(value).astype(dtype)


def _delete(arrays: Sequence[Any]) -> None:
    for x in arrays:
        if isinstance(x, Array) and not x.is_deleted():
            x.delete()
