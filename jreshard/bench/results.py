"""From samples to figures."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jreshard.bench.ceilings import BOTH_WAYS, COPY_ENGINE, MEMORY_COPY, SEND_RECV
from jreshard.bench.config import CEILINGS, SLOWDOWN
from jreshard.bench.contenders import DEVICE_PUT
from jreshard.bench.session import Outcome
from jreshard.bench.slowdown import ALONE

#: The ceilings that cases are held against, in the order in which they are reported.
REFERENCES = (COPY_ENGINE, SEND_RECV, MEMORY_COPY)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, extremes and quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [*seconds] * 3
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "q1_s": low,
        "q3_s": high,
        "rounds": len(seconds),
    }


def conclude(outcome: Outcome, alone: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figures of one run.

    Args:
        outcome: the samples.
        alone: the figures of the run in one process, to compare one across processes with, which cannot measure all of
            the ceilings.
    """
    units = dict(outcome.units)
    measured = _ceilings(units.pop(CEILINGS, {}))
    slowdown = _slowdown(units.pop(SLOWDOWN, {}))
    references = _rates(alone["ceilings"] if alone else {}) | _rates(measured)
    cases = {key: _case(case, references) for key, case in units.items()}
    if alone:
        for key, case in cases.items():
            _compare(case, alone["cases"].get(key, {"contenders": {}}))
    out: dict[str, Any] = {"ceilings": measured, "cases": cases}
    if slowdown:
        out["slowdown"] = slowdown
    if outcome.losses:
        out["losses"] = outcome.losses
    return out


def _rates(ceilings: Mapping[str, Any]) -> dict[str, float]:
    return {name: found["bytes_per_s"] for name, found in ceilings.items() if "bytes_per_s" in found}


def _compare(case: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    for name, found in case["contenders"].items():
        before = alone["contenders"].get(name, {})
        if "median_s" in found and "median_s" in before:
            found["of_one_process"] = before["median_s"] / found["median_s"]


def faults(figures: Mapping[str, Any]) -> list[str]:
    """What went wrong with jreshard's transports: failures, but not requests that they refuse."""
    found = list(figures.get("losses", []))
    for case in figures["cases"].values():
        for name, contender in case["contenders"].items():
            if name != DEVICE_PUT and "error" in contender and not contender["refused"]:
                found.append(f"{case.get('title', '')}: {name}: {contender['error']}")
    return found


def _ceilings(unit: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, found in unit.get("contenders", {}).items():
        if "ready_s" not in found:
            out[name] = {"error": found["error"]}
            continue
        out[name] = spread(found["ready_s"])
        out[name] |= {"bytes": unit["bytes"], "bytes_per_s": unit["bytes"] / out[name]["median_s"]}
        if name == BOTH_WAYS:
            out[name]["note"] = "bytes and bytes_per_s are those of each way"
    return out


def _case(unit: Mapping[str, Any], references: Mapping[str, float]) -> dict[str, Any]:
    busiest = unit.get("bytes_busiest_direction", 0)
    ideal = {name: busiest / references[name] for name in REFERENCES if name in references}
    out = dict(unit) | {"ideal_s": ideal, "contenders": {}}
    medians = {n: statistics.median(c["ready_s"]) for n, c in unit["contenders"].items() if "ready_s" in c}
    for name, found in unit["contenders"].items():
        out["contenders"][name] = kept = {
            k: v for k, v in found.items() if k not in ("ready_s", "returned_s", "tried_s")
        }
        if name not in medians:
            continue
        kept |= spread(found["ready_s"])
        kept["median_until_return_s"] = statistics.median(found["returned_s"])
        kept["bytes_per_s"] = busiest / medians[name]
        kept["of"] = {reference: seconds / medians[name] for reference, seconds in ideal.items()}
        if DEVICE_PUT in medians and name != DEVICE_PUT:
            kept["times_device_put"] = medians[DEVICE_PUT] / medians[name]
    return out


def _slowdown(unit: Mapping[str, Any]) -> dict[str, Any]:
    contenders = unit.get("contenders", {})
    alone = contenders.get(ALONE, {}).get("ready_s")
    out: dict[str, Any] = {}
    for name, found in contenders.items():
        if "ready_s" not in found:
            out[name] = {"error": found["error"]}
            continue
        out[name] = spread(found["ready_s"]) | {"moves": sum(found["moves"])}
        if alone:
            out[name]["slowed_by"] = out[name]["median_s"] / statistics.median(alone) - 1
    return out
