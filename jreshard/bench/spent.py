"""Where the time of a measurement goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

MAKE, FIRST, VERIFY, WAIT = "make inputs", "first calls", "verify", "wait for the other processes"
#: Is part of the others.
COMPILE = "of these compiling"

_COMPILING = "/jax/core/compile/"  # what the events are called with which JAX reports tracing, lowering and compiling


class Spent:
    """Seconds by what they went to, since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def watch_compiling(self) -> None:
        """Counts what JAX compiles from now on, as long as the process lives."""
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(_COMPILING):
            self._add(COMPILE, duration_secs)

    def _add(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Counts what is done within as spent on `what`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(what, time.perf_counter() - start)

    def take(self) -> dict[str, float]:
        """The seconds so far, with their `"total"`; counting starts anew."""
        now = time.perf_counter()
        taken = {"total": now - self._start, **self._seconds}
        self._seconds, self._start = {}, now
        return {what: round(seconds, 4) for what, seconds in taken.items()}
