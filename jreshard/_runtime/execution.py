"""Executes the routes of a plan on the leaves of a tree."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jreshard._compat import all_row_major, deleted_among, is_array, launching, own_tracing_context, row_major
from jreshard._deadline import Deadline
from jreshard._leaves import LeafErrors
from jreshard._planning.route import Route, Target
from jreshard._runtime import parts
from jreshard._runtime.launch import Launcher
from jreshard._runtime.transform import SourceTransform
from jreshard._runtime.verify import boxes_of, checksums, compare
from jreshard._sources import lies_elsewhere
from jreshard._wire import Wire, wire_of

_RESULTS_KNOWN = 4  # as many buffers as a caller may use in turn without slow checks


@dataclass(frozen=True)
class _ReadyRoute:
    """A route made ready to run: its launcher, and which of its leaves lie outside the memory that computations use."""

    route: Route
    launcher: Launcher
    places: list[int]
    far_sources: dict[int, NamedSharding]
    far_targets: dict[int, NamedSharding]


class Execution:
    """Moves trees that look alike, as often as wanted.

    Args:
        targets: the leaves of the result.
        routes: which of them go from which mesh to which.
        transform: what is applied on the source side, if anything.
    """

    def __init__(self, targets: Sequence[Target], routes: Sequence[Route], transform: SourceTransform | None) -> None:
        self._targets, self._routes, self._transform = targets, routes, transform
        self._lock = threading.Lock()
        self._ready: dict[str, list[_ReadyRoute]] = {}  # by transport
        self._host = [i for i, t in enumerate(targets) if t.src is None]
        self._empty = [i for i, t in enumerate(targets) if t.is_made_in_place and t.same_as == i]
        self._returned: deque[list[weakref.ref[Array]]] = deque(maxlen=_RESULTS_KNOWN)
        self._shared = [i for i, t in enumerate(targets) if t.same_as != i]

    def run(
        self,
        leaves: Sequence[Any],
        into: Sequence[Array] | None,
        *,
        donate: bool,
        verify: bool,
        timeout: float,
        transport: str,
    ) -> list[Array]:
        """The leaves of the result, in the order of the targets.

        Args:
            leaves: the leaves of the tree handed over, checked.
            into: the leaves of the old result, checked; or `None`.
            donate: delete the arrays among `leaves`.
            verify: compare checksums of both sides; waits for the result.
            timeout: seconds after which a transfer that has not ended fails, once all is compiled.
            transport: `"host"`, `"p2p"` or `"nccl"`.
        """
        ready = self._made_ready(transport, into=into is not None)
        deadline = Deadline.after(timeout)
        if sum(route.launcher.parts for route in ready) > 1:
            # JAX would refuse other device-local layouts as well, but by then a part before may have moved.
            paths = [target.path for target in self._targets]
            _check_layouts("into", paths, into or [])
            if self._transform is None:
                _check_layouts("params", paths, leaves)
        made = leaves if self._transform is None else self._transform(leaves)
        placed = self._place_host_values(made)
        out: list[Any] = [None] * len(self._targets)
        for i in self._empty:
            out[i] = _make_empty(self._targets[i])
        if donate and self._transform is not None:
            _delete(leaves)
        try:
            for route in ready:
                self._run_route(route, made, into, out, verify, deadline)
        except BaseException:
            if into is not None and any(deleted_among(into)):
                _delete(into)  # all or none
            raise
        for i, value in placed.items():
            dst = self._targets[i].dst
            reuse = into is not None and not _far({0: dst}) and not lies_elsewhere(dst)
            out[i] = _in_the_memory_of(into[i], value) if into is not None and reuse else value
        for i in self._shared:
            out[i] = out[self._targets[i].same_as]
        if into is not None:
            _delete(into)
        if donate:
            _delete(made)
        self._returned.append(list(map(weakref.ref, out)))
        return out

    def _made_ready(self, transport: str, *, into: bool) -> list[_ReadyRoute]:
        """The routes, with all that they launch compiled."""
        with self._lock:
            ready = self._ready.get(transport)
            if ready is None:
                routes = [parts.arranged(route, transport) for route in self._routes]
                ready = self._ready[transport] = [self._make_ready(route, transport) for route in routes]
            for route in ready:
                route.launcher.compile(into=into)
            return ready

    def returned(self, arrays: Sequence[Any]) -> bool:
        """Whether these are the very arrays of one of the last results: none of them has another's memory."""
        return any(
            len(arrays) == len(last)
            and (not last or last[0]() is arrays[0])
            and all([ref() is x for ref, x in zip(last, arrays, strict=True)])
            for last in tuple(self._returned)  # other threads may add to it
        )

    def _make_ready(self, route: Route, transport: str) -> _ReadyRoute:
        places = [leaf.index for leaf in route.leaves]
        launcher = Launcher(route, [self._targets[i].src_dtype for i in places], transport)
        sources = _far({i: leaf.src for i, leaf in enumerate(route.leaves)})
        targets = _far({i: leaf.dst for i, leaf in enumerate(route.leaves)})
        return _ReadyRoute(route, launcher, places, sources, targets)

    def _run_route(
        self,
        route: _ReadyRoute,
        made: Sequence[Any],
        into: Sequence[Array] | None,
        out: list[Any],
        verify: bool,
        deadline: Deadline,
    ) -> None:
        sources = _put([made[i] for i in route.places], {i: _near(s) for i, s in route.far_sources.items()})
        published = route.launcher.prepare(sources)
        old = into and _put([into[i] for i in route.places], {i: _near(s) for i, s in route.far_targets.items()})
        new = route.launcher.run(published, old, deadline, verify=verify)
        if verify and route.launcher.party.takes_part:
            self._compare(route, published, new, deadline)
        for i, array in zip(route.places, _put(new, route.far_targets), strict=True):
            out[i] = array

    def _compare(
        self, route: _ReadyRoute, published: Sequence[Array], new: Sequence[Array], deadline: Deadline
    ) -> None:
        """Compares checksums of all devices, which the processes tell each other."""
        leaves = route.route.leaves
        dtypes = [leaf.dtype for leaf in leaves]
        sides = (published, [leaf.src for leaf in leaves]), (new, [leaf.dst for leaf in leaves])

        def local() -> list[Any]:
            return [
                [(rank, sums.tolist()) for rank, sums in checksums(arrays, shardings, dtypes).items()]
                if not lies_elsewhere(shardings[0])
                else []
                for arrays, shardings in sides
            ]

        everybody = route.launcher.party.all_or_none(f"checksums of {len(leaves)} leaves", local, deadline).values()
        compared = []
        for side, (_, shardings) in enumerate(sides):
            by_rank = dict(pair for answer in everybody for pair in answer[side])
            sums = np.array([by_rank[rank] for rank in range(len(by_rank))], np.uint32).transpose(1, 0, 2)
            boxes = [boxes_of(leaf.shape, s) for leaf, s in zip(leaves, shardings, strict=True)]
            compared.append(list(zip(sums, boxes, strict=True)))
        compare([leaf.path for leaf in leaves], *compared)

    def _place_host_values(self, made: Sequence[Any]) -> dict[int, Array]:
        """The values of the host on the destination, by place."""
        placed = {}
        for i in self._host:
            target = self._targets[i]
            value = _cast_host(made[i], target.dtype)
            if not target.dst.is_fully_addressable:
                placed[i] = _place_shards(np.asarray(value).astype(target.dtype, copy=False), target.dst)
                continue
            lent = jax.device_put(value, target.dst)
            # On CPU the first device_put lends NumPy's memory, which its owner may write to.
            placed[i] = jax.device_put(lent, target.dst, may_alias=False)
        return placed


