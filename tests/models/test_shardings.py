"""Where the weights of a model lie on a mesh."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jreshard import models
from jreshard._layout import layout_of_sharding


class PaperDevice:
    """Enough of a device for a mesh."""

    platform = "paper"

    def __init__(self, number: int) -> None:
        self.id, self.process_index = number, 0


def paper_mesh(**axes: int) -> Mesh:
    devices = np.array([PaperDevice(i) for i in range(int(np.prod(list(axes.values()))))], object)
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def numbers(sharding: NamedSharding) -> list[int]:
    return [device.id for device in sharding.mesh.devices.flat]


def test_default_rules_place_a_mixture_of_experts() -> None:
    mesh = paper_mesh(fsdp=4, ep=2, tp=8)
    experts = models.shardings("deepseek-v3", mesh)["moe_layers"]["mlp"]["experts"]
    attention = models.shardings("deepseek-v3", mesh, stacked=False)["layers"][0]["mixer"]
    assert experts["up"].spec == P(None, "ep", "fsdp", "tp")
    assert experts["down"].spec == P(None, "ep", "tp", "fsdp")
    assert attention["q_a"].spec == P("fsdp", None)
    assert attention["q_b"].spec == P("fsdp", "tp", None)
    assert attention["o"].spec == P("tp", None, "fsdp")
    assert attention["q_a_norm"].spec == P(None)


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 16, "tp": 8},
        {"dp": 8, "tp": 4},
        {"dp": 16, "tp": 1},
        {"dp": 2, "fsdp": 8, "tp": 2},
        {"ep": 16},
        {"fsdp": 64},
    ],
)
def test_every_leaf_has_a_layout_on_the_usual_meshes(name: str, axes: dict[str, int]) -> None:
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    structs, shardings = models.shapes(name), models.shardings(name, mesh)
    assert jax.tree.structure(structs) == jax.tree.structure(shardings)
    for struct, sharding in zip(jax.tree.leaves(structs), jax.tree.leaves(shardings), strict=True):
        assert sharding.mesh.size == mesh.size
        layout_of_sharding(struct.shape, sharding)


def test_few_kv_heads_are_replicated_over_the_ranks_beyond_their_number() -> None:
    mesh = paper_mesh(dp=2, tp=8)
    mixer = models.shardings("qwen3-235b-a22b", mesh, stacked=False)["layers"][0]["mixer"]
    key = layout_of_sharding((4096, 4, 128), mixer["k"])
    assert key.parts == (1, 4, 1)
    assert key.part_of[:, 1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    query = layout_of_sharding((4096, 64, 128), mixer["q"])
    assert query.part_of[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 2
    assert mixer["k"].mesh == mixer["q"].mesh
    assert numbers(mixer["q"]) == list(range(16))


def test_heads_of_several_sizes_share_an_axis() -> None:
    """The 2 KV heads and the 8 groups of the hybrid, over 32 ranks."""
    layers = models.shardings("nemotron-3-ultra", AbstractMesh((32,), ("tp",)))
    mixers = {kind: layers[f"{kind}_layers"]["mixer"] for kind in ("attention", "mamba")}
    assert layout_of_sharding((12, 8192, 2, 128), mixers["attention"]["k"]).parts == (1, 1, 2, 1)
    assert layout_of_sharding((48, 8192, 8, 128), mixers["mamba"]["B"]).parts == (1, 1, 8, 1)
    assert layout_of_sharding((48, 8192, 256, 64), mixers["mamba"]["x"]).parts == (1, 1, 32, 1)


def test_pipeline_stages_of_uneven_length() -> None:
    mesh = paper_mesh(ep=2, pp=8)
    weights = models.weights("deepseek-v3", stages=8)
    tree = models.shardings(weights, mesh, stage_axis="pp")
    assert numbers(tree["embed"]) == [0, 8]
    assert numbers(tree["lm_head"]) == numbers(tree["final_norm"]) == [7, 15]
    for stage, layers in enumerate(tree["stages"]):
        assert {tuple(numbers(sharding)) for sharding in jax.tree.leaves(layers)} == {(stage, stage + 8)}
    assert tree["stages"][0]["moe_layers"]["mlp"]["experts"]["up"].spec == P(None, "ep", None, None)


def test_weights_for_two_pipelines_fit_both() -> None:
    weights = models.weights("llama-3.1-8b", stages=(4, 3))
    for count in (3, 4):
        tree = models.shardings(weights, paper_mesh(pp=count, tp=2), stage_axis="pp")
        ends = np.cumsum(models.stage_sizes(32, count))
        for layers, of in zip(tree["stages"], weights["stages"], strict=True):
            stage = int(np.searchsorted(ends, of["layers"]["mixer_norm"].layers[0], side="right"))
            assert numbers(layers["layers"]["mlp"]["up"]) == [2 * stage, 2 * stage + 1]


def test_pipeline_stages_of_single_layers() -> None:
    tree = models.shardings("deepseek-v3", paper_mesh(pp=8), stacked=False, stage_axis="pp")
    stages = [numbers(layer["mlp_norm"])[0] for layer in tree["layers"]]
    assert [stages.count(stage) for stage in range(8)] == models.stage_sizes(61, 8)
    assert stages == sorted(stages)


def test_single_experts_lie_on_their_expert_parallel_ranks() -> None:
    mesh = paper_mesh(pp=2, ep=4, tp=2)
    tree = models.shardings("qwen3-30b-a3b", mesh, stacked=False, stage_axis="pp")
    first, last = tree["layers"][0]["mlp"], tree["layers"][-1]["mlp"]
    assert [numbers(first["experts"][i]["up"]) for i in (0, 31, 32, 127)] == [[0, 1], [0, 1], [2, 3], [6, 7]]
    assert numbers(last["experts"][127]["up"]) == [14, 15]
    assert first["experts"][0]["up"].spec == P(None, "tp")
    assert numbers(first["router"]["kernel"]) == list(range(8))


def test_single_experts_lie_where_the_stack_of_them_has_them() -> None:
    mesh, rules = paper_mesh(ep=4, tp=2), [("expert", ("tp", "ep")), ("mlp", "tp")]
    single = models.shardings("qwen3-30b-a3b", mesh, rules, stacked=False)["layers"][0]["mlp"]["experts"]
    stack = models.shardings("qwen3-30b-a3b", mesh, rules)["layers"]["mlp"]["experts"]["up"]
    layout = layout_of_sharding((48, 128, 2048, 768), stack)
    for rank, part in enumerate(layout.part_of[:, 1].tolist()):
        assert {i for i in range(128) if rank in numbers(single[i]["up"])} == set(range(16 * part, 16 * part + 16))


def test_stacked_layers_that_divide_are_split_along_pp() -> None:
    layers = models.shardings("llama-3.1-8b", AbstractMesh((4, 2), ("pp", "tp")))["layers"]
    assert layers["mlp"]["up"].spec == P("pp", None, "tp")


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        models.shardings(*args, **options)
    return str(caught.value)


def test_a_dim_that_does_not_divide_is_named_with_what_would() -> None:
    text = refused("qwen3-32b", AbstractMesh((7,), ("tp",)))
    assert "the weights do not fit the mesh tp=7" in text
    assert (
        "heads of size 64 does not divide by tp=7; tp of 1, 2, 4, 8, 16 would: layers.mixer.o, layers.mixer.q" in text
    )
    assert "kv_heads of size 8 does not divide by tp=7; tp of 1, 2, 4, 8 would, and so would multiples of 8" in text
    assert "mlp of size 25600" in text


def test_layers_that_do_not_divide_are_refused_with_the_way_out() -> None:
    text = refused("deepseek-v3", AbstractMesh((8,), ("pp",)))
    assert "layers of size 58 does not divide by pp=8; pp of 1, 2, 29 would" in text
    assert "stages=8 and stage_axis='pp'" in text


def test_single_layers_on_a_mesh_with_stages_need_a_stage_axis() -> None:
    assert "pass stage_axis='pp' to give each" in refused("llama-3.1-8b", AbstractMesh((4,), ("pp",)), stacked=False)


def test_stages_need_devices() -> None:
    text = refused("llama-3.1-8b", AbstractMesh((4,), ("pp",)), stacked=False, stage_axis="pp")
    assert "some of the devices along 'pp', which an AbstractMesh does not have" in text


def test_single_experts_need_devices() -> None:
    text = refused("qwen3-30b-a3b", AbstractMesh((4,), ("ep",)), stacked=False)
    assert "some of the devices along 'ep', which an AbstractMesh does not have" in text


def test_experts_that_do_not_divide_are_counted_not_listed() -> None:
    text = refused("qwen3-30b-a3b", paper_mesh(ep=48), stacked=False)
    assert "128 experts does not divide by ep=48; ep of 1, 2, 4, 8, 16, 32, 64, 128 would" in text
    assert "layers.0.mlp.experts.0.down" in text
    assert " and 18428 more" in text


def test_an_unknown_stage_axis_is_refused() -> None:
    text = refused("llama-3.1-8b", paper_mesh(pp=4), stacked=False, stage_axis="stage")
    assert "stage_axis is 'stage'; the mesh has the axes pp" in text


def test_layers_of_several_stages_are_refused() -> None:
    text = refused("llama-3.1-8b", paper_mesh(pp=4), stages=2, stage_axis="pp")
    assert "layers are on several of 4 stages; stack them with stages=4" in text


def test_weights_without_layers_have_no_stage() -> None:
    text = refused({"w": models.Weight((8, 8), ("embed", "mlp"))}, paper_mesh(pp=4), stage_axis="pp")
    assert "do not say which layers they belong to" in text


def test_heads_that_cannot_share_an_axis_are_refused() -> None:
    tree = {name: models.Weight((heads,), ("kv_heads",)) for name, heads in (("a", 2), ("b", 3))}
    assert "tp=6 cannot be shared by 2 and 3 heads" in refused(tree, AbstractMesh((6,), ("tp",)))
