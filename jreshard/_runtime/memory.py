"""Which arrays share memory: a donated array must not be another's as well."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import Array

from jreshard._compat import addresses_of, is_array, is_ready


def shared_memory(donated: Sequence[Array], kept: Iterable[Any]) -> dict[int, int | None]:
    """For each donated array whose memory is also another's: the donated one before it, or `None` for a kept one.

    Two places with the same array object count as one. Waits for the donated arrays to be computed; what is computed
    later than they are has not their memory.
    """
    jax.block_until_ready(donated)
    owner: dict[int, int | None] = {}
    for x in kept:
        # Asking an array that is not computed yet for its address would wait for it, and with Python's lock held.
        if is_array(x) and is_ready(x) and 0 not in x.shape:
            owner.update(dict.fromkeys(addresses_of(x)))
    seen: dict[int, int] = {}
    found: dict[int, int | None] = {}
    for i, x in enumerate(donated):
        if seen.setdefault(id(x), i) != i or 0 in x.shape:
            continue
        for address in addresses_of(x):
            if owner.setdefault(address, i) != i:
                found[i] = owner[address]
    return found
