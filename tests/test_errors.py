"""Bad input is refused before anything moves, by path, with what was found; and the next call works."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from oracle import assert_holds, assert_tree_holds, cpus, mesh, named, put, values

import jreshard

P = PartitionSpec
SHAPE = (8, 12)
REFUSED = (ValueError, TypeError)


def source() -> NamedSharding:
    return named(mesh([0, 1, 2, 3], x=2, y=2), "x")


def destination() -> NamedSharding:
    return named(mesh([2, 3, 4, 5], a=2, b=2), "a")


def host_params() -> dict:
    return {"good": values(SHAPE), "layers": [{"w": values(SHAPE, seed=1), "b": values((8,), seed=2)}]}


def params_on_source() -> dict:
    return jax.tree.map(lambda value: put(value, source()), host_params())


def works() -> None:
    """The very next call is a good one."""
    moved = jreshard.transfer(params_on_source(), source(), destination())
    assert_tree_holds(moved, host_params(), destination())


def refused(*fragments: str, params, src=None, dst=None, clean: bool = True, **options) -> str:
    """The message holds all fragments, the donated source is still whole, and a good call follows."""
    src = source() if src is None else src
    dst = destination() if dst is None else dst
    alive = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
    with pytest.raises(REFUSED) as caught:
        jreshard.transfer(params, src, dst, donate=True, **options)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    if clean:
        assert "['good']" not in message, message
    assert not any(leaf.is_deleted() for leaf in alive)
    works()
    return message


# --- trees -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["src", "dst"])
def test_sharding_tree_without_a_leaf(side):
    good = source() if side == "src" else destination()
    tree = {"good": good, "layers": [{"w": good}]}
    refused("['layers'][0]", "'b'", params=params_on_source(), **{side: tree})


@pytest.mark.parametrize("side", ["src", "dst"])
def test_sharding_tree_with_a_leaf_too_many(side):
    good = source() if side == "src" else destination()
    tree = {"good": good, "layers": [{"w": good, "b": good, "typo": good}]}
    refused("['layers'][0]", "'typo'", params=params_on_source(), **{side: tree})


@pytest.mark.parametrize("side", ["src", "dst"])
def test_sharding_tree_of_other_length(side):
    good = source() if side == "src" else destination()
    refused("['layers']", params=params_on_source(), **{side: {"good": good, "layers": [good, good]}})


def test_sharding_tree_of_another_container():
    """Containers match by their keys; where the keys differ, both containers are named."""
    good = destination()
    moved = jreshard.transfer(params_on_source(), source(), {"good": good, "layers": (good,)})
    assert_tree_holds(moved, host_params(), good)
    message = refused("['layers']", params=params_on_source(), dst={"good": good, "layers": {"w": good}})
    assert "list" in message
    assert "dict" in message


def test_sharding_tree_deeper_than_the_params():
    good = destination()
    tree = {"good": {"deeper": good}, "layers": good}
    refused("['good']", params=params_on_source(), dst=tree, clean=False)


def test_all_unmapped_leaves_are_listed():
    """Not only the first one, and not only in a log."""
    params = {name: put(values((8,)), source()) for name in ("a", "b", "good")}
    dst = {"good": destination(), "x": destination(), "y": destination()}
    refused("'a'", "'b'", "'x'", "'y'", params=params, dst=dst)


def test_leaf_without_a_destination():
    params = params_on_source()
    dst = {"good": destination(), "layers": [{"w": None, "b": destination()}]}
    refused("['layers'][0]['w']", params=params, dst=dst)


# --- dims ------------------------------------------------------------------------------------------------------------


def test_dim_that_does_not_divide():
    params = {"odd": put(values((10, 8)), source())}
    dst = named(mesh([0, 1, 2], tensor=3), "tensor")
    message = refused("['odd']", "10", "3", "tensor", params=params, dst=dst)
    assert re.search(r"\bdim(ension)? 0\b", message), message


def test_dim_that_does_not_divide_over_several_axes():
    params = params_on_source() | {"odd": put(values((8, 6)), source())}
    dst = {"good": destination(), "layers": destination(), "odd": named(destination().mesh, None, ("b", "a"))}
    message = refused("['odd']", "6", "4", "'a'", "'b'", params=params, dst=dst)
    assert re.search(r"\bdim(ension)? 1\b", message), message


def test_all_dims_that_do_not_divide_are_listed():
    """Never replicated in silence instead."""
    odd = {name: put(values((2, 7)), source()) for name in ("p", "q")}
    params = params_on_source() | {"r": put(values((8, 3, 5)), source())} | odd
    dst = {"good": destination(), "layers": destination()} | dict.fromkeys("pqr", named(destination().mesh, None, "a"))
    refused("['p']", "['q']", "['r']", "7", "3", params=params, dst=dst)


def test_spec_longer_than_the_rank():
    params = params_on_source()
    dst = {"good": destination(), "layers": [{"w": destination(), "b": named(destination().mesh, "a", "b")}]}
    refused("['layers'][0]['b']", params=params, dst=dst)


def test_sharded_scalar():
    params = params_on_source() | {"step": 3}
    refused("['step']", params=params, dst={"good": destination(), "layers": destination(), "step": destination()})


# --- leaves ----------------------------------------------------------------------------------------------------------


def elsewhere(kind: str) -> NamedSharding:
    return {
        "other devices": named(mesh([4, 5, 6, 7], x=2, y=2), "x"),
        "other spec": named(source().mesh, None, "x"),
        "other order": named(mesh([1, 0, 3, 2], x=2, y=2), ("x", "y")),
        "fewer devices": named(mesh([0, 1]), "x"),
        "replicated": named(source().mesh),
    }[kind]


@pytest.mark.parametrize("kind", ["other devices", "other spec", "other order", "fewer devices", "replicated"])
def test_array_that_lies_elsewhere(kind):
    params = params_on_source() | {"moved": put(values(SHAPE), elsewhere(kind))}
    message = refused("['moved']", params=params)
    if kind == "other devices":  # equal in all but their devices: these must be told, else both sides read alike
        assert re.search(r"\b[4-7]\b", message), message


def test_array_on_one_device_that_should_be_on_four():
    params = params_on_source() | {"moved": jax.device_put(values(SHAPE), cpus()[0])}
    refused("['moved']", params=params)


def test_all_arrays_that_lie_elsewhere_are_listed():
    params = params_on_source() | {
        "p": put(values(SHAPE), elsewhere("other devices")),
        "q": put(values(SHAPE), elsewhere("other spec")),
    }
    refused("['p']", "['q']", params=params)


def test_deleted_array():
    params = params_on_source()
    params["layers"][0]["w"].delete()
    params["layers"][0]["b"].delete()
    for src in (None, source()):
        message = refused("['layers'][0]['w']", "['layers'][0]['b']", params=params, src=src)
        assert "deleted" in message


def test_source_donated_by_an_earlier_step():
    params = params_on_source()
    jax.block_until_ready(jax.jit(lambda w: w + 1, donate_argnums=0)(params["layers"][0]["w"]))
    assert "deleted" in refused("['layers'][0]['w']", params=params)


def test_placeholder_leaves():
    """A state that was made by eval_shape and never filled."""
    params = params_on_source() | {
        "p": jax.ShapeDtypeStruct((8,), jnp.float32),
        "q": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=source()),
    }
    refused("['p']", "['q']", "ShapeDtypeStruct", params=params)


@pytest.mark.parametrize("leaf", ["text", object(), b"bytes", np.array(["text"]), np.array([object()])])
def test_leaf_that_is_no_array(leaf):
    refused("['name']", params=params_on_source() | {"name": leaf})


def test_tracers():
    """Under jit there is nothing to move yet: the message must say so, not fail somewhere inside."""

    @jax.jit
    def program(params):
        return jreshard.transfer(params, source(), destination())

    with pytest.raises(REFUSED) as caught:
        program(params_on_source())
    message = str(caught.value)
    assert re.search("jit|trac", message), message
    assert "['layers'][0]['w']" in message
    works()


@pytest.mark.parametrize("transformation", ["grad", "vmap", "scan"])
def test_tracers_of_other_transformations(transformation):
    src = named(mesh([0, 1]))

    def move(w):
        return jreshard.transfer({"w": w}, src, destination())["w"].sum()

    programs = {
        "grad": jax.grad(move),
        "vmap": jax.vmap(move),
        "scan": lambda w: jax.lax.scan(lambda carry, row: (carry, move(row)), 0.0, w),
    }
    with pytest.raises(REFUSED, match=r"\['w'\]"):
        programs[transformation](put(values(SHAPE), src))
    works()


def test_faults_of_different_kinds_are_listed_together():
    params = params_on_source() | {
        "gone": put(values((8,)), source()),
        "odd": put(values((8, 7)), source()),
        "shape": jax.ShapeDtypeStruct((8,), jnp.float32),
        "elsewhere": put(values(SHAPE), elsewhere("other devices")),
        "name": "text",
    }
    params["gone"].delete()
    dst = jax.tree.map(lambda _: destination(), params) | {"odd": named(destination().mesh, "a", "b")}
    refused("['gone']", "['odd']", "['shape']", "['elsewhere']", "['name']", params=params, dst=dst)


# --- shardings -------------------------------------------------------------------------------------------------------


def names_a_spec(message: str) -> bool:
    return re.search(r"PartitionSpec|\bP\(", message) is not None


@pytest.mark.parametrize("side", ["src", "dst"])
def test_bare_partition_spec(side):
    """A spec without a mesh says on which axes, not on which devices."""
    for spec in (P("x"), P(), {"good": P("x"), "layers": P()}):
        message = refused("NamedSharding", params=params_on_source(), clean=False, **{side: spec})
        assert names_a_spec(message), message


def test_bare_partition_spec_in_a_tree_is_named():
    dst = {"good": destination(), "layers": [{"w": P("a"), "b": destination()}]}
    assert names_a_spec(refused("['layers'][0]['w']", params=params_on_source(), dst=dst))


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("wrong", ["text", "mesh", "number"])
def test_not_a_sharding(side, wrong):
    refused(params=params_on_source(), clean=False, **{side: {"text": "x", "mesh": source().mesh, "number": 4}[wrong]})


@pytest.mark.parametrize("side", ["src", "dst"])
def test_sharding_without_devices(side):
    abstract = NamedSharding(AbstractMesh((2, 2), ("x", "y")), P("x"))
    message = refused(params=params_on_source(), clean=False, **{side: abstract})
    assert re.search("AbstractMesh|device", message), message


def test_sharding_without_devices_in_a_tree_is_named():
    abstract = NamedSharding(AbstractMesh((2, 2), ("x", "y")), P("x"))
    dst = {"good": destination(), "layers": [{"w": abstract, "b": destination()}]}
    refused("['layers'][0]['w']", params=params_on_source(), dst=dst)


def unreduced_sharding() -> NamedSharding:
    explicit = mesh([2, 3, 4, 5], AxisType.Explicit, a=2, b=2)
    try:
        return NamedSharding(explicit, P("a", unreduced={"b"}))
    except (TypeError, ValueError):
        pytest.skip("this JAX has no unreduced shardings")


def test_unreduced_destination():
    dst = {"good": destination(), "layers": [{"w": unreduced_sharding(), "b": destination()}]}
    refused("['layers'][0]['w']", "unreduced", params=params_on_source(), dst=dst)


def test_unreduced_source():
    src = {"good": source(), "layers": [{"w": unreduced_sharding(), "b": source()}]}
    refused("['layers'][0]['w']", params=params_on_source(), src=src)


# --- plan ------------------------------------------------------------------------------------------------------------


def test_plan_refuses_what_transfer_refuses():
    params = params_on_source()
    odd = {"odd": put(values((8, 7)), source())}
    with pytest.raises(REFUSED, match=r"\['odd'\]"):
        jreshard.plan(params | odd, source(), named(destination().mesh, None, "a"))
    with pytest.raises(REFUSED, match="'layers'"):
        jreshard.plan(params, source(), {"good": destination()})
    with pytest.raises(REFUSED, match="NamedSharding"):
        jreshard.plan(params, source(), P("a"))
    works()


def test_plan_refuses_what_it_could_not_count():
    huge, large = (jax.ShapeDtypeStruct((1 << bits,), jnp.int8) for bits in (60, 45))
    with pytest.raises(ValueError, match=rf"params\['w'\].*it has {1 << 60} elements .*; expected {1 << 45} at most"):
        jreshard.plan({"w": huge}, source(), destination())
    with pytest.raises(ValueError, match=f"all destination shards together have .* bytes; expected {1 << 60} at most"):
        jreshard.plan({"w": [large] * (1 << 15)}, source(), destination())


def test_plan_of_shapes_without_a_place():
    shapes = {"p": jax.ShapeDtypeStruct((8,), jnp.float32), "q": jax.ShapeDtypeStruct((8,), jnp.float32)}
    with pytest.raises(REFUSED) as caught:
        jreshard.plan(shapes, None, destination())
    assert all(path in str(caught.value) for path in ("['p']", "['q']"))


def test_executed_plan_refuses_deleted_arrays():
    params = params_on_source()
    plan = jreshard.plan(params, source(), destination())
    params["layers"][0]["w"].delete()
    with pytest.raises(REFUSED, match=re.escape("['layers'][0]['w']")):
        plan.execute(params)
    assert_tree_holds(plan.execute(params_on_source()), host_params(), destination())


# --- options and transforms ------------------------------------------------------------------------------------------


def test_options_that_make_no_sense():
    src, dst = source(), destination()
    params = params_on_source()
    with pytest.raises(TypeError, match=r"dtype is 'bf16'; expected a floating dtype, such as jnp\.bfloat16"):
        jreshard.transfer(params, src, dst, dtype="bf16")
    with pytest.raises(TypeError, match=r"transform is 3; expected a function from params"):
        jreshard.transfer(params, src, dst, transform=3)
    works()


def test_faults_of_what_transform_makes():
    src, dst = source(), destination()
    name = next(iter(params_on_source()))
    with pytest.raises(ValueError, match=r"transform\(params\)\['fused'\]: is missing in dst_sharding"):
        jreshard.transfer(params_on_source(), src, {name: dst}, transform=lambda tree: {"fused": tree[name]})
    works()


# --- after many errors -----------------------------------------------------------------------------------------------


def test_a_hundred_errors_in_a_row():
    """A refused call leaves nothing behind that a later one trips over."""
    params, dst = params_on_source(), named(mesh([0, 1, 2]), "x")
    for _ in range(100):
        with pytest.raises(REFUSED):
            jreshard.transfer(params, source(), dst)
    moved = jreshard.transfer(params["good"], source(), destination())
    assert_holds(moved, host_params()["good"], destination())
