"""The task the policy learns: put a handful of digits in order. A few lines of NumPy check the answer exactly."""

import numpy as np
import numpy.typing as npt

DIGITS = 10
LENGTH = 6
SEPARATOR = DIGITS  # the token after which the policy writes its answer
VOCABULARY = DIGITS + 1

Tokens = npt.NDArray[np.int32]
Rewards = npt.NDArray[np.float32]


def sample_prompts(rng: np.random.Generator, count: int) -> Tokens:
    """Draw `count` prompts: LENGTH random digits, then the separator."""
    digits = rng.integers(DIGITS, size=(count, LENGTH), dtype=np.int32)
    return np.pad(digits, ((0, 0), (0, 1)), constant_values=SEPARATOR)


def score(prompts: Tokens, answers: Tokens) -> Rewards:
    """Give each answered token 1 where it is the digit that belongs there, else 0."""
    expected = np.sort(prompts[:, :LENGTH], axis=1)
    return np.where(answers == expected, np.float32(1), np.float32(0))


def advantages(rewards: Rewards, group: int) -> Rewards:
    """Compare each reward with its group's mean: `group` consecutive rows are answers to one prompt."""
    grouped = rewards.reshape(-1, group, rewards.shape[-1])
    relative: Rewards = grouped - grouped.mean(axis=1, keepdims=True)
    return relative.reshape(rewards.shape)
