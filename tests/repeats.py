"""How often tests repeat what must not wear out."""

import os

#: Set to anything to repeat as often as a long job would; it takes minutes.
LONG = "JRESHARD_LONG_TESTS"


def repeats(usual: int, long: int) -> int:
    """`usual`, or `long` where the environment asks for long tests."""
    return long if os.environ.get(LONG) else usual
