"""The plans of shapes that were used last, for those who ask again."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from jreshard._plan import Plan


class PaperPlans:
    """Plans by trees of `ShapeDtypeStruct`s; equal requests get the same plan, at the cost of comparing them.

    Hashing as many shapes and shardings takes longer than comparing them with the few requests that are kept.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[_Kept] = []  # the one used last at the end
        self._lock = threading.Lock()

    def get(self, params: Any, shardings: tuple[Any, Any], options: Hashable, build: Callable[[], Plan]) -> Plan:
        """The plan that was made for an equal request, or a new one. Other leaves than shapes are planned anew."""
        leaves, structure = jax.tree.flatten(params)
        key: Hashable = (structure, options)
        try:
            request = _Request(hash(key), key, leaves, shardings)
        except TypeError:  # an option, or what a container carries beside its leaves, such as an array
            return build()
        if set(map(type, leaves)) != {jax.ShapeDtypeStruct}:
            return build()
        if found := self._find(request):
            return found
        made = build()
        with self._lock:
            self._kept.append(_Kept(request, made))
            del self._kept[: -self._capacity]
        return made

    def _find(self, request: "_Request") -> Plan | None:
        with self._lock:
            for i in reversed(range(len(self._kept))):
                if self._kept[i].answers(request):
                    self._kept.append(self._kept.pop(i))
                    return self._kept[-1].plan
        return None


class _Request(NamedTuple):
    """What is asked for.

    Attributes:
        hash: of `key`.
        key: the structure of the tree, and the options.
        leaves: the shapes.
        shardings: of source and destination.
    """

    hash: int
    key: Hashable
    leaves: list[Any]
    shardings: tuple[Any, Any]


class _Kept:
    """A plan, and the request that it was made for."""

    def __init__(self, request: _Request, plan: Plan) -> None:
        self.plan = plan
        self._request, self._shardings = request, [_Snapshot(tree) for tree in request.shardings]

    def answers(self, request: _Request) -> bool:
        """Whether a request is equal to this one."""
        ours = self._request
        return (
            ours.hash == request.hash
            and ours.leaves == request.leaves  # by identity first: the very same leaves cost next to nothing
            and all(map(_Snapshot.same, self._shardings, request.shardings))
            and ours.key == request.key
        )


class _Snapshot:
    """A tree as it was, which the caller may change since."""

    def __init__(self, tree: Any) -> None:
        self._leaves, structure = jax.tree.flatten(tree)
        self._structure: Any = structure
        self._copy = jax.tree.unflatten(self._structure, self._leaves) if _is_plain(tree) else None

    def same(self, tree: Any) -> bool:
        """Whether a tree has the same leaves in the same places."""
        if self._copy is not None and type(tree) is type(self._copy):
            return bool(tree == self._copy)  # three times as fast as flattening
        leaves, structure = jax.tree.flatten(tree)
        return leaves == self._leaves and bool(self._structure == structure)


def _is_plain(tree: Any) -> bool:
    """Whether a tree consists of shardings in dicts, lists and tuples, which `==` compares as they should be."""
    kind = type(tree)
    if kind not in (dict, list, tuple):
        return isinstance(tree, Sharding)
    children = tree.values() if kind is dict else tree
    return all([isinstance(child, Sharding) or _is_plain(child) for child in children])
