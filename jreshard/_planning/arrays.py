"""What NumPy has not, or not as quickly."""

from collections.abc import Sequence

import numpy as np


def among(values: np.ndarray, few: Sequence[int] | np.ndarray) -> np.ndarray:
    """`np.isin`, which is slow where there is next to nothing to do."""
    found: np.ndarray = values == few[0] if len(few) == 1 else np.isin(values, few)
    return found


def largest(values: np.ndarray) -> int:
    """The largest of whole numbers that are not negative; 0 of none."""
    return int(np.max(values)) if values.size else 0


def ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """`first[0], first[0]+1, … first[0]+count[0]-1, first[1], …`."""
    ends = np.cumsum(count)
    places: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count - first, count)
    return places
