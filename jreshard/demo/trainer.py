"""The trainer: improves the policy by policy gradient on the trainer mesh."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard.demo import layout, policy, task

OPTIMIZER = optax.adam(1e-3)


class Trainer:
    """Holds the weights and the optimizer state, both split over the trainer mesh."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        abstract = policy.abstract()[1]
        self.shardings = layout.shardings(abstract, mesh)
        moments = layout.shardings(jax.eval_shape(OPTIMIZER.init, abstract), mesh)
        self.params = jax.jit(lambda: policy.initial_params(seed), out_shardings=self.shardings)()
        self._moments = jax.jit(OPTIMIZER.init, out_shardings=moments)(self.params)
        batch = NamedSharding(mesh, PartitionSpec("fsdp"))
        self._update = jax.jit(
            _update,
            in_shardings=(self.shardings, moments, batch, batch, batch),
            out_shardings=(self.shardings, moments),
            donate_argnums=(0, 1),
        )

    def update(self, prompts: task.Tokens, answers: task.Tokens, advantages: task.Rewards) -> None:
        """Make digits that did better than their group likelier, and the others less likely."""
        self.params, self._moments = jax.block_until_ready(
            self._update(self.params, self._moments, prompts, answers, advantages)
        )


def _update(
    params: policy.Params, moments: optax.OptState, prompts: jax.Array, answers: jax.Array, advantages: jax.Array
) -> tuple[policy.Params, optax.OptState]:
    gradient = jax.grad(_loss)(params, prompts, answers, advantages)
    change, moments = OPTIMIZER.update(gradient, moments, params)
    return optax.apply_updates(params, change), moments


def _loss(params: policy.Params, prompts: jax.Array, answers: jax.Array, advantages: jax.Array) -> jax.Array:
    ids = jnp.concatenate([prompts, answers[:, :-1]], axis=1)
    logits = policy.logits(params, ids)[:, task.LENGTH :]
    surprise = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    return jnp.mean(advantages * surprise)
