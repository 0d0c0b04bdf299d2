"""The policy: a small causal transformer in Flax NNX, whose weights name the logical axis of each dimension."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jreshard.demo import task

Params = nnx.State[Any, Any]

EMBED = 64
HEADS = 4
HIDDEN = 4 * EMBED
BLOCKS = 2
CONTEXT = 2 * task.LENGTH  # digits, separator, answer; the answer's last digit is written but never read


class Attention(nnx.Module):
    """Causal self-attention; tensor parallelism splits its heads."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        split = (HEADS, EMBED // HEADS)
        self.qkv = nnx.LinearGeneral(
            EMBED, (3, *split), use_bias=False, kernel_init=_init("embed", None, "heads", None), rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            split, EMBED, axis=(-2, -1), use_bias=False, kernel_init=_init("heads", None, "embed"), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix each position with those before it."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, HIDDEN, use_bias=False, kernel_init=_init("embed", "hidden"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, EMBED, use_bias=False, kernel_init=_init("hidden", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Add the attention's and the MLP's output to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Policy(nnx.Module):
    """Maps token ids [batch, length] to next-digit logits [batch, length, DIGITS]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # Tables of a dozen rows stay whole: splitting them along "embed" would only fight with the batch over fsdp.
        self.tokens = nnx.Embed(task.VOCABULARY, EMBED, embedding_init=_init(None, None), rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, EMBED, embedding_init=_init(None, None), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, task.DIGITS, use_bias=False, kernel_init=_init("embed", "digits"), rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Score every digit as the continuation of each position."""
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _init(*axes: str | None) -> Any:
    return nnx.with_metadata(nnx.initializers.lecun_normal(), axes=axes)


def initial_params(seed: int) -> Params:
    """Weights of a fresh policy."""
    return nnx.split(Policy(nnx.Rngs(seed)))[1]


@functools.cache
def abstract() -> tuple[nnx.GraphDef[Policy], Params]:
    """Structure of the policy, and its weights as shapes without memory."""
    return nnx.split(nnx.eval_shape(lambda: Policy(nnx.Rngs(0))))


def logits(params: Params, ids: jax.Array) -> jax.Array:
    """Run the policy with `params` on token ids."""
    return nnx.merge(abstract()[0], params)(ids)
