"""The plans of shapes that were used last, for those who ask again."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

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
        if set(map(type, leaves)) != {jax.ShapeDtypeStruct}:
            return build()
        key: Hashable = (structure, options)
        try:
            hash(key)
        except TypeError:  # an option, or what a container carries beside its leaves, such as an array
            return build()
        if found := self._find(key, leaves, shardings):
            return found
        made = build()
        with self._lock:
            self._kept.append(_Kept(key, leaves, shardings, made))
            del self._kept[: -self._capacity]
        return made

    def _find(self, key: Hashable, leaves: list[Any], shardings: tuple[Any, Any]) -> Plan | None:
        with self._lock:
            for i in reversed(range(len(self._kept))):
                if self._kept[i].answers(key, leaves, shardings):
                    self._kept.append(self._kept.pop(i))
                    return self._kept[-1].plan
        return None


class _Kept:
    """A plan, and the request that it was made for."""

    def __init__(self, key: Hashable, leaves: list[Any], shardings: tuple[Any, Any], plan: Plan) -> None:
        self.plan = plan
        self._key, self._hash = key, hash(key)
        self._leaves, self._shardings = leaves, [_Snapshot(tree) for tree in shardings]

    def answers(self, key: Hashable, leaves: list[Any], shardings: tuple[Any, Any]) -> bool:
        """Whether a request is equal to this one."""
        return (
            self._hash == hash(key)
            and self._key == key
            and self._leaves == leaves  # lists compare by identity first: the very same leaves cost next to nothing
            and all(map(_Snapshot.same, self._shardings, shardings))
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
    if type(tree) is dict:
        return all(map(_is_plain, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return isinstance(tree, Sharding)
