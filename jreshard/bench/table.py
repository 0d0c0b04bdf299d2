"""The figures as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from jreshard.bench.cases import amount
from jreshard.bench.config import CEILINGS, SLOWDOWN

_NAME_WIDTH = 32


def as_text(figures: Mapping[str, Any], unit: str) -> str:
    """A few lines about one unit of the figures that `conclude` made."""
    return "\n".join(_lines(figures, unit))


def _lines(figures: Mapping[str, Any], unit: str) -> Iterator[str]:
    if unit in figures["cases"]:
        yield from _case(figures["cases"][unit])
    elif unit == CEILINGS:
        for name, found in figures[CEILINGS].items():
            yield f"{name:{_NAME_WIDTH}}{found.get('error') or _ceiling(found)}"
    elif slowdown := figures.get(SLOWDOWN):
        yield "matrix products meanwhile"
        for name, found in slowdown.items():
            yield f"  {name:{_NAME_WIDTH - 2}}{found.get('error') or _slowed(found)}"


def _ceiling(found: Mapping[str, Any]) -> str:
    return f"{_ms(found)}  {found['bytes_per_s'] / 1e9:7.1f} GB/s, {amount(found['bytes'])}"


def _case(case: Mapping[str, Any]) -> Iterator[str]:
    if "error" in case:
        yield f"given up: {case['error']}"
        return
    ideal = "".join(f", {seconds * 1e3:.2f} ms at {name}" for name, seconds in case["ideal_s"].items())
    yield f"{case['title']}: {amount(case['bytes_busiest_direction'])} in the busiest direction{ideal}"
    for name, found in case["contenders"].items():
        yield f"  {name:{_NAME_WIDTH - 2}}{found.get('error') or _figures(found)}"


def _figures(found: Mapping[str, Any]) -> str:
    text = f"{_ms(found)}  {found['bytes_per_s'] / 1e9:7.1f} GB/s"
    text += "".join(f"  {share:.3f} of {name}" for name, share in found["of"].items())
    if "times_device_put" in found:
        text += f"  {found['times_device_put']:.1f} x device_put"
    if "of_one_process" in found:
        text += f"  {found['of_one_process']:.2f} of one process"
    if found.get("extra_bytes") is not None:
        text += f"  extra memory {amount(found['extra_bytes'])}"
    if found.get("taken_outside_jax_bytes"):
        text += f", {amount(abs(found['taken_outside_jax_bytes']))} outside JAX's"
    return text


def _slowed(found: Mapping[str, Any]) -> str:
    text = _ms(found)
    if "slowed_by" in found:
        text += f"  {found['slowed_by'] * 100:+.1f} %  {found['moves']} moves"
    return text


def _ms(found: Mapping[str, Any]) -> str:
    half = (found["q3_s"] - found["q1_s"]) / 2
    return f"{found['median_s'] * 1e3:10.2f} ms ± {half * 1e3:6.2f}"
