"""How much a matrix product on the first two GPUs is slowed by what moves between them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jreshard.bench import pattern
from jreshard.bench.cases import CASES
from jreshard.bench.ceilings import ARRAY, COPY_ENGINE, SEND_RECV, Buffers
from jreshard.bench.contenders import INTO, Contender, Ways
from jreshard.bench.context import Context, failure
from jreshard.bench.copy_engine import copy
from jreshard.bench.gemm import MatrixProducts, open_cublas
from jreshard.bench.gpu import Gpu

ALONE = "alone"

_DEVICES = (0, 1)
_PAUSE = 0.0005


def names(transports: Sequence[str]) -> list[str]:
    """What runs beside the products."""
    return [ALONE, COPY_ENGINE, SEND_RECV, *(transport + INTO for transport in transports)]


def run(context: Context, unit: str, scale: float, skipped: Sequence[str]) -> dict[str, Any]:
    """Measures the products alone, and beside each way to move bytes again and again.

    Returns:
        For each way the seconds of the products, and how many moves ended beside them.
    """
    try:
        cublas = open_cublas(context.devices[0])
    except OSError as error:
        return {"contenders": {ALONE: failure(error)}}
    products = [  # on streams of their own
        MatrixProducts(cublas, Gpu(gpu.driver, gpu.ordinal), context.devices[rank])
        for rank, gpu in context.gpus.items()
        if rank in _DEVICES
    ]
    movers = _movers(context, scale)
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
    return {"contenders": results}


def _movers(context: Context, scale: float) -> dict[str, Callable[[], Any]]:
    buffers = Buffers([context.devices[rank] for rank in _DEVICES], scale)
    [src, _], [_, dst] = buffers.src, buffers.dst
    movers: dict[str, Callable[[], Any]] = {
        ALONE: partial(time.sleep, _PAUSE),
        COPY_ENGINE: lambda: copy([(context.gpus[1], dst, src)], context.timeout),
        SEND_RECV: lambda: context.send_recv.send(src, dst, buffers.nbytes),
    }
    case = replace(CASES["one"], shapes=ARRAY)
    shapes = case.scaled(scale)
    ways = Ways(case, shapes, context.devices, context.timeout)
    params = pattern.make(shapes, ways.src)
    return movers | {transport + INTO: _Refits(ways.refit(transport, params)) for transport in context.transports}


class _Refits:
    """Moves a tree again and again, into the memory of the last result."""

    def __init__(self, way: Contender) -> None:
        self._way, self._old = way, None

    def __call__(self) -> None:
        self._old = jax.block_until_ready(self._way.move(self._old))


def _beside(products: Sequence[MatrixProducts], move: Callable[[], Any], timeout: float) -> tuple[float, int]:
    """Seconds of the products, on the slower GPU, while `move` is called over and over; and how often it was."""
    for product in products:
        product.launch()
    moves = 0
    while any(product.gpu.busy() for product in products):
        move()
        moves += 1
    return max(product.gpu.elapsed(timeout) for product in products), moves
