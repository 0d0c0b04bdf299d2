"""Tells readers at once when a source array turns out to be an error."""

import queue
import threading

from jax import Array

from jreshard._native import Exchange


class Watcher:
    """Fails calls whose source arrays fail: their program never runs, and the readers would wait for the timeout."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Array, Exchange, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False

    def watch(self, token: Array, exchange: Exchange, call: int) -> None:
        """Sees to it that the call ends when `token`, the source program's result, turns out to be an error."""
        if token.is_ready():
            _abort_if_failed(token, exchange, call)
            return
        with self._lock:
            if not self._started:
                threading.Thread(target=self._loop, name="jreshard-watcher", daemon=True).start()
                self._started = True
        self._queue.put((token, exchange, call))

    def _loop(self) -> None:
        while True:
            _abort_if_failed(*self._queue.get())


def _abort_if_failed(token: Array, exchange: Exchange, call: int) -> None:
    try:
        token.block_until_ready()
    except Exception as error:  # whatever the source's computation raised is what the readers get
        exchange.abort(call, f"jreshard: a source array failed: {error}")


watcher = Watcher()
