"""The ways to move a tree that are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

import jreshard
from jreshard.bench.pattern import Shardings

DEVICE_PUT = "device_put"
#: What transports that write into the memory of an old result are called after the transport's name.
INTO = " into"


@dataclass(frozen=True)
class Contender:
    """One way.

    Attributes:
        name: what it is called.
        move: moves the tree; takes it and, where `reuses`, an old result or `None`.
        reuses: whether it can write into the memory of an old result.
    """

    name: str
    move: Callable[[Any, Any], Any]
    reuses: bool = False


def names(transports: Sequence[str]) -> list[str]:
    """The contenders' names, in the order in which they take turns."""
    return [DEVICE_PUT, *(name for transport in transports for name in (transport, transport + INTO))]


def contenders(transports: Sequence[str], src: Shardings, dst: Shardings, timeout: float) -> list[Contender]:
    """All ways to move a tree from one place to the other.

    Args:
        transports: those of jreshard to try.
        src: where the leaves lie.
        dst: where they go.
        timeout: seconds until a transfer of jreshard fails.
    """

    def by(transport: str, params: Any, old: Any) -> Any:
        return jreshard.transfer(params, src, dst, into=old, transport=transport, timeout=timeout)

    ways = [Contender(DEVICE_PUT, lambda params, old: jax.device_put(params, dict(dst)))]
    for transport in transports:
        move = partial(by, transport)
        ways += [Contender(transport, move), Contender(transport + INTO, move, reuses=True)]
    return ways
