"""Which arrays share memory: a donated array must not be another's as well."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jreshard._compat import is_array, is_ready


def buffers_of(x: Array) -> Iterator[tuple[Any, int]]:
    """(device, address) of every shard of `x` in this process; nothing for an array that is not computed yet.

    Asking such an array for its address would wait for it, and with Python's lock held.
    """
    if not is_ready(x):
        return
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.size == 0:
        return
    if x.is_fully_replicated:  # addressable_data gives one replica for all
        yield from ((shard.device, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards)
        return
    for i in range(len(x.sharding.addressable_devices)):
        shard = x.addressable_data(i)  # five times cheaper than addressable_shards
        yield next(iter(shard.devices())), shard.unsafe_buffer_pointer()


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
