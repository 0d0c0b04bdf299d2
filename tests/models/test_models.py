"""The models' figures against what their authors published, and the two forms of their weights."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jreshard import models

#: Parameters in the safetensors index of the checkpoint (llama, qwen3, deepseek and kimi without the extra tensors of
#: quantisation and multi-token prediction); for gpt-oss table 1 of arXiv:2508.10925 and the parameters of its
#: implementation in transformers.
EXACT = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "gpt-oss-120b": 116_829_156_672,
}

#: Totals that were published rounded: the name of the checkpoint, and the implementation in transformers.
ROUNDED = {"nemotron-3-ultra": (550e9, 1e9), "qwen3.8-2.4t-a95b": (2419.805e9, 0.0005e9)}

#: Tensors of the main model in the checkpoint's index, which has one an expert too.
TENSORS = {"qwen3-235b-a22b": 36_945, "deepseek-v3": 45_395}


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_every_model_has_a_published_total() -> None:
    assert set(models.names()) == EXACT.keys() | ROUNDED.keys()


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert models.num_params(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_round_to_the_published_ones(name: str) -> None:
    total, tolerance = ROUNDED[name]
    assert models.num_params(name) == pytest.approx(total, abs=tolerance, rel=0)


@pytest.mark.parametrize("name", TENSORS)
def test_one_array_a_weight_has_the_leaves_of_the_checkpoint(name: str) -> None:
    assert len(jax.tree.leaves(models.shapes(name, stacked=False))) == TENSORS[name]


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("form", [{}, {"stages": (4, 8)}, {"stacked": False}])
def test_every_form_holds_the_same_bytes_and_names_every_dim(name: str, form: Any) -> None:
    weights = models.weights(name, **form)
    structs, axes = models.shapes(weights), models.logical_axes(weights)
    assert nbytes(structs) == 2 * models.num_params(name)
    assert jax.tree.structure(structs) == jax.tree.structure(axes)
    named = {logical for logical, _ in models.DEFAULT_RULES}
    for struct, spec in zip(jax.tree.leaves(structs), jax.tree.leaves(axes), strict=True):
        assert isinstance(spec, PartitionSpec)
        assert len(spec) == struct.ndim
        assert named.issuperset(axis for axis in spec if axis is not None)


def test_weights_have_the_dtype_asked_for() -> None:
    assert {struct.dtype for struct in jax.tree.leaves(models.shapes("qwen3-32b"))} == {jnp.dtype("bfloat16")}
    assert {struct.dtype for struct in jax.tree.leaves(models.shapes("qwen3-32b", dtype="float32"))} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "nemotron-3-ultra", "deepseek-v3"])
def test_stacking_puts_layers_and_experts_in_front(name: str) -> None:
    single = {weight.shape for weight in map_leaves(models.weights(name, stacked=False))}
    for weight in map_leaves(models.weights(name)):
        extra = sum(axis in ("layers", "expert") for axis in weight.axes)
        assert set(weight.axes[:extra]) <= {"layers", "expert"}
        assert weight.shape[extra:] in single


def map_leaves(tree: Any) -> list[models.Weight]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, models.Weight))


def test_kinds_of_layers_are_stacked_apart() -> None:
    deepseek, hybrid = models.shapes("deepseek-v3"), models.shapes("nemotron-3-ultra")
    assert deepseek["dense_layers"]["mlp"]["up"].shape == (3, 7168, 18432)
    assert deepseek["moe_layers"]["mlp"]["experts"]["up"].shape == (58, 256, 7168, 2048)
    counts = {kind: hybrid[f"{kind}_layers"]["norm"].shape[0] for kind in ("mamba", "moe", "attention")}
    assert counts == {"mamba": 48, "moe": 48, "attention": 12}


def test_stages_hold_their_layers_in_order() -> None:
    assert models.stage_sizes(61, 8) == [8, 8, 8, 8, 8, 7, 7, 7]
    stages = models.weights("deepseek-v3", stages=8)["stages"]
    first, last = stages[0], stages[-1]
    assert first["dense_layers"]["mlp"]["up"].shape[0] == 3
    assert first["moe_layers"]["mlp"]["experts"]["up"].shape[0] == 5
    assert first["moe_layers"]["mlp"]["experts"]["up"].layers == (3, 8)
    assert last.keys() == {"moe_layers"}
    assert last["moe_layers"]["mixer_norm"].layers == (54, 61)


def test_two_pipelines_split_wherever_one_does() -> None:
    stages = models.weights("llama-3.1-8b", stages=(4, 3))["stages"]
    assert [stage["layers"]["mixer_norm"].layers for stage in stages] == [
        (0, 8), (8, 11), (11, 16), (16, 22), (22, 24), (24, 32)
    ]  # fmt: skip


def test_names_may_be_written_in_other_ways() -> None:
    assert models.shapes("DeepSeek_V3") == models.shapes("deepseek-v3")


def test_an_unknown_model_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="no model 'deepseek-v4': did you mean 'deepseek-v3'") as caught:
        models.shapes("deepseek-v4")
    assert all(name in str(caught.value) for name in models.names())


@pytest.mark.parametrize("stages", [0, 33, (2, 33)])
def test_stages_without_layers_are_refused(stages: Any) -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b has 32 layers; they do not make"):
        models.weights("llama-3.1-8b", stages=stages)


def test_a_weight_has_an_axis_a_dim() -> None:
    with pytest.raises(ValueError, match="expected one a dim"):
        models.Weight((2, 3), ("embed",))
