"""Which arrays share memory: a donated array must not be another's as well."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import Array

from jreshard._compat import addresses_of, is_array, is_ready


def buffers_of(x: Array) -> list[tuple[Any, int]]:
    """(device, address) of every shard of `x` in this process that is computed."""
    return [] if 0 in x.shape else addresses_of(x)


def shared_memory(donated: Sequence[Array], kept: Iterable[Any]) -> dict[int, int | None]:
    """For each donated array whose memory is also another's: the donated one before it, or `None` for a kept one.

    Two places with the same array object count as one. Waits for the donated arrays to be computed; what is computed
    later than they are has not their memory.
    """
    jax.block_until_ready([x for x in donated if not is_ready(x)])
    owner: dict[Any, int | None] = {buffer: None for x in kept if is_array(x) for buffer in buffers_of(x)}
    seen: dict[int, int] = {}
    found: dict[int, int | None] = {}
    for i, x in enumerate(donated):
        if seen.setdefault(id(x), i) != i:
            continue
        for buffer in buffers_of(x):
            if buffer in owner:
                found[i] = owner[buffer]
            else:
                owner[buffer] = i
    return found
