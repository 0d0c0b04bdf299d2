"""Tells all sides of a transfer at once when an array of it turns out to be an error."""

import atexit
import queue
import threading
import time

import jax
from jax import Array

from jreshard._compat import is_ready
from jreshard._runtime.native import Exchange

# Each waits for one array at a time; with more transfers than that under way, news of a failure may come late.
_THREADS = 4
_EXIT_SECONDS = 5.0


class Watcher:
    """Fails calls whose arrays fail before the exchange sees them.

    A program with a failed input never runs; whoever waits for it would wait for the timeout.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Array, Exchange, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def watch(self, result: Array, exchange: Exchange, call: int) -> None:
        """Sees to it that the call ends when `result`, of one of its programs, turns out to be an error."""
        if is_ready(result):
            _abort_if_failed(result, exchange, call)
            return
        with self._lock:
            if not self._threads:
                for i in range(_THREADS):
                    thread = threading.Thread(target=self._loop, name=f"jreshard-watcher-{i}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
                # A thread that waits for an array while Python ends would take the process down.
                atexit.register(self._close)
        self._queue.put((result, exchange, call))

    def _loop(self) -> None:
        while (watched := self._queue.get()) is not None:
            _abort_if_failed(*watched)

    def _close(self) -> None:
        """Ends the threads when all that they watch has ended; not later than in some seconds."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + _EXIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _abort_if_failed(result: Array, exchange: Exchange, call: int) -> None:
    try:
        jax.block_until_ready(result)
    except Exception as error:  # whatever an input's computation raised is what the others get
        if result.is_deleted():
            return  # the caller has donated it to the next step meanwhile
        exchange.abort(call, f"jreshard: an array of this transfer failed: {error}")


watcher = Watcher()
