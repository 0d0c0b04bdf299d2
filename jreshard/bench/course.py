"""The course of the command: which measuring processes are started for what, one after the other."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jreshard.bench import table
from jreshard.bench.cases import CASES
from jreshard.bench.config import CEILINGS, MEMORY, SLOWDOWN
from jreshard.bench.report import Report, label
from jreshard.bench.session import Greeting, Request, measure

_MEMORY_WEIGHT = 0.5  # of the time that is left, beside 1 for the cases
_RESERVE = 0.03  # of all the time, so that what is begun can end


class Display(Protocol):
    """Where the user sees how far it is."""

    def progress(self, done: int, total: int, what: str) -> None:
        """So many units of so many are done, and this comes next."""

    def show(self, text: str) -> None:
        """Something to read."""


@dataclass(frozen=True)
class Wishes:
    """What the user wants measured.

    Attributes:
        units: cases by key, and `SLOWDOWN` and `MEMORY`; `None` for all that suits the devices.
        request: what holds for all parts.
        processes: across how many processes, one part each.
        seconds: for everything; `None` for no limit.
    """

    units: Sequence[str] | None
    request: Request
    processes: Sequence[int]
    seconds: float | None


def run(wishes: Wishes, report: Report, display: Callable[[str], AbstractContextManager[Display]]) -> list[str]:
    """Measures, and keeps the report; the times of all parts come first, then memory.

    The ceilings of one process are measured in every run, also for what is held against them across processes.

    Returns:
        What went wrong.

    Raises:
        Refused: there are not enough devices.
        OtherHost: the report goes on from one of another host.
    """
    course = _Course(wishes, report, display)
    course.run()
    return course.faults


@dataclass
class _Course:
    wishes: Wishes
    report: Report
    display: Callable[[str], AbstractContextManager[Display]]
    faults: list[str] = field(default_factory=list)
    _greetings: dict[int, Greeting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = self.wishes.seconds
        self._end = None if seconds is None else time.time() + seconds
        self._until = None if seconds is None else time.time() + seconds * (1 - _RESERVE)

    def run(self) -> None:
        units, processes = self.wishes.units, self.wishes.processes
        times = [1, *(count for count in processes if count > 1)]
        memory = processes if units is None or MEMORY in units else ()
        weights = [*(1.0 for _ in times), *(_MEMORY_WEIGHT for _ in memory)]
        for i, count in enumerate(times):
            self._times(count, self._share(weights[i:]))
        for i, count in enumerate(memory, len(times)):
            self._memory(count, self._share(weights[i:]))

    def _share(self, weights: Sequence[float]) -> float | None:
        """When the first of so many parts should end."""
        if self._until is None:
            return None
        now = time.time()
        return now + (self._until - now) * weights[0] / sum(weights)

    def _cases(self) -> list[str] | None:
        """Those asked for by name, or `None` for those that suit the devices."""
        units = self.wishes.units
        if units is None or self._only_memory():
            return None
        return [unit for unit in units if unit in CASES]

    def _only_memory(self) -> bool:
        """Whether the cases' times are not asked for."""
        units = self.wishes.units
        return units is not None and MEMORY in units and not any(unit in CASES for unit in units)

    def _times(self, processes: int, until: float | None) -> None:
        name = label(processes, self.wishes.request.isolated)
        if self._is_over():
            self._show(name, _not_measured(["anything"]))
            return
        wanted = processes in self.wishes.processes
        slowdown = wanted and processes == 1 and (self.wishes.units is None or SLOWDOWN in self.wishes.units)
        request = replace(
            self._request(processes, until),
            cases=self._cases() if wanted else [],
            beside=[CEILINGS] + [SLOWDOWN] * slowdown,
            done=[*self.report.finished(name), *(CASES if self._only_memory() else ())],
        )
        self._measure(_Times(self, processes, name), request)

    def _memory(self, processes: int, until: float | None) -> None:
        name, greeting = label(processes, self.wishes.request.isolated), self._greetings.get(processes)
        if greeting is None:
            return  # they did not even start
        late: list[str] = []
        for case in greeting.cases:
            for transport in greeting.transports:
                if self.report.has_memory(name, case, transport):
                    continue
                if self._is_over() or (until is not None and time.time() > until):
                    late.append(f"{case} over {transport}")
                    continue
                request = replace(self._request(processes, until), cases=[case], transports=[transport], memory=True)
                self._measure(_Memory(self, processes, name), request)
        if late:
            self._show(f"memory, {name}", _not_measured(late))

    def _request(self, processes: int, until: float | None) -> Request:
        isolated = self.wishes.request.isolated and processes > 1
        devices = self.wishes.request.devices if processes == 1 else processes
        return replace(
            self.wishes.request, processes=processes, devices=devices, isolated=isolated, until=until, end=self._end
        )

    def _is_over(self) -> bool:
        return self._until is not None and time.time() >= self._until

    def _show(self, title: str, text: str) -> None:
        with self.display(title) as display:
            display.show(text)

    def _measure(self, part: "_Part", request: Request) -> None:
        with self.display(part.title) as part.display:
            if left := measure(request, part):
                part.display.show(_not_measured(left))


class _Part(ABC):
    """One part, as it is measured.

    Attributes:
        title: what it is called.
        display: where the user sees it.
    """

    display: Display

    def __init__(self, course: _Course, processes: int, name: str) -> None:
        self.title = name
        self._course, self._processes, self._name = course, processes, name

    def greet(self, greeting: Greeting) -> None:
        self._course.report.greet(self._name, greeting)
        self._course._greetings[self._processes] = greeting

    def progress(self, done: int, total: int, what: str) -> None:
        self.display.progress(done, total, what)

    @abstractmethod
    def take(self, unit: str, result: dict[str, Any]) -> None:
        """As `Listener` says."""

    def lose(self, what: str) -> None:
        self._course.report.lose(what)
        self._course.faults.append(what)


class _Times(_Part):
    """The times of cases, and what is measured beside them."""

    def take(self, unit: str, result: dict[str, Any]) -> None:
        report = self._course.report
        self._course.faults += report.add(self._name, self._processes, unit, result)
        if unit == CEILINGS:
            self.display.show(table.ceilings(report.ceilings(self._name)))
        elif unit == SLOWDOWN:
            self.display.show(table.slowdown(report.part(self._name)[SLOWDOWN]))
        else:
            self.display.show(table.case(report.part(self._name)["cases"][unit]))


class _Memory(_Part):
    """The memory that cases take."""

    def __init__(self, course: _Course, processes: int, name: str) -> None:
        super().__init__(course, processes, name)
        self.title = f"memory, {name}"

    def take(self, unit: str, result: dict[str, Any]) -> None:
        self._course.faults += self._course.report.add_memory(self._name, unit, result)
        self.display.show(table.memory(unit, result))


def _not_measured(what: Sequence[str]) -> str:
    return f"no time was left for {', '.join(what)} (--resume goes on)"
