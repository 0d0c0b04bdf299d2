"""What the hardware and NCCL can do with no JAX in the way."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jreshard.bench import pattern
from jreshard.bench.cases import CASES, Shapes
from jreshard.bench.context import Context, agree, failure
from jreshard.bench.copy_engine import copy
from jreshard.bench.gpu import pointer

COPY_ENGINE = "copy engine"
BOTH_WAYS = "copy engine, both ways at once"
SEND_RECV = "send/recv"
MEMORY_COPY = "memory copy"

_CASE = CASES["one"]


def names(platform: str, processes: int) -> list[str]:
    """The ceilings that there are: that of the copy engine only within a process."""
    if platform != "gpu":
        return [MEMORY_COPY] if processes == 1 else []
    return [COPY_ENGINE, BOTH_WAYS, SEND_RECV] if processes == 1 else [SEND_RECV]


class Buffers:
    """An array on one device, and its place on the other.

    Args:
        shapes: the array's shape, as a tree of one leaf `w`.
        src: where it is.
        dst: where it goes.
    """

    def __init__(self, shapes: Shapes, src: pattern.Shardings, dst: pattern.Shardings) -> None:
        self._shapes, self._dst_shardings = shapes, dst
        self.src = jax.block_until_ready(pattern.make(shapes, src)["w"])
        self.poison()

    def poison(self) -> None:
        """Takes a place that holds nothing right."""
        self.dst = jax.block_until_ready(pattern.make(self._shapes, self._dst_shardings, poison=True)["w"])

    def check(self) -> None:
        """Raises unless everything has arrived."""
        if pattern.wrong_leaves({"w": self.dst}, self._shapes, self._dst_shardings):
            raise RuntimeError("wrong bytes arrived")


def run(context: Context, unit: str, scale: float, skipped: Sequence[str]) -> dict[str, Any]:
    """Measures the ceilings between the two devices.

    Returns:
        The bytes of a message, and for each ceiling its times in seconds or its error.
    """
    _, shapes = context.fitting(_CASE, scale, copies=2)
    src, dst = (side.shardings(context.devices, shapes) for side in (_CASE.src, _CASE.dst))
    there, back = Buffers(shapes, src, dst), Buffers(shapes, dst, src)
    results: dict[str, dict[str, Any]] = {}
    calls: dict[str, tuple[int, Callable[[], float]]] = {}
    for name in names(context.devices[0].platform, jax.process_count()):
        if name in skipped:
            continue
        context.peers.tell("begin", unit=unit, contender=name)
        ways = [there, back] if name == BOTH_WAYS else [there]
        call, found = _check(context, name, ways)
        results[name] = agree(context.peers.gather(found))
        if call and "error" not in results[name]:
            calls[name] = context.rounds, call
    for name, seconds in context.in_turns(unit, calls):
        results[name].setdefault("ready_s", []).append(seconds)
    return {"bytes": there.src.nbytes, "contenders": results}


def _check(context: Context, name: str, ways: Sequence[Buffers]) -> tuple[Callable[[], float] | None, dict[str, Any]]:
    """The ceiling, once it has been seen to do its work, and how long that took."""
    for way in ways:
        way.poison()
    try:
        call = _ceiling(context, name, ways)
        seconds = call()
        for way in ways:
            way.check()
    except (RuntimeError, OSError) as error:
        return None, failure(error)
    return call, {"tried_s": seconds}


def _ceiling(context: Context, name: str, ways: Sequence[Buffers]) -> Callable[[], float]:
    """A call that moves the arrays and returns the seconds that the devices were at it."""
    there = ways[0]
    if name == MEMORY_COPY:
        return lambda: _copy_on_host(there.src, there.dst)
    if name == SEND_RECV:
        raw = context.send_recv
        return lambda: raw.send(_local(there.src), _local(there.dst), there.src.nbytes)
    # The destination's GPU copies: that of the second device on the way there, of the first on the way back.
    copiers = [context.gpus[rank] for rank in (1, 0)][: len(ways)]
    return lambda: copy([(gpu, way.dst, way.src) for gpu, way in zip(copiers, ways, strict=True)], context.timeout)


def _local(array: Array) -> Array | None:
    return array if array.addressable_shards else None


def _copy_on_host(src: Array, dst: Array) -> float:
    start = time.perf_counter()
    ctypes.memmove(pointer(dst), pointer(src), src.nbytes)
    return time.perf_counter() - start
