"""Where the weights lie: a trainer mesh split fsdp x tp and a rollout mesh split tp."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TRAINER_AXES = {"fsdp": 2, "tp": 2}
ROLLOUT_AXES = {"tp": 2}

#: Mesh axis of each logical axis that the policy's weights name; a mesh without that axis keeps the dimension whole.
RULES = {"embed": "fsdp", "heads": "tp", "hidden": "tp", "digits": "tp"}


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return the sharding on `mesh` of every NNX variable in `tree`; other leaves are replicated."""

    def sharding(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, PartitionSpec())
        mesh_axes = [RULES.get(axis) for axis in leaf.get_metadata("axes", ())]
        spec = PartitionSpec(*(axis if axis in mesh.axis_names else None for axis in mesh_axes))
        return leaf.replace(NamedSharding(mesh, spec))

    return jax.tree.map(sharding, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
