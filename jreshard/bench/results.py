"""From samples to figures."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jreshard.bench.ceilings import COPY_ENGINE, MEMORY_COPY, SEND_RECV, groups
from jreshard.bench.contenders import DEVICE_PUT, INTO
from jreshard.bench.slowdown import ALONE

#: The ceilings that every case is held against, beside the one that does what the case does.
REFERENCES = (COPY_ENGINE, SEND_RECV, MEMORY_COPY)

_SAMPLES = ("ready_s", "returned_s", "tried_s")


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


def ceilings(unit: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the ceilings.

    Args:
        unit: what `ceilings.run` measured.
    """
    out: dict[str, Any] = {}
    for name, found in unit["contenders"].items():
        if "ready_s" not in found:
            out[name] = {"error": found.get("error", "not measured")}
            continue
        pairs = groups(name, unit["devices"])
        out[name] = spread([statistics.mean(seconds) for seconds in found["ready_s"]])
        out[name] |= {"bytes": unit["bytes"], "bytes_per_s": unit["bytes"] / out[name]["median_s"]}
        if len(pairs) > 1:
            out[name]["note"] = "the mean of all pairs, one at a time"
            by_pair = (statistics.median(seconds) for seconds in zip(*found["ready_s"], strict=True))
            out[name]["pairs_bytes_per_s"] = {
                f"{src} -> {dst}": unit["bytes"] / seconds for [(src, dst)], seconds in zip(pairs, by_pair, strict=True)
            }
        elif len(pairs[0]) > 1:
            out[name]["note"] = "bytes and bytes_per_s are those of one link each way"
            out[name]["sum_bytes_per_s"] = len(pairs[0]) * out[name]["bytes_per_s"]
    return out


def rates(ceilings: Mapping[str, Any]) -> dict[str, float]:
    """What each ceiling comes to, bytes a second of one link one way."""
    return {name: found["bytes_per_s"] for name, found in ceilings.items() if "bytes_per_s" in found}


def case(unit: Mapping[str, Any], expected: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a case.

    Args:
        unit: what `run_case` measured.
        expected: what `expected` says of it.
        rates: those of the ceilings of the same run.
    """
    busiest = expected["bytes_busiest_link"]
    ceiling = MEMORY_COPY if MEMORY_COPY in rates else expected["ceiling"]
    ideal = {name: busiest / rate for name, rate in rates.items() if name in (*REFERENCES, ceiling)}
    out = {**unit, **expected, "ceiling": ceiling, "ideal_s": ideal, "contenders": {}}
    contenders = unit["contenders"]
    medians = {name: statistics.median(found["ready_s"]) for name, found in contenders.items() if "ready_s" in found}
    for name, found in contenders.items():
        out["contenders"][name] = kept = {key: value for key, value in found.items() if key not in _SAMPLES}
        if name not in medians:
            continue
        median = medians[name]
        kept |= spread(found["ready_s"])
        kept["median_until_return_s"] = statistics.median(found["returned_s"])
        is_base = bool(expected["base"]) and name.endswith(f", {expected['base']}")
        if is_base:
            continue  # other bytes on other links
        kept["bytes_per_s"] = busiest / median
        kept["of"] = {reference: seconds / median for reference, seconds in ideal.items()}
        if DEVICE_PUT in medians and name != DEVICE_PUT:
            kept["times_device_put"] = medians[DEVICE_PUT] / median
        base = medians.get(f"{name.split(INTO)[0]}{INTO}, {expected['base']}")
        if base and INTO in name:
            kept["time_of_base"] = median / base
        if name.endswith(INTO):
            kept["prediction_error"] = expected["predicted"]["total"] / median - 1
    return out


def compare(case: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    """Adds to the figures of a case across processes what they are of those of one process, of the same run."""
    for name, found in case["contenders"].items():
        before = alone["contenders"].get(name, {})
        if "median_s" in found and "median_s" in before:
            found["of_one_process"] = before["median_s"] / found["median_s"]


def faults(case: Mapping[str, Any]) -> Iterator[str]:
    """What went wrong with jreshard's transports: failures, but not requests that they refuse."""
    for name, contender in case["contenders"].items():
        if name != DEVICE_PUT and "error" in contender and not contender["refused"]:
            yield f"{case.get('title', '')}: {name}: {contender['error']}"


def slowdown(unit: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the products beside moves."""
    contenders = unit["contenders"]
    alone = contenders.get(ALONE, {}).get("ready_s")
    out: dict[str, Any] = {}
    for name, found in contenders.items():
        if "ready_s" not in found:
            out[name] = {"error": found.get("error", "not measured")}
            continue
        out[name] = spread(found["ready_s"]) | {"moves": sum(found["moves"])}
        if alone:
            out[name]["slowed_by"] = out[name]["median_s"] / statistics.median(alone) - 1
    return out
