"""What the hardware and NCCL can do with no JAX in the way."""

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard.bench import pattern
from jreshard.bench.context import Context, agree, failure
from jreshard.bench.copy_engine import copy
from jreshard.bench.gpu import pointer
from jreshard.bench.shapes import one, scaled

COPY_ENGINE = "copy engine"
AT_ONCE = "copy engine, disjoint pairs at once"
BOTH_WAYS = "copy engine, both ways at once"
SEND_RECV = "send/recv"
MEMORY_COPY = "memory copy"

#: (from, to), by places among the devices.
Pair = tuple[int, int]

#: What is moved, 2 GiB: links reach their full rate with a quarter of that.
ARRAY = one(1 << 18)


def names(platform: str, processes: int, devices: int) -> list[str]:
    """The ceilings that there are: those of the copy engine only within a process."""
    if platform != "gpu":
        return [MEMORY_COPY] if processes == 1 else []
    if processes > 1:
        return [SEND_RECV]
    return [COPY_ENGINE, *([AT_ONCE] if devices > 3 else []), BOTH_WAYS, SEND_RECV]


def groups(name: str, devices: int) -> list[list[Pair]]:
    """Which pairs of devices a ceiling is measured between; those of one list at once, one list after the other.

    For `BOTH_WAYS` the devices stand in a ring, in which each sends to the next one.
    """
    if name == COPY_ENGINE:
        return [[pair] for pair in permutations(range(devices), 2)]
    if name == AT_ONCE:
        half = devices // 2
        return [[(i, i + half) for i in range(half)]]
    if name == BOTH_WAYS:
        return [[(i, (i + 1) % devices) for i in range(devices)]]
    return [[(0, 1)]]


class Buffers:
    """An array on every device, and a place for one.

    Args:
        devices: the devices.
        scale: the factor on the size of the arrays.
    """

    def __init__(self, devices: Sequence[Any], scale: float) -> None:
        self._shapes = scaled(ARRAY(), scale)
        meshes = [Mesh(np.array([device]), ("x",)) for device in devices]
        self._shardings = [{"w": NamedSharding(mesh, PartitionSpec())} for mesh in meshes]
        self.src = [self._make(i, poison=False) for i in range(len(devices))]
        self.dst = [self._make(i, poison=True) for i in range(len(devices))]
        self.nbytes: int = self.src[0].nbytes

    def _make(self, device: int, *, poison: bool) -> Array:
        array = pattern.make(self._shapes, self._shardings[device], poison=poison)["w"]
        jax.block_until_ready(array)
        return array

    def poison(self, device: int) -> None:
        """Takes a place there that holds nothing right."""
        self.dst[device] = self._make(device, poison=True)

    def check(self, device: int) -> None:
        """Raises unless everything has arrived there."""
        if pattern.wrong_leaves({"w": self.dst[device]}, self._shapes, self._shardings[device]):
            raise RuntimeError("wrong bytes arrived")


def run(context: Context, unit: str, scale: float, skipped: Sequence[str]) -> dict[str, Any]:
    """Measures the ceilings.

    Returns:
        The bytes of a message, and for each ceiling its times in seconds, one for each of `groups`, or its error.
    """
    buffers = Buffers(context.devices, scale)
    results: dict[str, dict[str, Any]] = {}
    calls: dict[str, tuple[int, Callable[[], list[float]]]] = {}
    for name in names(context.devices[0].platform, jax.process_count(), len(context.devices)):
        if name in skipped:
            continue
        context.peers.tell("begin", unit=unit, contender=name)
        results[name] = agree(context.gather(_check(context, name, buffers)), "tried_s")
        if "error" not in results[name]:
            calls[name] = context.rounds, _ceiling(context, name, buffers)
    for name, seconds in context.in_turns(unit, calls):
        results[name].setdefault("ready_s", []).append(seconds)
    return {"bytes": buffers.nbytes, "devices": len(context.devices), "contenders": results}


def _check(context: Context, name: str, buffers: Buffers) -> dict[str, Any]:
    """How long the ceiling took, once it has been seen to do its work."""
    seconds = 0.0
    try:
        for pairs in groups(name, len(context.devices)):
            for _, dst in pairs:
                buffers.poison(dst)
            seconds += _move(context, name, buffers, pairs)
            for _, dst in pairs:
                buffers.check(dst)
    except (RuntimeError, OSError) as error:
        return failure(error)
    return {"tried_s": seconds}


def _ceiling(context: Context, name: str, buffers: Buffers) -> Callable[[], list[float]]:
    return lambda: [_move(context, name, buffers, pairs) for pairs in groups(name, len(context.devices))]


def _move(context: Context, name: str, buffers: Buffers, pairs: Sequence[Pair]) -> float:
    """Moves an array between each of the pairs, all at once; seconds that the devices were at it."""
    src, dst = buffers.src, buffers.dst
    if name == MEMORY_COPY:
        return _copy_on_host(src[0], dst[1])
    if name == SEND_RECV:
        return context.send_recv.send(_local(src[0]), _local(dst[1]), buffers.nbytes)
    return copy([(context.gpus[j], dst[j], src[i]) for i, j in pairs], context.timeout)


def _local(array: Array) -> Array | None:
    return array if array.addressable_shards else None


def _copy_on_host(src: Array, dst: Array) -> float:
    start = time.perf_counter()
    ctypes.memmove(pointer(dst), pointer(src), src.nbytes)
    return time.perf_counter() - start