def _make_empty(target: Target) -> Array:
    """The array of a target without elements."""
    wire = wire_of(target.dtype)
    with launching(), own_tracing_context():
        empty = _place_shards(np.zeros(target.shape + wire.tail, wire.array_dtype), target.dst)
        if not wire.tail:
            return empty
        if not empty.addressable_shards:
            return jax.make_array_from_single_device_arrays(target.shape, target.dst, [], dtype=target.dtype)
        return _keys_of(wire, target.dst)(empty)


@lru_cache(64)
def _keys_of(wire: Wire, sharding: NamedSharding) -> Callable[[Array], Array]:
    """The program that makes PRNG keys of their words."""
    return jax.jit(wire.decode, out_shardings=sharding)


def _place_shards(value: np.ndarray, sharding: NamedSharding) -> Array:
    """A value that every process has, on devices of several: `device_put` would compare the processes' values first."""
    shards: Array = jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index].copy(), dtype=value.dtype
    )
    return shards


def _in_the_memory_of(old: Array, new: Array) -> Array:
    with own_tracing_context(), launching():
        array: Array = _overwrite(old, new)
        return array


@partial(jax.jit, donate_argnums=0, keep_unused=True)
def _overwrite(old: Array, new: Array) -> Array:
    """`new` in the memory of `old`."""
    return new


def _check_layouts(root: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    if all_row_major([x for x in leaves if is_array(x)]):
        return
    errors = LeafErrors("transfer")
    for path, x in zip(paths, leaves, strict=False):
        if is_array(x) and not row_major(x):
            found = "has another device-local layout than the default; expected the row-major one"
            errors.add(f"{root}{path}", found)
    errors.raise_any()


def _far(shardings: dict[int, NamedSharding]) -> dict[int, NamedSharding]:
    """Those that name another memory than the one that computations use."""
    return {i: s for i, s in shardings.items() if s.memory_kind not in (None, _default_memory(s))}


def _near(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(_default_memory(sharding))


def _default_memory(sharding: NamedSharding) -> str:
    device: Any = next(iter(sharding.device_set))
    kind: str = device.default_memory().kind
    return kind


def _put(arrays: list[Array], shardings: dict[int, NamedSharding]) -> list[Array]:
    """The arrays, those at the keys of `shardings` placed so."""
    if shardings:
        places = list(shardings)
        for i, x in zip(places, jax.device_put([arrays[i] for i in places], list(shardings.values())), strict=True):
            arrays[i] = x
    return arrays


def _cast_host(value: Any, dtype: Any) -> Any:
    """The value as it is where its dtype stays (a Python number keeps its weak type), else cast by NumPy."""
    array = np.asarray(value)
    return value if jax.dtypes.canonicalize_dtype(array.dtype) == dtype else array.astype(dtype)


def _delete(arrays: Sequence[Any]) -> None:
    for x, deleted in zip(arrays, deleted_among(arrays), strict=True):
        if not deleted and is_array(x):
            x.delete()
