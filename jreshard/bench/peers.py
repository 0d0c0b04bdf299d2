"""How a measuring process talks to the command that started it, and through it to the other one."""

import json
import sys
import time
from typing import IO, Any


class Peers:
    """This process's line to the command.

    Args:
        count: the measuring processes.
        incoming: where the command's answers come from, a line of JSON each.
        outgoing: where messages go, likewise.
    """

    def __init__(self, count: int, incoming: IO[str], outgoing: IO[str]) -> None:
        self._count, self._incoming, self._outgoing = count, incoming, outgoing

    def tell(self, kind: str, **fields: Any) -> None:
        """Sends a message. The command takes long silence for a hang."""
        self._outgoing.write(json.dumps({"kind": kind, **fields}) + "\n")
        self._outgoing.flush()

    def gather(self, value: Any) -> list[Any]:
        """What every process says here, by process; waits for all of them."""
        return self._meet(value)[0]

    def start_together(self) -> float:
        """Waits for a moment that all processes share, and returns it, in seconds of `time.perf_counter`."""
        _, start = self._meet(None)
        while (left := start - time.perf_counter()) > 0:
            if left > 0.0005:
                time.sleep(left / 2)
        return start

    def _meet(self, value: Any) -> tuple[list[Any], float]:
        if self._count == 1:
            return [value], time.perf_counter()
        self.tell("gather", value=value)
        answer = self._incoming.readline()
        if not answer:
            sys.exit("the command that started this process is gone")
        found = json.loads(answer)
        return found["values"], found["start"]
