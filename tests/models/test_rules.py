"""Rules from logical axes to mesh axes."""

import pytest
from flax.linen import logical_to_mesh_axes
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

from jreshard import models

MESH_AXES = ("fsdp", "tp", "ep", "pp")
LOGICAL = ("embed", "mlp", "heads", "vocab", "expert")

targets = st.none() | st.sampled_from(MESH_AXES) | st.permutations(MESH_AXES).map(lambda axes: tuple(axes[:2]))


@given(
    axes=st.lists(st.sampled_from(LOGICAL), unique=True, max_size=4).flatmap(
        lambda names: st.permutations([*names, None])
    ),
    rules=st.lists(st.tuples(st.sampled_from(LOGICAL), targets), max_size=8),
)
def test_rules_apply_as_in_flax(axes: list[str | None], rules: list[models.Rule]) -> None:
    ours = models.mesh_axes_of(tuple(axes), rules, MESH_AXES)
    flax = PartitionSpec(*logical_to_mesh_axes(axes, rules))
    assert PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in ours)) == flax


@pytest.mark.parametrize(
    ("rules", "mesh_axes", "expected"),
    [
        ([("embed", "fsdp")], ("tp",), ()),
        ([("embed", ("fsdp", "dp"))], ("dp",), ("dp",)),
        ([("embed", "fsdp"), ("embed", "tp")], ("tp",), ("tp",)),  # the first rule names no axis of this mesh
        ([("embed", None), ("embed", "tp")], ("tp",), ()),  # the first rule says: whole
    ],
)
def test_mesh_axes_that_are_not_there_are_passed_over(
    rules: list[models.Rule], mesh_axes: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert models.mesh_axes_of(("embed",), rules, mesh_axes) == [expected]


def test_an_unknown_mesh_axis_is_refused() -> None:
    mesh = AbstractMesh((2, 4), ("fsdb", "tp"))
    with pytest.raises(
        ValueError, match=r"mesh axis 'fsdb' \(did you mean 'fsdp'\?\); the rules name ep, fsdp, pp, tp"
    ):
        models.shardings("llama-3.1-8b", mesh)


def test_a_rule_for_an_unknown_logical_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no logical axis 'head' \(did you mean 'heads'"):
        models.shardings("llama-3.1-8b", AbstractMesh((4,), ("tp",)), [("head", "tp")])
