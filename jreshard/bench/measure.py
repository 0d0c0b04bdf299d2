"""One case, measured: every contender is checked first, and then all are timed in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jreshard
from jreshard.bench import memory, pattern
from jreshard.bench.cases import DTYPE, Case, Shapes
from jreshard.bench.contenders import Contender, contenders
from jreshard.bench.context import Context, agree, failure


@dataclass(frozen=True)
class _Move:
    """A case's trees: what is moved, and how to tell whether it has arrived."""

    shapes: Shapes
    src: pattern.Shardings
    dst: pattern.Shardings
    params: pattern.Tree

    def poison(self) -> pattern.Tree:
        tree = pattern.make(self.shapes, self.dst, poison=True)
        jax.block_until_ready(tree)
        return tree

    def wrong(self, result: pattern.Tree) -> list[str]:
        return pattern.wrong_leaves(result, self.shapes, self.dst)


def run_case(context: Context, unit: str, case: Case, scale: float, skipped: Sequence[str]) -> dict[str, Any]:
    """Measures one case.

    Args:
        context: what all measurements share.
        unit: what the case is called in messages.
        case: what is moved.
        scale: the factor on its bytes; halved until it fits into memory.
        skipped: contenders that are not tried.

    Returns:
        The case's figures, and for each contender its times in seconds (from call to ready, and from call to return)
        or its error.
    """
    scale, shapes = context.fitting(case, scale)
    src, dst = (side.shardings(context.devices, shapes) for side in (case.src, case.dst))
    move = _Move(shapes, src, dst, jax.block_until_ready(pattern.make(shapes, src)))
    ways = [way for way in contenders(context.transports, src, dst, context.timeout) if way.name not in skipped]
    results: dict[str, dict[str, Any]] = {}
    for way in ways:
        context.peers.tell("begin", unit=unit, contender=way.name)
        results[way.name] = agree(context.peers.gather(_check(context, way, move)))
    ready = [way for way in ways if "error" not in results[way.name]]
    calls = {way.name: (context.rounds_for(results[way.name]["tried_s"]), _timed(context, way, move)) for way in ready}
    for name, (until_ready, until_return) in context.in_turns(unit, calls):
        results[name].setdefault("ready_s", []).append(until_ready)
        results[name].setdefault("returned_s", []).append(until_return)
    for way in ready:
        if way.reuses:
            context.peers.tell("begin", unit=unit, contender=way.name)
            results[way.name] |= _extra_memory(context, way, move)
    return {"title": case.title(shapes), "scale": scale, **_figures(move), "contenders": results}


def _figures(move: _Move) -> dict[str, Any]:
    structs = {name: jax.ShapeDtypeStruct(shape, DTYPE, sharding=move.src[name]) for name, shape in move.shapes.items()}
    plan = jreshard.plan(structs, dict(move.src), dict(move.dst))
    one_way = plan.traffic - np.diag(plan.traffic.diagonal())
    return {
        "leaves": len(move.shapes),
        "bytes": plan.nbytes,
        "bytes_crossing": plan.bytes_moved,
        "bytes_busiest_direction": int(one_way.max()),
    }


def _check(context: Context, way: Contender, move: _Move) -> dict[str, Any]:
    """The first call, into poisoned memory, and a look at every element of what arrived."""
    old: Any = move.poison()
    if not way.reuses:
        old = None  # the memory freed is what the call will most likely be given
    outside = memory.outside_jax(context.gpus.values())
    start = time.perf_counter()
    try:
        result = jax.block_until_ready(way.move(move.params, old))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return failure(error)
    found: dict[str, Any] = {"first_s": time.perf_counter() - start}  # compiling included
    if outside:
        now = memory.outside_jax(context.gpus.values()) or outside
        found["taken_outside_jax_bytes"] = max(b - a for a, b in zip(outside, now, strict=True))
    if wrong := move.wrong(result):
        return {
            "error": f"wrong bytes in {len(wrong)} of {len(move.shapes)} leaves, such as {wrong[0]}",
            "refused": False,
        }
    start = time.perf_counter()
    jax.block_until_ready(way.move(move.params, result if way.reuses else None))
    return found | {"tried_s": time.perf_counter() - start}


def _timed(context: Context, way: Contender, move: _Move) -> Callable[[], tuple[float, float]]:
    """A call that moves the tree once, and returns the seconds until it was ready and until the call returned."""

    def call() -> tuple[float, float]:
        # A result of its own, made anew, so that memory need only hold one result at a time.
        old = jax.block_until_ready(way.move(move.params, None)) if way.reuses else None
        start = context.peers.start_together()
        result = way.move(move.params, old)
        until_return = time.perf_counter() - start
        jax.block_until_ready(result)
        until_ready = time.perf_counter() - start
        return until_ready, until_return

    return call


def _extra_memory(context: Context, way: Contender, move: _Move) -> dict[str, Any]:
    kept = [jax.block_until_ready(way.move(move.params, None))]

    def call() -> Any:
        kept.append(way.move(move.params, kept.pop()))
        return kept

    try:
        return {"extra_bytes": memory.extra(call, context.local_devices)}
    except RuntimeError as error:  # no room for what must be filled to see the peak
        return {"extra_bytes": None, "extra_error": failure(error)["error"]}
