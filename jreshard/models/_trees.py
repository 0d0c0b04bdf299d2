"""Trees of a model's weights in its two forms, and what is read off them."""

import math
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jreshard.models._registry import model
from jreshard.models._weights import Weight, is_weight, stacked_tree, unstacked_tree, weights_of


def weights(name: str, *, stacked: bool = True, stages: int | Collection[int] = 1) -> dict[str, Any]:
    """The weights of the model called `name`, as a tree of `Weight`s. Nothing is allocated.

    Args:
        name: one of `names()`.
        stacked: as training frameworks hold them: layers of a kind stacked along a leading dim `layers`, experts along
            a dim `expert`. Otherwise one array a weight: DeepSeek-V3 then has 45,395.
        stages: for stacked weights, into how many pipeline stages the layers are split: each stage's layers are
            stacked apart, so that the stages need not have equally many. Several numbers, such as those of two
            pipelines, split wherever one of them does.

    Raises:
        ValueError: there is no such model, or it has fewer layers than `stages`.

    Example:
        >>> weights("llama-3.1-8b")["layers"]["mlp"]["up"].shape
        (32, 4096, 14336)
        >>> weights("llama-3.1-8b", stacked=False)["layers"][0]["mlp"]["up"].shape
        (4096, 14336)
    """
    found = model(name)
    counts = [stages] if isinstance(stages, int) else sorted(stages)
    for count in counts:
        if not 1 <= count <= found.depth:
            raise ValueError(f"{found.name} has {found.depth} layers; they do not make {count} pipeline stages")
    return stacked_tree(found, counts) if stacked else unstacked_tree(found)


def shapes(of: Any, *, stacked: bool = True, stages: int | Collection[int] = 1, dtype: Any = jnp.bfloat16) -> Any:
    """A tree of `jax.ShapeDtypeStruct`s: for `jreshard.plan`, without an array.

    Args:
        of: a model's name, or a tree of `Weight`s; `stacked` and `stages` are then without effect.
        stacked: see `weights`.
        stages: see `weights`.
        dtype: of every weight.

    Example:
        >>> shapes("qwen3-32b")["embed"]
        ShapeDtypeStruct(shape=(151936, 5120), dtype=bfloat16)
    """

    struct = cache(partial(jax.ShapeDtypeStruct, dtype=dtype))
    return map_weights(lambda weight: struct(weight.shape), weights_tree(of, stacked, stages))


def logical_axes(of: Any, *, stacked: bool = True, stages: int | Collection[int] = 1) -> Any:
    """A tree of `PartitionSpec`s of logical axes, as `flax.linen.get_partition_spec` returns.

    Args:
        of: a model's name, or a tree of `Weight`s; `stacked` and `stages` are then without effect.
        stacked: see `weights`.
        stages: see `weights`.

    Example:
        >>> logical_axes("qwen3-32b")["embed"]
        P('vocab', 'embed')
    """
    return map_weights(lambda weight: PartitionSpec(*weight.axes), weights_tree(of, stacked, stages))


def num_params(of: Any) -> int:
    """How many parameters a model, or a tree of `Weight`s, has.

    Example:
        >>> num_params("llama-3.1-8b")
        8030261248
    """
    return sum(math.prod(weight.shape) for weight in weights_of(weights_tree(of, True, 1)))


def num_layers(name: str) -> int:
    """How many layers the model called `name` has.

    Example:
        >>> num_layers("deepseek-v3")
        61
    """
    return model(name).depth


def source(name: str) -> str:
    """Where the figures of the model called `name` were published: its checkpoint, and its paper.

    Example:
        >>> source("deepseek-v3")
        'deepseek-ai/DeepSeek-V3; arXiv:2412.19437'
    """
    return model(name).source


def weights_tree(of: Any, stacked: bool, stages: int | Collection[int]) -> Any:
    """The weights of a model, or `of` itself if it is a tree of them."""
    return weights(of, stacked=stacked, stages=stages) if isinstance(of, str) else of


def map_weights(function: Callable[[Weight], Any], tree: Any) -> Any:
    """The tree with every weight replaced by what `function` returns for it."""
    return jax.tree.map(function, tree, is_leaf=is_weight)
