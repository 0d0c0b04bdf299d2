"""A whole run: one crew after the other, until everything is measured or has been given up."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jreshard.bench.config import Config
from jreshard.bench.crew import Crew, CrewLost, free_port


class Refused(RuntimeError):
    """The devices are not enough."""


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        units: in order, as for `Config`.
        transports: likewise.
        rounds: likewise.
        scale: likewise.
        timeout: likewise; a process that says nothing for twice as long is given up.
        processes: how many share the devices.
        isolated: whether each sees its own GPU only.
    """

    units: Sequence[str]
    transports: Sequence[str]
    rounds: int
    scale: float | None
    timeout: float
    processes: int = 1
    isolated: bool = False


@dataclass
class Outcome:
    """What came back.

    Attributes:
        host: what the run was made on.
        versions: of the software.
        units: the results of each unit, those of all processes together.
        losses: what was given up because a process died or hung.
    """

    host: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    units: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)


#: Told of the turns that are done, of all turns, and of what comes next.
Progress = Callable[[int, int, str], None]
#: Told of everything so far, each time that a unit is done, and of that unit.
Watcher = Callable[[Outcome, str], None]


def measure(request: Request, progress: Progress, watcher: Watcher) -> Outcome:
    """Measures all units; what makes a process hang or die is left out, and the rest done by another.

    Raises:
        Refused: there are not enough devices.
    """
    session = _Session(request, progress, watcher)
    while session.pending:
        session.run_crew()
    return session.outcome


class _Session:
    def __init__(self, request: Request, progress: Progress, watcher: Watcher) -> None:
        self._request, self._progress, self._watcher = request, progress, watcher
        self.pending = list(request.units)
        self.outcome = Outcome()
        self._skipped: dict[str, dict[str, str]] = {}
        self._turns = self._all_turns = 0

    def run_crew(self) -> None:
        """Gets as far as one crew gets."""
        self._at: tuple[str | None, str | None] = (None, None)
        self._parts: list[dict[str, Any]] = []
        try:
            with Crew(self._configs(), 2 * self._request.timeout) as crew:
                for who, message in crew.messages():
                    self._hear(who, message)
        except CrewLost as lost:
            self._give_up(lost)

    def _configs(self) -> list[Config]:
        request, port = self._request, free_port()
        skipped = {unit: list(errors) for unit, errors in self._skipped.items()}
        return [
            Config(
                self.pending, skipped, list(request.transports), request.rounds, request.scale, request.timeout,
                process, request.processes, port, request.isolated,
            )
            for process in range(request.processes)
        ]  # fmt: skip

    def _hear(self, who: int, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "refuse":
            raise Refused(message["text"])
        if kind == "result":
            self._collect(message)
        elif who != 0:
            return
        elif kind == "hello":
            self.outcome.host, self.outcome.versions = message["host"], message["versions"]
            self._all_turns = self._turns + message["turns"]
        elif kind == "begin":
            self._at = message["unit"], message["contender"]
            self._progress(self._turns, self._all_turns, " ".join(name for name in self._at if name))
            self._turns += message["contender"] is not None

    def _collect(self, message: dict[str, Any]) -> None:
        """Takes a unit's result from one process; from the last one, the unit is done."""
        self._parts.append(message)
        if len(self._parts) < self._request.processes:
            return
        parts, self._parts = self._parts, []
        unit = self.pending.pop(0)
        merged = parts[0] | {"contenders": _together([part["contenders"] for part in parts])}
        del merged["unit"]
        for name, error in self._skipped.get(unit, {}).items():
            merged["contenders"][name] = {"error": error, "refused": False}
        self._done(unit, merged)

    def _done(self, unit: str, result: dict[str, Any]) -> None:
        self.outcome.units[unit] = result
        self._watcher(self.outcome, unit)

    def _give_up(self, lost: CrewLost) -> None:
        unit, contender = self._at
        what = f"{lost}, at {contender or 'the preparations'} of {unit}" if unit else str(lost)
        print(f"{what}; the last it printed:\n{lost.tail}", file=sys.stderr)
        self.outcome.losses.append(what)
        if unit is None:
            self.pending = []  # it does not even start
        elif contender is None:
            self.pending.remove(unit)
            self._done(unit, {"error": _without_paths(f"{lost}: {_last_line(lost.tail)}"), "contenders": {}})
        else:
            error = _without_paths(f"{lost}: {_last_line(lost.tail)}")
            self._skipped.setdefault(unit, {})[contender] = error


def _together(parts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The contenders of all processes: a move has taken as long as the slowest process says."""
    merged = {}
    for name in parts[0]:
        of_all = [part[name] for part in parts]
        merged[name] = dict(of_all[0])
        for key in ("ready_s", "returned_s"):
            if key in of_all[0]:
                merged[name][key] = [max(samples) for samples in zip(*(part[key] for part in of_all), strict=True)]
        extras = [part["extra_bytes"] for part in of_all if part.get("extra_bytes") is not None]
        if extras:
            merged[name]["extra_bytes"] = max(extras)
    return merged


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _without_paths(text: str) -> str:
    """The text with the names of files, but not the folders that they are in."""
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/(?=[\w.+@-]+)", "", text)
