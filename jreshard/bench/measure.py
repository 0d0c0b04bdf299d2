"""One case, measured: every contender is checked first, and then all are timed in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jreshard.bench import memory, pattern
from jreshard.bench.cases import Case
from jreshard.bench.contenders import DEVICE_PUT, TRANSPORTS, Contender, Ways
from jreshard.bench.context import Context, agree, failure
from jreshard.bench.shapes import Shapes
from jreshard.bench.spent import FIRST, MAKE, VERIFY

_SLOW_SECONDS = 0.5  # what takes longer than this gets fewer rounds,
_SLOW_ROUNDS = 3  # and what only stands beside jreshard a single one;
_ENOUGH_SECONDS = 5  # its first call will do where even that took so long

#: Does what a contender does once, and returns the seconds until the result was ready and until the call returned.
_Timed = Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class _Job:
    """A case on its devices."""

    context: Context
    unit: str
    shapes: Shapes
    params: pattern.Tree

    def begin(self, way: Contender) -> None:
        self.context.peers.tell("begin", unit=self.unit, contender=way.name)

    def move(self, way: Contender, old: Any) -> Any:
        """The result of the contender, once it is ready."""
        with self.context.spent.on(way.kind):
            return jax.block_until_ready(way.move(old))

    def poison(self, way: Contender) -> pattern.Tree:
        """Something to overwrite, none of it right."""
        with self.context.spent.on(MAKE):
            tree = pattern.make(self.shapes, way.dst, poison=True)
            jax.block_until_ready(tree)
            return tree

    def fault(self, way: Contender, result: pattern.Tree) -> str:
        """What is wrong with what has arrived, or empty text."""
        with self.context.spent.on(VERIFY):
            wrong = pattern.wrong_leaves(result, self.shapes, way.dst)
        return f"wrong bytes in {len(wrong)} of {len(self.shapes)} leaves, such as {wrong[0]}" if wrong else ""


def run_case(
    context: Context, unit: str, case: Case, scale: float, skipped: Sequence[str], units_left: int = 1
) -> dict[str, Any]:
    """Measures one case.

    Args:
        context: what all measurements share.
        unit: what the case is called in messages.
        case: what is moved.
        scale: the factor on its bytes.
        skipped: contenders that are not tried.
        units_left: the cases that share the time which is left, this one among them.

    Returns:
        For each contender its times in seconds (from call to ready, and from call to return), or its error, or why it
        was left out; or why all of them were.
    """
    shapes = case.scaled(scale)
    if reason := context.too_large(case, shapes):
        return {"scale": scale, "skipped": reason, "contenders": {}}
    enough_at = time.perf_counter() + context.time_left() / units_left
    ways = Ways(case, shapes, context.devices, context.timeout)
    with context.spent.on(MAKE):
        params = jax.block_until_ready(pattern.make(shapes, ways.src))
    job = _Job(context, unit, shapes, params)
    contenders = [way for way in ways.contenders(context.transports, params) if way.name not in skipped]
    results: dict[str, dict[str, Any]] = {}
    for way in contenders:
        job.begin(way)
        results[way.name] = {"skipped": "no time was left"} if context.time_left() <= 0 else _check(job, way)
    tried = {way: results[way.name]["tried_s"] for way in contenders if "tried_s" in results[way.name]}
    tried = {way: once for way, once in tried.items() if "ready_s" not in results[way.name]}
    rounds = _rounds(context, tried, enough_at - time.perf_counter())
    calls = {way.name: (rounds[way], _timed(job, way)) for way in tried}
    for name, (until_ready, until_return) in context.in_turns(unit, calls):
        if name == next(iter(calls)):  # what there is now outlives this process
            context.peers.tell("partial", unit=unit, scale=scale, contenders=results)
        results[name].setdefault("ready_s", []).append(until_ready)
        results[name].setdefault("returned_s", []).append(until_return)
    return {"scale": scale, "contenders": results}


def _rounds(context: Context, tried: dict[Contender, float], seconds: float) -> dict[Contender, int]:
    """How often to time each contender, within about so many seconds, and at least once."""
    most: dict[Contender, int] = {}
    for way, once in tried.items():
        slow = _SLOW_ROUNDS if way.kind == TRANSPORTS else 1
        most[way] = context.rounds if once < _SLOW_SECONDS else min(context.rounds, slow)
    # Those that reuse a result make it anew each time.
    quick = sum(once * (1 + way.reuses) for way, once in tried.items() if once < _SLOW_SECONDS)
    others = sum(most[way] * once * (1 + way.reuses) for way, once in tried.items() if once >= _SLOW_SECONDS)
    share = (seconds - others) / (context.rounds * quick) if quick else 1.0
    limit = context.gather(max(1, int(context.rounds * min(1.0, share))))[0]
    return {way: min(rounds, limit) for way, rounds in most.items()}


def _check(job: _Job, way: Contender) -> dict[str, Any]:
    """The first call, into poisoned memory, with a look at every element of what arrived; and a second one.

    What holds for all processes: a failure of any of them, or else what took longest.
    """
    found, result = _first(job, way)
    found = agree(job.context.gather(found), "first_s")
    if "error" in found:
        return found
    if way.kind == DEVICE_PUT and found["first_s"] >= _ENOUGH_SECONDS:
        return found | {"tried_s": found["first_s"], "ready_s": [found["first_s"]], "returned_s": [found["first_s"]]}
    if not way.reuses:
        result = None  # there may not be room for two
    start = time.perf_counter()
    job.move(way, result)
    tried = {"tried_s": time.perf_counter() - start}
    return found | agree(job.context.gather(tried), "tried_s")


def _first(job: _Job, way: Contender) -> tuple[dict[str, Any], Any]:
    old: Any = job.poison(way)
    if not way.reuses:
        old = None  # the memory freed is what the call will most likely be given
    start = time.perf_counter()
    try:
        with job.context.spent.on(FIRST):  # planning, compiling and connecting included
            result = jax.block_until_ready(way.move(old))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return failure(error), None
    seconds = time.perf_counter() - start
    if fault := job.fault(way, result):
        return {"error": fault, "refused": False}, None
    return {"first_s": seconds}, result


def _timed(job: _Job, way: Contender) -> _Timed:
    def call() -> tuple[float, float]:
        # A result of its own, made anew, so that memory need only hold one result at a time.
        old = job.move(way, None) if way.reuses else None
        start = job.context.peers.start_together()
        with job.context.spent.on(way.kind):
            result = way.move(old)
            until_return = time.perf_counter() - start
            jax.block_until_ready(result)
        return time.perf_counter() - start, until_return

    return call


def run_memory(context: Context, case: Case, scale: float) -> dict[str, Any]:
    """Measures what memory a case takes with the only transport of the context, into the memory of an old result.

    Must be the first that the process does: see `memory`.
    """
    shapes = case.scaled(scale)
    if reason := context.too_large(case, shapes):
        return {"skipped": reason, "contenders": {}}
    [transport] = context.transports
    ways = Ways(case, shapes, context.devices, context.timeout)
    way = ways.refit(transport, jax.block_until_ready(pattern.make(shapes, ways.src)))
    kept = [jax.block_until_ready(pattern.make(shapes, way.dst, poison=True))]

    def call() -> Any:
        kept.append(way.move(kept.pop()))
        return kept

    try:
        found: dict[str, Any] = memory.extra(call, context.local_devices, context.gpus)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        found = failure(error)
    else:
        if wrong := pattern.wrong_leaves(kept[0], shapes, way.dst):
            found = {"error": f"wrong bytes in {len(wrong)} of {len(shapes)} leaves", "refused": False}
    return {"scale": scale, "contenders": {way.name: found}}
