"""What makes a run a success: a reward well above its start, and the same weights in every bit on both meshes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

#: One step's reward is noisy; its start and end are means of this many.
WINDOW = 5
#: Guessing digits earns 0.1 and perfect answers 1, so no lucky streak climbs this far.
MIN_RISE = 0.5


def start_and_end(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean reward of the first steps and of the last ones."""
    return float(np.mean(rewards[:WINDOW])), float(np.mean(rewards[-WINDOW:]))


def rose(rewards: Sequence[float]) -> bool:
    """Say whether the reward ended well above its start."""
    start, end = start_and_end(rewards)
    return end - start >= MIN_RISE


def identical(left: Any, right: Any) -> bool:
    """Say whether two trees of arrays have the same structure, shapes, types and bits."""
    left_leaves, left_structure = jax.tree.flatten(left)
    right_leaves, right_structure = jax.tree.flatten(right)
    return bool(left_structure == right_structure) and all(map(_same_bits, left_leaves, right_leaves))


def _same_bits(left_array: Any, right_array: Any) -> bool:
    # Bytes rather than values: == would call NaN different from itself, and -0.0 the same as 0.0.
    left, right = np.asarray(left_array), np.asarray(right_array)
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()
