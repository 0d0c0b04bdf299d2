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


def failures(rewards: Sequence[float], weights_identical: bool) -> list[str]:
    """Return what keeps a run from being a success, in words; nothing if it is one."""
    start, end = start_and_end(rewards)
    found = []
    if end - start < MIN_RISE:
        found.append(f"the reward rose by {end - start:.2f}, less than {MIN_RISE}: give it more --steps")
    if not weights_identical:
        found.append("the rollout weights differ from the trainer's")
    return found


def identical(left: Any, right: Any) -> bool:
    """Say whether two trees of arrays have the same structure, shapes, types and bits."""
    structures: list[Any] = [jax.tree.structure(left), jax.tree.structure(right)]
    if structures[0] != structures[1]:
        return False
    return all(map(_same_bits, jax.tree.leaves(left), jax.tree.leaves(right)))


def _same_bits(left_array: Any, right_array: Any) -> bool:
    # Bytes rather than values: == would call NaN different from itself, and -0.0 the same as 0.0.
    left, right = np.asarray(left_array), np.asarray(right_array)
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()
