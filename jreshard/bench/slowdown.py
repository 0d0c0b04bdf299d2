"""How much a matrix product on both GPUs is slowed by what moves between them."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jreshard.bench import pattern
from jreshard.bench.cases import CASES
from jreshard.bench.ceilings import COPY_ENGINE, SEND_RECV, Buffers
from jreshard.bench.contenders import INTO, Contender, contenders
from jreshard.bench.context import Context, failure
from jreshard.bench.copy_engine import copy
from jreshard.bench.gemm import MatrixProducts, open_cublas
from jreshard.bench.gpu import Gpu

ALONE = "alone"

_CASE = CASES["one"]
_PAUSE = 0.0005


def names(transports: Sequence[str]) -> list[str]:
    """What runs beside the products."""
    return [ALONE, COPY_ENGINE, SEND_RECV, *(transport + INTO for transport in transports)]


def run(context: Context, unit: str, scale: float, skipped: Sequence[str]) -> dict[str, Any]:
    """Measures the products alone, and beside each way to move bytes again and again.

    Returns:
        The bytes of a move, and for each way the seconds of the products, and how many moves ended beside them.
    """
    _, shapes = context.fitting(_CASE, scale, copies=2)
    try:
        cublas = open_cublas(context.devices[0])
    except OSError as error:
        return {"contenders": {ALONE: failure(error)}}
    products = [  # on streams of their own
        MatrixProducts(cublas, Gpu(gpu.driver, gpu.ordinal), context.devices[rank])
        for rank, gpu in context.gpus.items()
    ]
    src, dst = (side.shardings(context.devices, shapes) for side in (_CASE.src, _CASE.dst))
    buffers = Buffers(shapes, src, dst)
    movers: dict[str, Callable[[], Any]] = {
        ALONE: partial(time.sleep, _PAUSE),
        COPY_ENGINE: lambda: copy([(context.gpus[1], buffers.dst, buffers.src)], context.timeout),
        SEND_RECV: lambda: context.send_recv.send(buffers.src, buffers.dst, buffers.src.nbytes),
    }
    for way in contenders(context.transports, src, dst, context.timeout):
        if way.reuses:
            movers[way.name] = _Refits(way, {"w": buffers.src})
    results: dict[str, dict[str, Any]] = {}
    calls: dict[str, tuple[int, Callable[[], tuple[float, int]]]] = {}
    for name in names(context.transports):
        if name in skipped:
            continue
        context.peers.tell("begin", unit=unit, contender=name)
        try:
            movers[name]()
            _beside(products, movers[name], context.timeout)
        except (RuntimeError, OSError, ValueError) as error:
            results[name] = failure(error)
        else:
            results[name] = {}
            calls[name] = context.rounds, partial(_beside, products, movers[name], context.timeout)
    for name, (seconds, moves) in context.in_turns(unit, calls):
        results[name].setdefault("ready_s", []).append(seconds)
        results[name].setdefault("moves", []).append(moves)
    return {"bytes": buffers.src.nbytes, "contenders": results}


class _Refits:
    """Moves a tree again and again, into the memory of the last result."""

    def __init__(self, way: Contender, params: pattern.Tree) -> None:
        self._way, self._params, self._old = way, params, None

    def __call__(self) -> None:
        self._old = jax.block_until_ready(self._way.move(self._params, self._old))


def _beside(products: Sequence[MatrixProducts], move: Callable[[], Any], timeout: float) -> tuple[float, int]:
    """Seconds of the products, on the slower GPU, while `move` is called over and over; and how often it was."""
    for product in products:
        product.launch()
    moves = 0
    while any(product.gpu.busy() for product in products):
        move()
        moves += 1
    return max(product.gpu.elapsed(timeout) for product in products), moves
