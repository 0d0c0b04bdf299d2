"""The caller's transform, as a compiled program on the source mesh."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import keystr

from jreshard._control import MismatchError
from jreshard._deadline import Deadline
from jreshard._leaves import LeafErrors, paths_of
from jreshard._runtime.announce import shardings_as_json, shardings_from_json
from jreshard._runtime.differences import name_differences
from jreshard._runtime.digest import digest
from jreshard._runtime.party import Party
from jreshard._sources import Source, lies_elsewhere, named_sharding

Transform = Callable[[Any], Any]


def cast_floating(dtype: Any, target: Any) -> Any:
    """What `dtype` becomes under `transfer(dtype=target)`: floating dtypes are cast, all others stay."""
    return jnp.dtype(target) if target is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


class SourceTransform:
    """`transform`, then the cast to `dtype`, fused in one program over the devices where the tree lies.

    XLA chooses how the result lies. A process without any of these devices cannot compile the program, and is told: all
    processes of the party then have to make this object together.

    Args:
        transform: a traceable function from the tree to the tree that is to arrive.
        tree: the tree, of arrays or `ShapeDtypeStruct`s with shardings, and numbers.
        sources: what each leaf of `tree` is.
        dtype: the dtype of floating leaves, or `None`.
        party: the processes that take part in the transfer.
        timeout: seconds in which the others have to come, where one is told.

    Attributes:
        sources: what each leaf of the transformed tree is; `None` where XLA gave it no `NamedSharding`.
        out_info: the transformed tree, of abstract leaves.

    Raises:
        PeerTimeout: another process has not come in time.
        RuntimeError: another process could not trace or compile it.
        MismatchError: it makes different trees in the processes.
    """

    def __init__(
        self,
        transform: Transform,
        tree: Any,
        sources: Sequence[Source],
        dtype: Any,
        party: Party,
        timeout: float,
    ) -> None:
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
        self._run: Callable[..., Any] | None = None

        def compile_here() -> list[NamedSharding | None]:
            with jax.disable_jit(False):
                lowered = jax.jit(run).lower(*args)
                self._run = lowered.compile()
            self.out_info = lowered.out_info
            return [named_sharding(sharding) for sharding in jax.tree.leaves(self._run.output_shardings)]

        def work_out() -> dict[str, Any] | None:
            if not any(lies_elsewhere(source.sharding) for source in sources):
                return shardings_as_json(compile_here())
            self.out_info = jax.eval_shape(run, *args)
            return None

        self._party = None if _all_have_some(party, sources) else party
        if self._party is None:
            shardings = compile_here()
        else:
            self._what = f"transform of {len(leaves)} leaves"
            self._told = self._tell(self._party, work_out, Deadline.after(timeout))
            shardings = shardings_from_json(self._told)
        outs = jax.tree.leaves(self.out_info)
        self.sources: list[Source | None] = [
            None if sharding is None else Source(tuple(out.shape), out.dtype, sharding)
            for out, sharding in zip(outs, shardings, strict=True)
        ]

    def _tell(self, party: Party, known: Callable[[], Any], deadline: Deadline) -> dict[str, Any]:
        """What the processes that know tell of the result's shardings, if all make the same tree."""

        def tell() -> dict[str, Any]:
            told = known()
            return {"tree": self._tree, "shardings": told}

        said = party.all_or_none(self._what, tell, deadline)
        trees = {process: f"a tree with the fingerprint {answer['tree']}" for process, answer in said.items()}
        if len(set(trees.values())) > 1:
            error = MismatchError("transform makes different trees in the processes", trees)
            raise name_differences(error, self._lines(), party, deadline)
        told: dict[str, Any] = next(answer["shardings"] for answer in said.values() if answer["shardings"] is not None)
        return told

    @cached_property
    def _tree(self) -> str:
        """A fingerprint of the result's leaves; on the way of every transfer."""
        return digest("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        """Each leaf of the result in a line."""
        found = jax.tree_util.tree_flatten_with_path(self.out_info)[0]
        return [f"{keystr(path)}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in found]

    def lies_as_told(self, timeout: float) -> bool:
        """Whether the result lies as it did when this object was made.

        All processes have to ask when they use a plan again: one of them may have lost its plan, and be told meanwhile.
        """
        if self._party is None:
            return True
        known = None if self._run is None else self._told
        return self._tell(self._party, lambda: known, Deadline.after(timeout)) == self._told

    def check(self, errors: LeafErrors) -> None:
        """Notes leaves of the result whose placement cannot be planned."""
        for path, source in zip(paths_of(self.out_info), self.sources, strict=True):
            if source is None:
                errors.add(path, "XLA gave it no NamedSharding; constrain it with jax.lax.with_sharding_constraint")

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the transformed tree; abstract ones in a process without source devices."""
        if self._run is None:
            return jax.tree.leaves(self.out_info)
        # Numbers among the leaves come from the host, as the caller put them there.
        with jax.transfer_guard("allow"):
            return jax.tree.leaves(self._run(*leaves))


def _all_have_some(party: Party, sources: Sequence[Source]) -> bool:
    """Whether each process of the party has source devices, or the party is this process alone."""
    devices: Any = [device for source in sources if source.sharding for device in source.sharding.device_set]
    return party.alone or {device.process_index for device in devices}.issuperset(party.processes)


def device_sets(sources: Sequence[Source]) -> set[frozenset[Any]]:
    """The different sets of devices on which the leaves lie."""
    return {frozenset(s.sharding.device_set) for s in sources if isinstance(s.sharding, NamedSharding)}
