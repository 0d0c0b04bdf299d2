"""One crew after the other, until everything is measured or has been given up."""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jreshard.bench.config import Config
from jreshard.bench.crew import Crew, CrewLost, OutOfTime, free_port


class Refused(RuntimeError):
    """The devices are not enough."""


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        cases: as for `Config`.
        beside: likewise.
        done: likewise.
        transports: likewise.
        rounds: likewise.
        scale: likewise.
        timeout: likewise; a process that says nothing for twice as long is given up.
        until: likewise.
        end: when what is not done then is given up, in seconds of `time.time`; `None` for never.
        memory: as for `Config`.
        devices: likewise.
        processes: how many share the devices.
        isolated: whether each sees its own GPU only.
    """

    cases: Sequence[str] | None
    beside: Sequence[str] = ()
    done: Sequence[str] = ()
    transports: Sequence[str] = ()
    rounds: int = 1
    scale: float | None = None
    timeout: float = 60.0
    until: float | None = None
    end: float | None = None
    memory: bool = False
    devices: int | None = None
    processes: int = 1
    isolated: bool = False


@dataclass(frozen=True)
class Greeting:
    """What the first of the measuring processes says when it starts to measure.

    Attributes:
        host: what it runs on.
        versions: of the software.
        cases: those asked for, measured before or not.
        transports: those of jreshard that it tries.
        start_s: seconds that it took to get as far.
    """

    host: dict[str, Any]
    versions: dict[str, str]
    cases: list[str]
    transports: list[str]
    start_s: float


class Listener(Protocol):
    """Is told what happens."""

    def greet(self, greeting: Greeting) -> None:
        """Measuring starts, or starts again with other processes. What this raises ends it."""

    def progress(self, done: int, total: int, what: str) -> None:
        """So many units of so many are done, and this comes next."""

    def take(self, unit: str, result: dict[str, Any]) -> None:
        """The result of a unit, of all processes together; with `"cut_off"` where it is not complete."""

    def lose(self, what: str) -> None:
        """Something was given up because a process died or hung."""


def measure(request: Request, listener: Listener) -> list[str]:
    """Measures all units; what makes a process hang or die is left out, and the rest done by another.

    Returns:
        The units that there was no time for, or not enough.

    Raises:
        Refused: there are not enough devices.
    """
    session = _Session(request, listener)
    while session.run_crew():
        pass
    return session.left


@dataclass
class _Session:
    request: Request
    listener: Listener
    finished: list[str] = field(default_factory=list)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def run_crew(self) -> bool:
        """Gets as far as one crew gets; whether another one has to go on."""
        self._at: tuple[str | None, str | None] = (None, None)
        self._parts: dict[int, dict[str, Any]] = {}
        self._partial: dict[int, dict[str, Any]] = {}
        self._start = time.monotonic()
        try:
            with Crew(self._configs(), 2 * self.request.timeout, self.request.end) as crew:
                for who, message in crew.messages():
                    self._hear(who, message)
        except CrewLost as lost:
            return self._give_up(lost)
        except OutOfTime:
            self._cut_off()
        except BaseException:
            self._cut_off()
            raise
        return False

    def _configs(self) -> list[Config]:
        request, port = self.request, free_port()
        cases = None if request.cases is None else list(request.cases)
        skipped = {unit: list(errors) for unit, errors in self.skipped.items()}
        return [
            Config(
                cases, list(request.beside), [*request.done, *self.finished], skipped, list(request.transports),
                request.rounds, request.scale, request.timeout, request.until, request.memory, request.devices,
                process, request.processes, port, request.isolated,
            )
            for process in range(request.processes)
        ]  # fmt: skip

    def _hear(self, who: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "refuse":
            raise Refused(message["text"])
        if kind == "result":
            self._collect(who, message)
        elif kind == "partial":
            self._partial[who] = message
        elif who != 0:
            return
        elif kind == "hello":
            self.left = message.pop("units")
            self.listener.greet(Greeting(**message, start_s=time.monotonic() - self._start))
        elif kind == "begin":
            self._at = message["unit"], message["contender"]
            done = len(self.finished)
            self.listener.progress(done, done + len(self.left), " ".join(name for name in self._at if name))

    def _collect(self, who: int, message: dict[str, Any]) -> None:
        """Takes a unit's result from one process; from the last one, the unit is done."""
        self._parts[who] = message
        if len(self._parts) == self.request.processes:
            parts, self._parts, self._partial = self._parts, {}, {}
            self._done(parts[0]["unit"], self._merged(parts))

    def _merged(self, parts: dict[int, dict[str, Any]]) -> dict[str, Any]:
        merged = parts[0] | {"contenders": _together([parts[who]["contenders"] for who in sorted(parts)])}
        unit = merged.pop("unit")
        for name, error in self.skipped.get(unit, {}).items():
            merged["contenders"][name] = {"error": error, "refused": False}
        return merged

    def _done(self, unit: str, result: dict[str, Any]) -> None:
        self.finished.append(unit)
        self.left.remove(unit)
        self.listener.take(unit, result)

    def _cut_off(self) -> None:
        """Keeps what there is of the unit that was being measured."""
        latest = self._partial | self._parts
        if len(latest) == self.request.processes and len({part["unit"] for part in latest.values()}) == 1:
            unit = latest[0]["unit"]
            self.listener.take(unit, self._merged(latest) | {"cut_off": True})

    def _give_up(self, lost: CrewLost) -> bool:
        unit, contender = self._at
        what = f"{lost}, at {contender or 'the preparations'} of {unit}" if unit else str(lost)
        print(f"{what}; the last it printed:\n{lost.tail}", file=sys.stderr)
        self.listener.lose(what)
        if unit is None:
            self.left = []  # for another reason than time
            return False  # it does not even start
        error = _without_paths(f"{lost}: {_last_line(lost.tail)}")
        if contender is None:
            self._done(unit, {"error": error, "contenders": {}})
        else:
            self.skipped.setdefault(unit, {})[contender] = error
        return bool(self.left)


def _together(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The contenders of all processes: a move has taken as long as the slowest process says."""
    merged = {}
    for name in (name for name in parts[0] if all(name in part for part in parts)):
        of_all = [part[name] for part in parts]
        merged[name] = dict(of_all[0])
        for key in ("ready_s", "returned_s"):
            if all(key in part for part in of_all):
                # where the processes were cut off, some have got further
                merged[name][key] = [max(samples) for samples in zip(*(part[key] for part in of_all), strict=False)]
        for key in ("extra_bytes", "unseen_bytes", "outside_jax_bytes"):
            if key in of_all[0]:
                merged[name][key] = max(part[key] for part in of_all if key in part)
        if failures := [part for part in of_all if "error" in part]:
            merged[name] = failures[0]
    return merged


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _without_paths(text: str) -> str:
    """The text with the names of files, but not the folders that they are in."""
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/(?=[\w.+@-]+)", "", text)
