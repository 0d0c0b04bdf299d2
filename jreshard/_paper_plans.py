"""The plans of shapes that were made last, for those who ask again."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Sharding

from jreshard._plan import Plan


class PaperPlans:
    """Plans by trees of `ShapeDtypeStruct`s; equal requests get the same plan, at the cost of comparing them.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[Hashable, tuple[list[Any], list[_Snapshot], Plan]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, params: Any, shardings: tuple[Any, Any], options: Hashable, build: Callable[[], Plan]) -> Plan:
        """The plan that was made for an equal request, or a new one. Other leaves than shapes are planned anew."""
        leaves, structure = jax.tree.flatten(params)
        if set(map(type, leaves)) != {jax.ShapeDtypeStruct}:
            return build()
        key: Hashable = (structure, options)
        try:
            found = self._plans.get(key)
        except TypeError:  # an option, or what a container carries beside its leaves, cannot be hashed
            return build()
        # Lists compare by identity first: the very same leaves cost next to nothing.
        if found is not None and found[0] == leaves and all(map(_Snapshot.same, found[1], shardings)):
            return found[2]
        made = build()
        with self._lock:
            self._plans[key] = leaves, [_Snapshot(tree) for tree in shardings], made
            self._plans.move_to_end(key)
            while len(self._plans) > self._capacity:
                self._plans.popitem(last=False)
        return made


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
