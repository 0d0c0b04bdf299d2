"""Checks of what is handed over with each execution. All run before anything moves."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from jreshard._compat import is_array
from jreshard._leaves import LeafErrors, paths_of
from jreshard._mover import Target
from jreshard._route import Route
from jreshard._sources import Source, any_deleted, facts_of, read_source

TRANSPORTS = ("auto", "nccl", "p2p", "host")


def check_options(timeout: float, transport: str, routes: Sequence[Route]) -> None:
    """Refuses timeouts that are none, and transports that do not reach the devices."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {timeout!r}; expected seconds, a positive number")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout is {timeout!r}; expected a finite positive number of seconds")
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")
    for route in routes:
        _check_platforms({device.platform for device in route.devices}, transport)


def _check_platforms(platforms: set[str], transport: str) -> None:
    if platforms == {"cpu"}:
        if transport in ("nccl", "p2p"):
            raise ValueError(f"transport {transport!r} needs GPUs; the devices are CPUs: use 'auto' or 'host'")
    elif platforms == {"gpu"}:
        if transport in ("host", "nccl"):
            raise ValueError(f"transport {transport!r} does not move arrays between GPUs yet: use 'auto' or 'p2p'")
    else:
        names = " and ".join(sorted(platforms))
        raise ValueError(f"the devices are of platform {names}; expected all to be CPUs, or all to be GPUs")


def check_leaves(leaves: Sequence[Any], treedef: Any, params: Any, planned: Any, sources: Sequence[Source]) -> None:
    """Refuses a tree other than the one that the plan was made for, naming every leaf that differs."""
    errors = LeafErrors("execute")
    if treedef != planned:
        raise ValueError(f"execute: params has the structure {treedef}; the plan was made for {planned}")
    for i, (x, planned_source) in enumerate(zip(leaves, sources, strict=True)):
        if is_array(x) and _matches(x, planned_source):
            continue
        path = paths_of(params)[i]
        source = read_source(x, planned_source.sharding, path, errors, structs=False)
        if source is not None and source != planned_source:
            errors.add(path, f"is {_short(source)}; the plan was made for {_short(planned_source)}")
    errors.raise_any()


def _matches(x: Array, planned: Source) -> bool:
    if x.is_deleted():
        return False
    return x.shape == planned.shape and x.dtype == planned.dtype and x.sharding == planned.sharding


def _short(source: Source) -> str:
    where = "on the host" if source.sharding is None else f"on {source.sharding}"
    return f"{source.dtype}{list(source.shape)} {where}"


def check_into(into: Any, treedef: Any, targets: Sequence[Target], leaves: Sequence[Any]) -> list[Array]:
    """The leaves of `into`, if each can give its memory to the result's leaf."""
    old, old_treedef = jax.tree.flatten(into)
    if old_treedef != treedef:
        raise ValueError(f"into has the structure {old_treedef}; expected that of the result, {treedef}")
    sources = set(map(id, leaves))
    if (
        facts_of(old) == tuple([(t.shape, t.dtype, t.dst) for t in targets])
        and not any_deleted(old)
        and len(set(map(id, old)) - sources) == len(old)
    ):
        return old
    errors = LeafErrors("into")
    owner: dict[int, int] = {}
    for path, x, target in zip(paths_of(into), old, targets, strict=True):
        if fault := _into_fault(x, target, sources):
            errors.add(path, fault[0], root="into", kind=fault[1])
            continue
        first = targets[owner.setdefault(id(x), target.same_as)]
        if target.same_as != first.same_as:
            errors.add(path, f"is the same array as into{first.path}; expected its own", root="into")
    errors.raise_any()
    return old


def _into_fault(x: Any, target: Target, sources: set[int]) -> tuple[str, type[Exception]] | None:
    if not is_array(x):
        return f"is a {type(x).__name__}; expected a jax.Array", TypeError
    if x.shape == target.shape and x.dtype == target.dtype and x.sharding == target.dst:
        if x.is_deleted():
            return "is deleted (or was donated); expected a live array", ValueError
        if id(x) in sources:
            return "is also a leaf of params; expected another array", ValueError
        return None
    found = f"{x.dtype}{list(x.shape)} on {x.sharding}"
    return f"is {found}; expected {target.dtype}{list(target.shape)} on {target.dst}", ValueError
