"""The loop: generate on the rollout mesh, check the answers, update on the trainer mesh, refit."""

import time
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

import jreshard
from jreshard.demo import task
from jreshard.demo.rollout import Rollout
from jreshard.demo.trainer import Trainer

PROMPTS = 64  # in a step
GROUP = 8  # answers to each prompt


@dataclass(frozen=True)
class Step:
    """The mean reward of a step's answers, and how long the refit after it took."""

    reward: float
    refit_seconds: float


class Loop:
    """A trainer and a rollout worker on meshes of their own; what passes between them is NumPy and refits."""

    def __init__(self, trainer_mesh: Mesh, rollout_mesh: Mesh, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.trainer = Trainer(trainer_mesh, seed)
        self.rollout = Rollout(rollout_mesh)
        self.plan = jreshard.plan(self.trainer.params, self.trainer.shardings, self.rollout.shardings)
        self.rollout.refit(self.trainer.params)

    def step(self) -> Step:
        """Answer prompts, learn from the rewards, and send the new weights to the rollout mesh."""
        prompts = np.repeat(task.sample_prompts(self._rng, PROMPTS), GROUP, axis=0)
        answers = self.rollout.generate(prompts, self._rng.integers(2**32, dtype=np.uint32))
        rewards = task.score(prompts, answers)
        self.trainer.update(prompts, answers, task.advantages(rewards, GROUP))
        start = time.perf_counter()
        self.rollout.refit(self.trainer.params)
        return Step(reward=float(rewards.mean()), refit_seconds=time.perf_counter() - start)
