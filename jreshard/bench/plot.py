"""The figures as a bar chart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jreshard.bench.results import REFERENCES

_BAR = 0.8  # of the room that a case has


def save_plot(
    parts: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, Mapping[str, Any]], title: str, path: Path
) -> None:
    """Draws the rate of every contender in every case, and the ceilings, into a PNG file.

    Args:
        parts: the parts of a report, by their names.
        ceilings: those to draw as lines.
        title: what stands above.
        path: the file.
    """
    cases = {key: case["title"] for part in parts.values() for key, case in part["cases"].items()}
    rates = _rates(parts)
    # A figure with a canvas of its own leaves the caller's pyplot, backend and all, alone.
    figure = Figure(figsize=(11, 1.5 + 0.24 * max(1, len(cases)) * max(1, len(rates))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = _BAR / max(1, len(rates))
    for i, (name, of_cases) in enumerate(rates.items()):
        places = [list(cases).index(key) + (i + 0.5) * height - _BAR / 2 for key in of_cases]
        bars = axes.barh(places, list(of_cases.values()), height, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    for i, name in enumerate(name for name in REFERENCES if "bytes_per_s" in ceilings.get(name, {})):
        rate = ceilings[name]["bytes_per_s"] / 1e9
        axes.axvline(rate, color="black", linestyle=("--", ":")[i % 2], linewidth=1, label=f"{name}, {rate:.1f}")
    axes.set_yticks(range(len(cases)), list(cases.values()))
    axes.invert_yaxis()
    axes.set_xlabel("GB/s on the busiest link")
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def _rates(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """GB/s by contender and case."""
    rates: dict[str, dict[str, float]] = {}
    for label, part in parts.items():
        for key, case in part["cases"].items():
            for name, found in case["contenders"].items():
                if "bytes_per_s" in found:
                    series = f"{name}, {label}" if len(parts) > 1 else name
                    rates.setdefault(series, {})[key] = found["bytes_per_s"] / 1e9
    return rates
