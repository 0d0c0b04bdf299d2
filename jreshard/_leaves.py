"""Trees of arrays and prefix trees of shardings: leaves, their paths, and errors that name them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import keystr

Path = tuple[Any, ...]

_IDS_SHOWN = 16


class LeafErrors:
    """Collects what is wrong with each leaf, to raise it all at once.

    Args:
        doing: what the caller asked for.
        root: what the tree is called that paths are in.

    Example:
        >>> errors = LeafErrors("transfer")
        >>> errors.add((), "is deleted; expected a live array")
        >>> errors.raise_any()
        Traceback (most recent call last):
        ...
        ValueError: transfer: 1 bad leaf
          params: is deleted; expected a live array
    """

    def __init__(self, doing: str, root: str = "params") -> None:
        self._doing, self.root = doing, root
        self._found: list[str] = []
        self._kinds: set[type[Exception]] = set()

    def add(
        self, path: Path | str, message: str, *, root: str | None = None, kind: type[Exception] = ValueError
    ) -> None:
        """Notes one fault: `path` of the leaf, what was found and what was expected."""
        name = path if isinstance(path, str) else (root or self.root) + keystr(path)
        self._found.append(f"  {name}: {message}")
        self._kinds.add(kind)

    def __len__(self) -> int:
        return len(self._found)

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


@dataclass(frozen=True)
class FlatTree:
    """A tree with its leaves, flattened once: for models with many leaves each time counts.

    Attributes:
        tree: the tree.
        leaves: the key path and the value of each leaf, in the order of `jax.tree.leaves`.
        structure: its structure.
    """

    tree: Any
    leaves: list[tuple[Path, Any]]
    structure: Any

    @staticmethod
    def of(tree: Any) -> "FlatTree":
        """Flattens a tree."""
        return FlatTree(tree, *jax.tree_util.tree_flatten_with_path(tree))


class PathText:
    """Key paths as `keystr` writes them, each key once: models have far more leaves than keys."""

    def __init__(self) -> None:
        self._texts: dict[Any, str] = {}

    def of(self, path: Path) -> str:
        """The text of a path."""
        try:
            return "".join([self._texts[key] for key in path])
        except KeyError:
            self._texts.update({key: keystr((key,)) for key in path})
            return keystr(path)
        except TypeError:  # a key of a container of the user's own that cannot be hashed
            return keystr(path)


def match_shardings(prefix: Any, tree: FlatTree, name: str, errors: LeafErrors) -> list[Sharding | None]:
    """One sharding a leaf of `tree`, from a sharding or a prefix tree of them.

    Containers match by their keys, so that a `dict` of shardings fits a `FrozenDict` or an `nnx.State` of weights.
    `None` in the prefix stays `None` for all the leaves below it. Mismatches go to `errors`, by path.

    Args:
        prefix: a `NamedSharding`, `None`, or containers of them.
        tree: the tree whose leaves are to be given shardings.
        name: what the caller calls `prefix`.
        errors: where mismatches are noted.
    """
    given, structure = jax.tree.flatten(prefix)
    if structure == tree.structure and all(issubclass(kind, Sharding) for kind in set(map(type, given))):
        return given
    out: list[Sharding | None] = []
    _match(prefix, tree.tree, (), name, errors, out)
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
    elif wanted is None:
        errors.add(
            path, f"{name} has a {type(prefix).__name__}; expected one NamedSharding, for {errors.root} has a leaf here"
        )
    elif tree is not None:
        if not _same_keys(prefix, tree, path, (name, errors.root), errors):
            return
        keys = _keys_of(tree)
        for key, child in wanted.items():
            _match(given[key], child, (*path, keys[key]), name, errors, out)


def match_structure(given: Any, wanted: Any, names: tuple[str, str], errors: LeafErrors, path: Path = ()) -> None:
    """Notes where two trees have other containers, keys or types of container, by path.

    Args:
        given: the tree that the caller handed over.
        wanted: a tree of the structure that is expected.
        names: what the two are called.
        errors: where mismatches are noted, under the first name.
        path: where in the trees the comparison begins.
    """
    ours, theirs = _children(given), _children(wanted)
    if ours is None and theirs is None:
        return
    if ours is None or theirs is None or type(given) is not type(wanted):
        found, expected = (_kind(x, c) for x, c in ((given, ours), (wanted, theirs)))
        errors.add(path, f"is {found}; expected {expected}, as in {names[1]}", root=names[0])
    elif _same_keys(given, wanted, path, names, errors):
        keys = _keys_of(wanted)
        for key, child in theirs.items():
            match_structure(ours[key], child, names, errors, (*path, keys[key]))


def _kind(node: Any, children: dict[Any, Any] | None) -> str:
    return "a leaf" if children is None else f"a {type(node).__name__}"


def _same_keys(given: Any, wanted: Any, path: Path, names: tuple[str, str], errors: LeafErrors) -> bool:
    """Whether two containers have the same keys; notes each that one of them lacks."""
    ours, theirs = _keys_of(given), _keys_of(wanted)
    for plain in theirs.keys() - ours.keys():
        message = f"is missing in {names[0]} (a {type(given).__name__}); expected as in {names[1]}"
        errors.add((*path, theirs[plain]), f"{message} (a {type(wanted).__name__})", root=names[1])
    for plain in ours.keys() - theirs.keys():
        message = f"is in {names[0]} (a {type(given).__name__}); expected only what {names[1]} has"
        errors.add((*path, ours[plain]), f"{message} (a {type(wanted).__name__})", root=names[0])
    return ours.keys() == theirs.keys()


def _children(node: Any) -> dict[Any, Any] | None:
    """The direct children of a container by their plain keys; `None` for a leaf."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    if len(found) == 1 and found[0][0] == ():
        return None
    return {_plain(path[0]): child for path, child in found}


def _keys_of(node: Any) -> dict[Any, Any]:
    """JAX's key objects of a container's children, by their plain keys."""
    found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return {_plain(path[0]): path[0] for path, _ in found}


def _plain(key: Any) -> Any:
    """The bare key in a JAX key object: containers of other types then match by name or index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def describe(sharding: Sharding | None) -> str:
    """A sharding in a line that tells it from others like it: mesh, devices, spec, memory."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    text = f"mesh {dict(sharding.mesh.shape)}"
    if isinstance(sharding.mesh, Mesh):
        ids = [device.id for device in sharding.mesh.devices.flat]
        shown = ", ".join(map(str, ids[:_IDS_SHOWN])) + (", …" if len(ids) > _IDS_SHOWN else "")
        text += f" of devices [{shown}]"
    memory = f" in {sharding.memory_kind}" if sharding.memory_kind not in (None, "device") else ""
    return f"{text} as {sharding.spec}{memory}"
