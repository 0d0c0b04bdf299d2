"""What tells trees apart for planning: the way of every transfer to its plan."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from jreshard._compat import are_plain_arrays, is_array
from jreshard._sources import Source

Facts = tuple[tuple[Any, ...], ...]

_AVAL, _SHARDING = attrgetter("aval"), attrgetter("sharding")
_TREES_SEEN = 64


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

    @cached_property
    def facts(self) -> Facts:
        """`facts_of` such leaves, if all are arrays."""
        return _facts(self.sources)


def facts_of(leaves: Sequence[Any]) -> Facts:
    """What tells leaves apart for planning: shape, dtype and sharding of an array. On the way of every transfer."""
    if are_plain_arrays(leaves):
        return _seen.of(leaves)
    return tuple([(x.shape, x.dtype, x.sharding) if is_array(x) else _host_facts(x) for x in leaves])


def _facts(arrays: Sequence[Any]) -> Facts:
    return tuple([(x.shape, x.dtype, x.sharding) for x in arrays])


def _host_facts(x: Any) -> tuple[Any, ...]:
    return type(x), np.shape(x), getattr(x, "dtype", None)


def alias_pattern(leaves: Sequence[Any]) -> tuple[int, ...] | None:
    """For each leaf the first place where the same array stands; `None` where all are distinct."""
    if len(set(map(id, leaves))) == len(leaves):
        return None
    first: dict[int, int] = {}
    pattern = tuple(first.setdefault(id(x), i) if is_array(x) else i for i, x in enumerate(leaves))
    return None if pattern == tuple(range(len(leaves))) else pattern


class _FactsSeen:
    """The facts of trees seen last, by the very objects that describe their arrays, which cost less to gather.

    Results of a compiled function have the same ones from call to call.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[tuple[int, ...], tuple[Facts, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, arrays: Sequence[Any]) -> Facts:
        describing = [*map(_AVAL, arrays), *map(_SHARDING, arrays)]
        key = tuple(map(id, describing))
        with self._lock:
            if found := self._seen.get(key):
                self._seen.move_to_end(key)
                return found[0]
        facts = _facts(arrays)
        with self._lock:
            self._seen[key] = facts, describing  # an id stands for an object as long as that lives
            while len(self._seen) > self._capacity:
                self._seen.popitem(last=False)
        return facts


_seen = _FactsSeen(_TREES_SEEN)
