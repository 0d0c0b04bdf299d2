"""Wall-clock times of ways to do the same work."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work`, ready on its devices, and the seconds that it took."""
    start = time.perf_counter()
    result = work()
    jax.block_until_ready(result)
    return result, time.perf_counter() - start


def median_seconds(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median time of each of `ways`; they take turns, so that a busy spell of the machine hits them all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(timed(way)[1])
    return {name: statistics.median(times) for name, times in seconds.items()}
