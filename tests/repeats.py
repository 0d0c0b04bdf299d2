"""How often tests repeat what must not wear out, and how they tell whether it does."""

import os
import time

import jax

#: Set to anything to repeat as often as a long job would; it takes minutes.
LONG = "JRESHARD_LONG_TESTS"


def repeats(usual: int, long: int) -> int:
    """`usual`, or `long` where the environment asks for long tests."""
    return long if os.environ.get(LONG) else usual


def clock() -> float:
    """Seconds, to tell whether calls get slower: the process's own where nothing but processors works for it.

    Other work on the machine is not drift; nor, there, is waiting.
    """
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()
