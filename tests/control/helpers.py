"""What the tests of the control plane share: calls made together, callbacks that can be waited for, processes."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jreshard._control import Group

TIMEOUT = 30.0  # of everything that is expected to happen

Join = Callable[..., Group]
Start = Callable[..., "Child"]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each of the calls returns or raises, all being made at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


class Child:
    """Another process. Writes JSON, one value a line, and reads lines."""

    def __init__(self, code: str, *arguments: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def said(self) -> Any:
        """What it writes next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def go_on(self) -> None:
        """Lets it read a line."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> int:
        """Its exit status."""
        return self._process.wait(timeout=TIMEOUT)

    def close(self) -> None:
        """Ends it, and lets what it has forked read the end of its input."""
        self._process.kill()
        self._process.wait(timeout=TIMEOUT)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Reasons:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, reason: str) -> None:
        with self._changed:
            self.heard.append(reason)
            self._changed.notify_all()

    def wait(self, count: int = 1) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, TIMEOUT), self.heard
        return self.heard
