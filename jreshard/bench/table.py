"""The figures as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from jreshard.bench.shapes import amount

_NAME_WIDTH = 34
_HEADINGS = {
    "ms": 10, "+-": 8, "rounds": 8, "GB/s": 8, "ceiling": 9, "device_put": 12, "time/base": 11, "base/time": 11,
    "predicted": 11, "1 process": 11,
}  # fmt: skip


def ceilings(figures: Mapping[str, Any]) -> str:
    """A line for each ceiling."""
    return "\n".join(f"{name:{_NAME_WIDTH}}{found.get('error') or _ceiling(found)}" for name, found in figures.items())


def _ceiling(found: Mapping[str, Any]) -> str:
    text = f"{found['median_s'] * 1e3:10.2f} ms +- {_half(found) * 1e3:.2f}"
    text += f"{found['bytes_per_s'] / 1e9:8.1f} GB/s, {amount(found['bytes'])}"
    if pairs := found.get("pairs_bytes_per_s"):
        text += f"; {len(pairs)} pairs from {min(pairs.values()) / 1e9:.1f} to {max(pairs.values()) / 1e9:.1f}"
    if "sum_bytes_per_s" in found:
        text += f" a link, {found['sum_bytes_per_s'] / 1e9:.1f} in all"
    return text


def case(figures: Mapping[str, Any]) -> str:
    """A table of the contenders of a case; docs/benchmark.md says what its columns mean."""
    return "\n".join(_case(figures))


def _case(figures: Mapping[str, Any]) -> Iterator[str]:
    if reason := figures.get("error") or figures.get("skipped"):
        yield f"{figures['title']}: {'given up' if 'error' in figures else 'left out'}: {reason}"
        return
    ideal = figures["ideal_s"].get(figures["ceiling"])
    at_best = f", {ideal * 1e3:.2f} ms at {figures['ceiling']}" if ideal else ""
    cut = "; cut off" if "cut_off" in figures else ""
    yield f"{figures['title']}: {amount(figures['bytes_busiest_link'])} on the busiest link{at_best}{cut}"
    rows = {name: _row(found, figures) for name, found in figures["contenders"].items()}
    used = [heading for heading in _HEADINGS if any(heading in row for row in rows.values())]
    base = f"; base: {figures['base']}" if figures["base"] else ""
    yield f"  {'':{_NAME_WIDTH - 2}}{''.join(f'{heading:>{_HEADINGS[heading]}}' for heading in used)}{base}"
    for name, row in rows.items():
        columns = "".join(f"{row.get(heading, ''):>{_HEADINGS[heading]}}" for heading in used)
        yield f"  {name:{_NAME_WIDTH - 2}}{row.get('error') or columns}".rstrip()
    if spent := figures.get("spent"):
        yield "  " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in spent.items() if seconds >= 0.05)


def _row(found: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, str]:
    if "median_s" not in found:
        return {"error": found.get("error") or found.get("skipped") or "not timed"}
    row = {"ms": f"{found['median_s'] * 1e3:.2f}", "rounds": str(found["rounds"])}
    if found["rounds"] > 1:
        row["+-"] = f"{_half(found) * 1e3:.2f}"
    if "bytes_per_s" in found:
        row["GB/s"] = f"{found['bytes_per_s'] / 1e9:.1f}"
    if figures["ceiling"] in found.get("of", {}):
        row["ceiling"] = f"{found['of'][figures['ceiling']]:.3f}"
    if "times_device_put" in found:
        row["device_put"] = f"{found['times_device_put']:.1f} x"
    if "time_of_base" in found:
        row |= {"time/base": f"{found['time_of_base']:.2f}", "base/time": f"{1 / found['time_of_base']:.2f}"}
    if "prediction_error" in found:
        row["predicted"] = f"{found['prediction_error'] * 100:+.0f} %"
    if "of_one_process" in found:
        row["1 process"] = f"{found['of_one_process']:.2f}"
    return row


def memory(title: str, result: Mapping[str, Any]) -> str:
    """A line for each way whose memory was measured."""
    if "skipped" in result:
        return f"memory, {title}: left out: {result['skipped']}"
    return "\n".join(f"memory, {title}: {name}: {_memory(found)}" for name, found in result["contenders"].items())


def _memory(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    text = f"{amount(found['extra_bytes'])} extra"
    if found.get("unseen_bytes"):
        text += f" (less than {amount(found['unseen_bytes'])} would not show)"
    if "outside_jax_bytes" in found:
        text += f", {amount(found['outside_jax_bytes'])} outside JAX's pool"
    return text


def slowdown(figures: Mapping[str, Any]) -> str:
    """A line for each way to move bytes beside matrix products."""
    ways = {name: found for name, found in figures.items() if name != "run"}
    lines = [f"  {name:{_NAME_WIDTH - 2}}{found.get('error') or _slowed(found)}" for name, found in ways.items()]
    return "\n".join(["matrix products meanwhile", *lines])


def _slowed(found: Mapping[str, Any]) -> str:
    text = f"{found['median_s'] * 1e3:10.2f} ms +- {_half(found) * 1e3:.2f}"
    if "slowed_by" in found:
        text += f"  {found['slowed_by'] * 100:+.1f} %  {found['moves']} moves"
    return text


def _half(found: Mapping[str, Any]) -> float:
    half: float = (found["q3_s"] - found["q1_s"]) / 2
    return half
