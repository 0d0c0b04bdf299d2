"""The picture of a run: reward and refit time by step."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from jreshard.demo import task
from jreshard.demo.loop import Step


def save_plot(steps: Sequence[Step], megabytes: float, path: Path) -> None:
    """Draw the reward of every step above the time of its refit, into a PNG file."""
    # A figure with a canvas of its own leaves the caller's pyplot, backend and all, alone.
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, refit_axes = figure.subplots(2, 1, sharex=True)
    numbers = range(1, len(steps) + 1)
    refit_ms = [1e3 * step.refit_seconds for step in steps]
    median = statistics.median(refit_ms)

    reward_axes.set_title(f"Sorting {task.LENGTH} digits by policy gradient")
    reward_axes.plot(numbers, [step.reward for step in steps], color="tab:blue", label="sampled answers")
    reward_axes.axhline(1 / task.DIGITS, color="gray", linestyle="--", linewidth=1, label="guessing")
    reward_axes.set_ylabel("reward (share of digits right)")
    reward_axes.set_ylim(0, 1.02)
    reward_axes.legend(loc="center right")

    refit_axes.set_title(f"Refit of the rollout weights, {megabytes:.2f} MB between devices")
    refit_axes.plot(numbers, refit_ms, ".", color="tab:orange", label="each refit")
    refit_axes.axhline(median, color="gray", linestyle="--", linewidth=1, label=f"median, {median:.1f} ms")
    refit_axes.set_ylabel("refit time (ms)")
    refit_axes.set_yscale("log")  # a step during which the machine was busy must not flatten all the others
    refit_axes.yaxis.set_major_formatter(LogFormatter())
    refit_axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    refit_axes.legend(loc="upper right")
    refit_axes.set_xlabel("step")

    for axes in (reward_axes, refit_axes):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
