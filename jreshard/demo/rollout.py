"""The rollout worker: writes answers with the weights it was last sent, on the rollout mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jreshard
from jreshard.demo import layout, policy, task


class Rollout:
    """Holds the rollout copy of the weights and samples from it."""

    def __init__(self, mesh: Mesh) -> None:
        self.shardings = layout.shardings(policy.abstract()[1], mesh)
        self.params: policy.Params | None = None
        replicated = NamedSharding(mesh, PartitionSpec())
        self._sample = jax.jit(_sample, in_shardings=(self.shardings, replicated, replicated), out_shardings=replicated)

    def refit(self, params: policy.Params) -> None:
        """Take the trainer's weights. The first call allocates; later ones write over the weights held before."""
        self.params = jax.block_until_ready(jreshard.transfer(params, None, self.shardings, into=self.params))

    def generate(self, prompts: task.Tokens, seed: np.uint32) -> task.Tokens:
        """Sample one answer to each prompt, digit by digit."""
        return np.asarray(self._sample(self.params, prompts, seed))


def _sample(params: policy.Params, prompts: jax.Array, seed: jax.Array) -> jax.Array:
    key = jax.random.key(seed)

    # The whole context runs again for every digit. At a dozen tokens a key-value cache would save little.
    def write_digit(index: jax.Array, answers: jax.Array) -> jax.Array:
        ids = jnp.concatenate([prompts, answers[:, :-1]], axis=1)
        logits = policy.logits(params, ids)[:, task.LENGTH + index]
        return answers.at[:, index].set(jax.random.categorical(jax.random.fold_in(key, index), logits))

    blank = jnp.zeros_like(prompts[:, : task.LENGTH])
    answers: jax.Array = jax.lax.fori_loop(0, task.LENGTH, write_digit, blank)
    return answers
