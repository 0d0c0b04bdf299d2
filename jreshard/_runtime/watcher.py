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

    def watch(self, token: Array, exchange: Exchange, call: int) -> None:
        """Sees to it that the call ends when `token`, which one of its programs returns, turns out to be an error.

        Nobody else has it: results of users may be donated, and gone, before they fail.
        """
        if is_ready(token):
            _abort_if_failed(token, exchange, call)
            return
        with self._lock:
            if not self._threads:
                for i in range(_THREADS):
                    thread = threading.Thread(target=self._loop, name=f"jreshard-watcher-{i}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
                # A thread that waits for an array while Python ends would take the process down.
                atexit.register(self._close)
        self._queue.put((token, exchange, call))

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


def _abort_if_failed(token: Array, exchange: Exchange, call: int) -> None:
    try:
        jax.block_until_ready(token)
    except Exception as error:  # whatever an input's computation raised is what the others get
        exchange.abort(call, f"jreshard: an array of this transfer failed: {error}")


watcher = Watcher()
