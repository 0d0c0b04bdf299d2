"""Checks of what is handed over with each execution. All run before anything moves."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jreshard._compat import deleted_among, is_array
from jreshard._leaves import LeafErrors, Path, describe, match_structure, paths_of
from jreshard._planning.route import Target
from jreshard._runtime.memory import shared_memory
from jreshard._signature import Signature, facts_of
from jreshard._sources import Source, check_whole_numbers, read_source


def check_timeout(timeout: float) -> None:
    """Refuses timeouts that are none."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is {timeout!r}; expected seconds, a positive number")
    if not (0 < timeout < math.inf):
        raise ValueError(f"timeout is {timeout!r}; expected a finite positive number of seconds")


def check_leaves(leaves: Sequence[Any], treedef: Any, params: Any, planned: Signature) -> None:
    """Refuses a tree other than the one that the plan was made for, naming every leaf that differs."""
    errors = LeafErrors("execute")
    sources = planned.sources
    if treedef != planned.treedef:
        _refuse_structure(params, jax.tree.unflatten(planned.treedef, sources), ("params", "the plan"), errors)
    if facts_of(leaves) == planned.facts and not any(deleted_among(leaves)):
        return
    suspects = [i for i, x in enumerate(leaves) if not (is_array(x) and _matches(x, sources[i]))]
    paths = paths_of(params) if suspects else []
    for i in suspects:
        source = read_source(leaves[i], sources[i].sharding, paths[i], errors, structs=False)
        if source is not None and source != sources[i]:
            errors.add(paths[i], f"is {_short(source)}; the plan was made for {_short(sources[i])}")
    errors.raise_any()


def check_host_values(leaves: Sequence[Any], sources: Sequence[Source], places: Sequence[tuple[int, Path]]) -> None:
    """Refuses values of the host that their dtype does not hold: plans are made for dtypes, not for values.

    Args:
        leaves: what is handed over.
        sources: what the plan takes each leaf for.
        places: the places and paths of the values of the host among them.
    """
    errors = LeafErrors("transfer")
    for i, path in places:
        check_whole_numbers(leaves[i], sources[i].dtype, path, errors)
    errors.raise_any()


def _refuse_structure(given: Any, wanted: Any, names: tuple[str, str], errors: LeafErrors) -> None:
    match_structure(given, wanted, names, errors)
    errors.raise_any()
    # The containers agree by type and keys, and differ in what they carry beside their leaves.
    found, expected = jax.tree.structure(given), jax.tree.structure(wanted)
    raise ValueError(f"{names[0]} has the structure {found}; expected that of {names[1]}, {expected}")


def _matches(x: Array, planned: Source) -> bool:
    if x.is_deleted():
        return False
    return x.shape == planned.shape and x.dtype == planned.dtype and x.sharding == planned.sharding


def _short(source: Source) -> str:
    where = "on the host" if source.sharding is None else f"on {describe(source.sharding)}"
    return f"{source.dtype}{list(source.shape)} {where}"


def check_into(
    into: Any,
    treedef: Any,
    targets: Sequence[Target],
    leaves: Sequence[Any],
    *,
    fresh: Callable[[Sequence[Any]], bool],
    suspects: tuple[Sequence[int], Sequence[int]],
) -> list[Array]:
    """The leaves of `into`, if each can give its memory to the result's leaf.

    Args:
        into: what the caller handed over.
        treedef: the structure of the result.
        targets: the leaves of the result.
        leaves: the leaves that are to be moved.
        fresh: tells of arrays whether they are one of the last results as it was returned: none has another's memory.
        suspects: the places among `leaves` and among `targets` of arrays that could share memory with each other.
    """
    errors = LeafErrors("into")
    old, old_treedef = jax.tree.flatten(into)
    if old_treedef != treedef:
        _refuse_structure(into, jax.tree.unflatten(treedef, targets), ("into", "the result"), errors)
    fits = fresh(old) and not any(deleted_among(old))
    if fits and not shared_memory([old[i] for i in suspects[1]], [leaves[i] for i in suspects[0]]):
        return old
    paths = paths_of(into)
    for path, x, target in zip(paths, old, targets, strict=True):
        if fault := _into_fault(x, target):
            errors.add(path, fault[0], root="into", kind=fault[1])
    errors.raise_any()
    _check_shared(old, paths, targets, leaves, errors)
    return old


def _check_shared(
    old: list[Array], paths: Sequence[Path], targets: Sequence[Target], leaves: Sequence[Any], errors: LeafErrors
) -> None:
    owner: dict[int, int] = {}
    for i, (path, x) in enumerate(zip(paths, old, strict=True)):
        first = owner.setdefault(id(x), i)
        if targets[first].same_as != targets[i].same_as:
            errors.add(path, f"is the same array as into{targets[first].path}; expected its own", root="into")
    for i, other in shared_memory(old, leaves).items():
        whose = "a leaf of params" if other is None else f"into{targets[other].path}"
        errors.add(paths[i], f"has the memory of {whose}; expected its own", root="into")
    errors.raise_any()


def _into_fault(x: Any, target: Target) -> tuple[str, type[Exception]] | None:
    if not is_array(x):
        return f"is a {type(x).__name__}; expected a jax.Array", TypeError
    if x.shape != target.shape or x.dtype != target.dtype or not _same_placement(x, target):
        found = f"{x.dtype}{list(x.shape)} on {describe(x.sharding)}"
        return f"is {found}; expected {target.dtype}{list(target.shape)} on {describe(target.dst)}", ValueError
    if x.is_deleted():
        return "is deleted (or was donated); expected a live array", ValueError
    return None


def _same_placement(x: Array, target: Target) -> bool:
    """JAX writes the spec of a PRNG key array in another way than it was given."""
    if x.sharding == target.dst:
        return True
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return bool(is_key and x.sharding.is_equivalent_to(target.dst, x.ndim))
