"""Trees of arrays and prefix trees of shardings: leaves, their paths, and errors that name them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import keystr

Path = tuple[Any, ...]


class LeafErrors:
    """Collects what is wrong with each leaf, to raise it all at once.

    Example:
        >>> errors = LeafErrors("transfer")
        >>> errors.add((), "is deleted; expected a live array")
        >>> errors.raise_any()
        Traceback (most recent call last):
        ...
        ValueError: transfer: 1 bad leaf
          params: is deleted; expected a live array
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._found: list[str] = []
        self._kinds: set[type[Exception]] = set()

    def add(self, path: Path | str, message: str, *, root: str = "params", kind: type[Exception] = ValueError) -> None:
        """Notes one fault: `path` of the leaf, what was found and what was expected."""
        name = path if isinstance(path, str) else root + keystr(path)
        self._found.append(f"  {name}: {message}")
        self._kinds.add(kind)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_any(self) -> None:
        """Raises `TypeError` if every fault is one of type, `ValueError` if any is not, nothing without faults."""
        if not self._found:
            return
        kind = TypeError if self._kinds == {TypeError} else ValueError
        count = f"{len(self._found)} bad {'leaf' if len(self._found) == 1 else 'leaves'}"
        raise kind("\n".join([f"{self._doing}: {count}", *self._found]))


def paths_of(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Path]:
    """The key path of every leaf, in the order of `jax.tree.leaves`."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def match_shardings(prefix: Any, tree: Any, name: str, errors: LeafErrors) -> list[Sharding | None]:
    """One sharding a leaf of `tree`, from a sharding or a prefix tree of them.

    Containers match by their keys, so that a `dict` of shardings fits a `FrozenDict` or an `nnx.State` of weights.
    `None` in the prefix stays `None` for all the leaves below it. Mismatches go to `errors`, by path.

    Args:
        prefix: a `NamedSharding`, `None`, or containers of them.
        tree: the tree whose leaves are to be given shardings.
        name: what the caller calls `prefix`.
        errors: where mismatches are noted.
    """
    out: list[Sharding | None] = []
    _match(prefix, tree, (), name, errors, out)
    return out


def _match(prefix: Any, tree: Any, path: Path, name: str, errors: LeafErrors, out: list[Sharding | None]) -> None:
    if prefix is None or isinstance(prefix, Sharding):
        out.extend([prefix] * len(jax.tree.leaves(tree)))
        return
    if isinstance(prefix, PartitionSpec):
        message = f"{name} has the bare {prefix!r}; expected a NamedSharding: NamedSharding(mesh, {prefix!r})"
        errors.add(path, message, kind=TypeError)
        return
    given, wanted = _children(prefix), _children(tree)
    if given is None:
        errors.add(path, f"{name} has a {type(prefix).__name__}; expected a NamedSharding", kind=TypeError)
        return
    if wanted is None:
        errors.add(
            path, f"{name} has a {type(prefix).__name__}; expected one NamedSharding, for params has a leaf here"
        )
        return
    if tree is None:
        return
    by_key = {_plain(key): child for key, child in given}
    wanted_keys = {_plain(key) for key, _ in wanted}
    if by_key.keys() != wanted_keys:
        errors.add(path, _container_mismatch(prefix, tree, by_key.keys(), wanted_keys, name))
        return
    for key, child in wanted:
        _match(by_key[_plain(key)], child, (*path, key), name, errors, out)


def _container_mismatch(prefix: Any, tree: Any, given: Any, wanted: Any, name: str) -> str:
    def listed(keys: Any) -> str:
        return ", ".join(sorted(map(repr, keys)))

    parts = [f"params has a {type(tree).__name__}, {name} has a {type(prefix).__name__}"]
    if missing := wanted - given:
        parts.append(f"{name} lacks {listed(missing)}")
    if extra := given - wanted:
        parts.append(f"{name} has {listed(extra)}, which params has not")
    return "; ".join(parts)


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """The direct children of a container with their keys; `None` for a leaf."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    if len(found) == 1 and found[0][0] == ():
        return None
    return [(path[0], child) for path, child in found]


def _plain(key: Any) -> Any:
    """The bare key in a JAX key object: containers of other types then match by name or index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def describe(values: Sequence[Any], limit: int = 8) -> str:
    """The values in a line, cut after `limit` of them."""
    shown = ", ".join(map(str, values[:limit]))
    return shown if len(values) <= limit else f"{shown}, … ({len(values)} in all)"
