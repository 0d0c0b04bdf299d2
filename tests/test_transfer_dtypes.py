"""Every element type, size and memory kind that JAX can hold, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import (
    SUB_BYTE_BITS,
    assert_holds,
    assert_tree_holds,
    cpus,
    mesh,
    named,
    put,
    raw_bytes,
    values,
    wrapped_keys,
)

import jreshard

ROUNDS = 3
DTYPES = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]
FLOAT8 = sorted(name for name in dir(jnp) if name.startswith("float8_"))
SUB_BYTE = sorted(name for name in SUB_BYTE_BITS if hasattr(jnp, name))
UNUSABLE = ["int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"]
WIDE = ["int64", "uint64", "float64", "complex128"]
KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}

# Shape, source spec, destination spec. The odd sizes put the edges of four-bit boxes inside bytes.
LEAVES = {
    "matrix": ((8, 12), ("x", "y"), ("y", "x")),
    "rows to columns": ((6, 10), ("x",), (None, "x")),
    "columns to rows, odd": ((4, 6), (None, "x"), ("y",)),
    "odd, replicated": ((3, 5), (), ()),
    "odd inner": ((4, 3, 2), (None, None, "x"), ("y", None, None)),
    "vector": ((12,), (("x", "y"),), ("x",)),
    "scalar": ((), (), ()),
    "empty": ((0, 4), (None, "x"), ("y",)),
}


def layouts():
    src, dst = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    src_shardings = {label: named(src, *spec) for label, (_, spec, _) in LEAVES.items()}
    dst_shardings = {label: named(dst, *spec) for label, (_, _, spec) in LEAVES.items()}
    return src_shardings, dst_shardings


def backend_holds(dtype) -> bool:
    try:
        return bool(
            np.array_equal(raw_bytes(jax.device_put(values((4,), dtype), cpus()[0])), raw_bytes(values((4,), dtype)))
        )
    except jax.errors.JaxRuntimeError:
        return False


def move_three_times(dtype) -> None:
    src_shardings, dst_shardings = layouts()
    for seed in range(ROUNDS):
        host = {label: values(shape, dtype, seed=10 * seed) for label, (shape, _, _) in LEAVES.items()}
        params = jax.tree.map(put, host, src_shardings)
        moved = jreshard.transfer(params, src_shardings, dst_shardings)
        assert_tree_holds(moved, host, dst_shardings)
        assert_tree_holds(params, host, src_shardings)


@pytest.mark.parametrize("name", DTYPES + FLOAT8)
def test_dtype(name):
    move_three_times(jnp.dtype(name))


@pytest.mark.parametrize("name", SUB_BYTE)
def test_sub_byte_dtype(name):
    dtype = jnp.dtype(getattr(jnp, name))
    if not backend_holds(dtype):
        pytest.skip(f"this backend has no {name}")
    move_three_times(dtype)


@pytest.mark.parametrize("name", UNUSABLE)
def test_dtype_that_xla_cannot_compute_with_is_refused(name):
    if not hasattr(jnp, name):
        pytest.skip(f"this jax has no {name}")
    struct = jax.ShapeDtypeStruct((4,), jnp.dtype(getattr(jnp, name)))
    on = named(mesh([0]))
    with pytest.raises(TypeError, match=rf"\['w'\].*{name}"):
        jreshard.plan({"w": struct}, on, on)


@pytest.mark.parametrize("name", WIDE)
def test_wide_dtype(name):
    with jax.enable_x64(True):
        move_three_times(jnp.dtype(name))


def test_wide_array_where_x64_is_off():
    """The array exists, so it moves as it is or is refused: it never loses bits silently."""
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), None, "x")
    value = values((4, 6), np.float64)
    with jax.enable_x64(True):
        source = put(value, src)
    try:
        moved = jreshard.transfer({"wide": source}, src, dst)
    except (TypeError, ValueError) as error:
        assert "['wide']" in str(error)  # noqa: PT017
    else:
        assert_holds(moved["wide"], value, dst)


def test_mixed_dtypes_in_one_tree():
    src, dst = named(mesh([0, 1]), "x"), named(mesh([1, 2]), None, "x")
    names = [*DTYPES, *FLOAT8, "int4", "uint4"]
    for seed in range(ROUNDS):
        host = {name: values((6, 10), jnp.dtype(name), seed=seed) for name in names}
        params = jax.tree.map(lambda value: put(value, src), host)
        assert_tree_holds(jreshard.transfer(params, src, dst), host, dst)


@pytest.mark.parametrize("impl", KEY_WORDS)
def test_keys(impl):
    src, dst = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    shapes = {"one": (), "row": (4,), "grid": (4, 8), "none": (0, 4)}
    src_shardings = {"one": named(src), "row": named(src, ("x", "y")), "grid": named(src, "x", "y"), "none": named(src)}
    dst_shardings = {"one": named(dst), "row": named(dst, "y"), "grid": named(dst, None, ("y", "x"))}
    dst_shardings["none"] = named(dst, "x", "y")
    for seed in range(ROUNDS):
        data = {label: values((*shape, KEY_WORDS[impl]), np.uint32, seed=seed) for label, shape in shapes.items()}
        keys = {label: put(wrapped_keys(data[label], impl), src_shardings[label]) for label in shapes}
        moved = jreshard.transfer(keys, src_shardings, dst_shardings)
        for label, leaf in moved.items():
            assert leaf.dtype == keys[label].dtype
            assert_holds(leaf, data[label], dst_shardings[label], label)


def test_moved_keys_draw_the_same_numbers():
    src, dst = named(mesh([0, 1])), named(mesh([2, 3]))
    key = put(wrapped_keys(values((2,), np.uint32), "threefry2x32"), src)
    moved = jreshard.transfer({"rng": key}, src, dst)["rng"]
    assert np.array_equal(jax.random.bits(moved, (8,)), jax.random.bits(key, (8,)))


EMPTY = {
    "vector": ((0,), ("x",), ()),
    "no rows": ((0, 8), ("x", "y"), (None, ("y", "x"))),
    "no columns": ((8, 0, 3), ("y",), ("x", "y")),
    "nothing at all": ((0, 0), (), ("x",)),
}


@pytest.mark.parametrize("beside", [(), (8, 8)], ids=["alone", "beside others"])
def test_zero_sized(beside):
    src, dst = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    leaves = EMPTY | ({"full": (beside, ("x",), (None, "y"))} if beside else {})
    src_shardings = {label: named(src, *spec) for label, (_, spec, _) in leaves.items()}
    dst_shardings = {label: named(dst, *spec) for label, (_, _, spec) in leaves.items()}
    for seed in range(ROUNDS):
        host = {label: values(shape, seed=seed) for label, (shape, _, _) in leaves.items()}
        params = jax.tree.map(put, host, src_shardings)
        assert_tree_holds(jreshard.transfer(params, src_shardings, dst_shardings), host, dst_shardings)


def memory_kinds() -> list[str]:
    return [memory.kind for memory in cpus()[0].addressable_memories()]


@pytest.mark.parametrize("dst_kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("src_kind", ["device", "pinned_host", "unpinned_host"])
def test_memory_kinds(src_kind, dst_kind):
    if not {src_kind, dst_kind} <= set(memory_kinds()):
        pytest.skip(f"this backend has {memory_kinds()} only")
    src = named(mesh([0, 1, 2, 3], x=2, y=2), "x", "y", memory_kind=src_kind)
    dst = named(mesh([2, 3, 4], x=3), None, "x", memory_kind=dst_kind)
    for seed in range(ROUNDS):
        value = values((4, 6), seed=seed)
        source = put(value, src)
        assert_holds(jreshard.transfer({"w": source}, src, dst)["w"], value, dst)
        assert_holds(source, value, src)


def test_memory_kinds_mixed_in_one_tree():
    kinds = memory_kinds()
    if len(kinds) < 2:
        pytest.skip(f"this backend has {kinds} only")
    src, dst = mesh([0, 1]), mesh([2, 3])
    pairs = [(a, b) for a in kinds for b in kinds]
    src_shardings = {str(pair): named(src, "x", memory_kind=pair[0]) for pair in pairs}
    dst_shardings = {str(pair): named(dst, None, "x", memory_kind=pair[1]) for pair in pairs}
    host = {str(pair): values((4, 6), seed=i) for i, pair in enumerate(pairs)}
    params = jax.tree.map(put, host, src_shardings)
    assert_tree_holds(jreshard.transfer(params, src_shardings, dst_shardings), host, dst_shardings)
