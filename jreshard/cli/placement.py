"""Which dimensions of a checkpoint's tensor are sharded over which mesh axes."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

#: Axes with these names split the last dimension that they divide; all others, such as `fsdp`, split the first.
TENSOR_AXES = frozenset({"tp", "tensor", "model"})


def partition_spec(shape: Sequence[int], axes: Mapping[str, int]) -> PartitionSpec:
    """Place a tensor of `shape` on a mesh with `axes`, from its shape alone.

    A checkpoint does not say how its tensors are meant to be sharded, so one rule serves every model. The axes take
    their turns in mesh order. A tensor-parallel axis (`TENSOR_AXES`) splits the last dimension whose size it
    divides, any other axis the first one; the size is what the axes before it have left of the dimension. Over an axis
    that divides no dimension the tensor is replicated. The two directions make meshes with different axes lay the same
    tensor out differently, as training and serving do.
    """
    local = list(shape)
    split: list[tuple[str, ...]] = [()] * len(local)
    for name, size in axes.items():
        dims = range(len(local))
        for dim in reversed(dims) if name in TENSOR_AXES else dims:
            if local[dim] % size == 0:
                local[dim] //= size
                split[dim] += (name,)
                break
    return PartitionSpec(*(names or None for names in split))
