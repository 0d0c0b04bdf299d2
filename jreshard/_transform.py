"""The caller's transform, as a compiled program on the source mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from jreshard._leaves import LeafErrors, paths_of
from jreshard._sources import Source, named_sharding

Transform = Callable[[Any], Any]


def cast_floating(dtype: Any, target: Any) -> Any:
    """What `dtype` becomes under `transfer(dtype=target)`: floating dtypes are cast, all others stay."""
    return jnp.dtype(target) if target is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


class SourceTransform:
    """`transform`, then the cast to `dtype`, fused in one program over the devices where the tree lies.

    Args:
        transform: a traceable function from the tree to the tree that is to arrive.
        tree: the tree, of arrays or `ShapeDtypeStruct`s with shardings, and numbers.
        sources: what each leaf of `tree` is.
        dtype: the dtype of floating leaves, or `None`.

    Attributes:
        sources: what each leaf of the transformed tree is; XLA chose its sharding.
        out_info: the transformed tree, of abstract leaves.
    """

    def __init__(self, transform: Transform, tree: Any, sources: Sequence[Source], dtype: Any) -> None:
        leaves, treedef = jax.tree.flatten(tree)

        def run(*leaves: Any) -> Any:
            out = transform(jax.tree.unflatten(treedef, leaves))
            return jax.tree.map(lambda x: jnp.asarray(x).astype(cast_floating(jnp.asarray(x).dtype, dtype)), out)

        args = [
            leaf
            if source.sharding is None
            else jax.ShapeDtypeStruct(source.shape, source.dtype, sharding=source.sharding)
            for leaf, source in zip(leaves, sources, strict=True)
        ]
        lowered = jax.jit(run).lower(*args)
        compiled = lowered.compile()
        self.out_info = lowered.out_info
        outs = jax.tree.leaves(self.out_info)
        shardings = jax.tree.leaves(compiled.output_shardings)
        self.sources: list[Source | None] = [
            Source(tuple(out.shape), out.dtype, named) if (named := named_sharding(sharding)) else None
            for out, sharding in zip(outs, shardings, strict=True)
        ]
        self._run = compiled

    def check(self, errors: LeafErrors) -> None:
        """Notes leaves of the result whose placement cannot be planned."""
        for path, source in zip(paths_of(self.out_info), self.sources, strict=True):
            if source is None:
                errors.add(path, "XLA gave it no NamedSharding; constrain it with jax.lax.with_sharding_constraint")

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """The leaves of the transformed tree."""
        # Numbers among the leaves come from the host, as the caller put them there.
        with jax.transfer_guard("allow"):
            return jax.tree.leaves(self._run(*leaves))


def device_sets(sources: Sequence[Source]) -> set[frozenset[Any]]:
    """The different sets of devices on which the leaves lie."""
    return {frozenset(s.sharding.device_set) for s in sources if isinstance(s.sharding, NamedSharding)}
