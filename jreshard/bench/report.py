"""The results of this run and of those that it goes on from, in a file that is never without what is known so far."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jreshard.bench import results
from jreshard.bench.cases import CASES
from jreshard.bench.config import CEILINGS, MEMORY, SLOWDOWN
from jreshard.bench.expected import expected
from jreshard.bench.session import Greeting

ONE_PROCESS = "one process"

_LINK = 400e9  # bytes a second, where no ceiling could be measured


class OtherHost(RuntimeError):
    """The results to go on from are of another host, or of other versions."""


def label(processes: int, isolated: bool) -> str:
    """What the results across so many processes stand under."""
    if processes == 1:
        return ONE_PROCESS
    return f"{processes} processes" + (", isolated" if isolated else "")


class Report:
    """All results.

    Args:
        path: the file; `None` for none.
        earlier: what it held before, to go on from.

    Attributes:
        data: what is written: host and versions; `runs`, each with its ceilings; and for each number of processes its
            `cases`, each with the number of the run whose ceilings it is held against, and `memory`.
    """

    def __init__(self, path: Path | None, earlier: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self.data: dict[str, Any] = {"host": {}, "versions": {}, "runs": [], **(earlier or {})}
        self._start = time.monotonic()
        self.data["runs"].append({"number": self.number_of_runs + 1, "seconds": 0.0, "start_s": {}, "ceilings": {}})

    @property
    def number_of_runs(self) -> int:
        """The runs so far, this one among them."""
        return len(self.data["runs"])

    @property
    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = self.data["runs"][-1]
        return run

    def part(self, name: str) -> dict[str, Any]:
        """The cases and more, across as many processes as `label` says."""
        part: dict[str, Any] = self.data.setdefault(name, {"cases": {}})
        return part

    def parts(self) -> dict[str, dict[str, Any]]:
        """All of these that there are."""
        return {name: part for name, part in self.data.items() if isinstance(part, dict) and "cases" in part}

    def greet(self, name: str, greeting: Greeting) -> None:
        """Notes what the run is made on.

        Raises:
            OtherHost: something else than the results to go on from.
        """
        self._run["start_s"].setdefault(name, round(greeting.start_s, 3))
        if name != ONE_PROCESS:
            return  # which comes first, and sees all devices
        found = {"host": greeting.host, "versions": greeting.versions}
        for what, now in found.items():
            before = self.data[what] or now
            if before != now:
                other = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
                text = ", ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in other)
                of = "host, or of other options" if what == "host" else "version"
                raise OtherHost(f"the results to go on from are of another {of}: {text}")
        self.data |= found

    def ceilings(self, name: str) -> dict[str, Any]:
        """Those of this run; what cannot be measured across processes is that of one process."""
        of = self._run["ceilings"]
        return {**of.get(ONE_PROCESS, {}), **of.get(name, {})}

    def add(self, name: str, processes: int, unit: str, result: Mapping[str, Any]) -> list[str]:
        """Takes a unit's result, and writes the file.

        Returns:
            What went wrong with jreshard's transports.
        """
        faults: list[str] = []
        if unit == CEILINGS:
            self._run["ceilings"][name] = results.ceilings(result) if "devices" in result else {}
        elif unit == SLOWDOWN:
            self.part(name)[SLOWDOWN] = results.slowdown(result) | {"run": self.number_of_runs}
        else:
            case = self._case(name, processes, unit, result) | {"run": self.number_of_runs}
            alone = self.part(ONE_PROCESS)["cases"].get(unit, {})
            if name != ONE_PROCESS and alone.get("run") == self.number_of_runs:
                results.compare(case, alone)
            self.part(name)["cases"][unit] = case
            faults = list(results.faults(case))
        self.write()
        return faults

    def _case(self, name: str, processes: int, unit: str, result: Mapping[str, Any]) -> dict[str, Any]:
        scale = result.get("scale", 1.0)
        rates = results.rates(self.ceilings(name))
        link = next((rates[reference] for reference in results.REFERENCES if reference in rates), _LINK)
        return results.case(result, expected(unit, scale, processes, link), rates)

    def add_memory(self, name: str, case: str, result: Mapping[str, Any]) -> list[str]:
        """Takes what memory a case takes, and writes the file.

        Returns:
            What went wrong.
        """
        title = CASES[case].title(CASES[case].scaled(result.get("scale", 1.0)))
        kept = self.part(name).setdefault(MEMORY, {}).setdefault(case, {"title": title})
        kept.pop("error", None)  # of an earlier run
        kept |= {key: value for key, value in result.items() if key != "contenders"}
        kept.setdefault("contenders", {}).update(result["contenders"])
        self.write()
        return list(results.faults({"title": f"memory of {case}", **result}))

    def lose(self, what: str) -> None:
        """Notes that something was given up."""
        self._run.setdefault("losses", []).append(what)
        self.write()

    def finished(self, name: str) -> list[str]:
        """What a run that goes on from here need not measure again."""
        part = self.part(name)
        found = [case for case, figures in part["cases"].items() if _is_complete(figures)]
        return found + [SLOWDOWN] * (SLOWDOWN in part)

    def has_memory(self, name: str, case: str, transport: str) -> bool:
        """Whether it is known what memory a case takes with a transport."""
        kept = self.part(name).get(MEMORY, {}).get(case, {})
        return "skipped" in kept or any(way.startswith(transport) for way in kept.get("contenders", {}))

    def write(self) -> None:
        """Writes the file; whoever reads it meanwhile, or after a crash, sees the last one whole."""
        self._run["seconds"] = round(time.monotonic() - self._start, 1)
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(fresh, self._path)


def _is_complete(figures: Mapping[str, Any]) -> bool:
    """Whether all of a case was measured, or failed, or cannot be measured here."""
    left_out = any("skipped" in contender for contender in figures["contenders"].values())
    return not (left_out or "cut_off" in figures)
