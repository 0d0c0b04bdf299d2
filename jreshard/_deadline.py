"""A point in time by which something has to be over."""

import time
from dataclasses import dataclass

_LONGEST = 1e8


@dataclass(frozen=True)
class Deadline:
    """So many seconds from now.

    Attributes:
        timeout: the seconds that there were at the beginning.
        at: `time.monotonic()` at the end.
    """

    timeout: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline that many seconds from now; at most some years, which is what clocks can take."""
        seconds = min(seconds, _LONGEST)
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds that are left; a millisecond once it has passed, so that whoever waits for it fails by itself."""
        return max(1e-3, self.at - time.monotonic())
