"""Transfers between the GPUs of one process, byte for byte."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from gpu_meshes import COLS, ROWS, WHOLE, on
from jax.sharding import PartitionSpec as P
from repeats import repeats
from small_parts import launch_in_parts

import jreshard
from jreshard._runtime import parts

pytestmark = pytest.mark.gpu


LAYOUTS = {
    "0 to 1": ([0], WHOLE, [1], WHOLE),
    "rows of 0,1 to 1": ([0, 1], ROWS, [1], WHOLE),
    "rows of 0,1 to 0": ([0, 1], ROWS, [0], WHOLE),
    "columns of 0,1 to 1": ([0, 1], COLS, [1], WHOLE),
    "0 to columns of 0,1": ([0], WHOLE, [0, 1], COLS),
    "rows to columns": ([0, 1], ROWS, [0, 1], COLS),
    "columns to rows": ([0, 1], COLS, [0, 1], ROWS),
    "permuted": ([0, 1], ROWS, [1, 0], ROWS),
    "identical": ([0, 1], ROWS, [0, 1], ROWS),
    "replicated": ([0, 1], WHOLE, [0, 1], COLS),
    "to replicas": ([1], WHOLE, [0, 1], WHOLE),
    "first dim of three to last": ([0, 1], P("x"), [0, 1], P(None, None, "x")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, options: dict[str, Any]) -> None:
    src_ids, src_spec, dst_ids, dst_spec = LAYOUTS[name]
    src, dst = on(src_ids, src_spec), on(dst_ids, dst_spec)
    for seed in range(3):
        host = {
            "f32": oracle.values((64, 36, 8), np.float32, seed),
            "bf16": oracle.values((128, 250, 6), jnp.bfloat16, seed),
            "byte": oracle.values((34, 2, 14), np.uint8, seed),
        }
        got = jreshard.transfer(jax.device_put(host, src), src, dst, **options)
        oracle.assert_tree_holds(got, host, dst)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "complex64", "bool"])
def test_dtypes(dtype: str, options: dict[str, Any]) -> None:
    src, dst = on([0, 1], ROWS), on([0, 1], COLS)
    host = {"even": oracle.values((8, 32), jnp.dtype(dtype)), "odd": oracle.values((6, 10), jnp.dtype(dtype))}
    got = jreshard.transfer(jax.device_put(host, src), src, dst, **options)
    oracle.assert_tree_holds(got, host, dst)


def test_keys(options: dict[str, Any]) -> None:
    src, dst = on([0], WHOLE), on([1], WHOLE)
    keys = jax.device_put(jax.random.split(jax.random.key(3), 6), src)
    got = jreshard.transfer(keys, src, dst, **options)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))


def test_into_keeps_addresses_and_order_of_streams(options: dict[str, Any]) -> None:
    src, dst = on([0, 1], ROWS), on([0, 1], COLS)
    step = jax.jit(lambda x: (x + 1) % 1021, donate_argnums=0)
    expected = np.arange(4096 * 2048, dtype=np.int32).reshape(4096, 2048) % 1021
    params = jax.device_put(expected, src)
    old = jreshard.transfer(params, src, dst, **options)
    addresses = oracle.pointers(old)
    snapshots = []
    for _ in range(20):
        old = jreshard.transfer(params, src, dst, into=old, **options)
        snapshots.append(old[::512] + 0)
        params = step(params)  # overwrites the source at once: the transfer must have read it before
    assert oracle.pointers(old) == addresses
    for snapshot in snapshots:
        np.testing.assert_array_equal(np.asarray(snapshot), expected[::512])
        expected = (expected + 1) % 1021


def test_dtype_cast_donate_and_verify(options: dict[str, Any]) -> None:
    src, dst = on([0, 1], ROWS), on([1], WHOLE)
    host = oracle.numbers((256, 64))
    params = {"w": jax.device_put(host, src)}
    got = jreshard.transfer(params, src, dst, dtype=jnp.bfloat16, donate=True, verify=True, **options)
    assert params["w"].is_deleted()
    np.testing.assert_array_equal(np.asarray(got["w"]), host.astype(jnp.bfloat16))


def test_many_leaves_between_collectives(options: dict[str, Any]) -> None:
    src, dst = on([0, 1], ROWS), on([0, 1], COLS)
    host = {f"w{i}": oracle.values((32, 64), np.float32, i) for i in range(300)}
    params = jax.device_put(host, src)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32), out_shardings=on([0, 1], WHOLE))
    busy = jax.device_put(oracle.numbers((1024, 1024)), src)
    got: Any = None
    sums = []
    for _ in range(repeats(50, 200)):
        sums.append(total(busy))
        got = jreshard.transfer(params, src, dst, into=got, **options)
        sums.append(total(busy))
    jax.block_until_ready(sums)
    assert len({float(s) for s in sums}) == 1
    oracle.assert_tree_holds(got, host, dst)


def test_past_four_gib(options: dict[str, Any]) -> None:
    src, dst = on([0], WHOLE), on([1], WHOLE)
    size = (1 << 32) + 1

    def hashed() -> jax.Array:
        return (jax.lax.iota(jnp.uint32, size) * jnp.uint32(2654435761) >> 24).astype(jnp.uint8)

    x = jax.jit(hashed, out_shardings=src)()
    got = jreshard.transfer(x, src, dst, **options)
    same = jax.jit(lambda a: jnp.sum(a.astype(jnp.uint32) * (jax.lax.iota(jnp.uint32, size) | 1)))
    assert int(same(x)) == int(same(got))
    last = jax.jit(lambda a: jax.lax.slice(a, (size - 1,), (size,)))
    assert int(last(x)[0]) == int(last(got)[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_large_boxes_in_many_waves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JRESHARD_STAGING_MIB", "1")
    src_ids, src_spec, dst_ids, dst_spec = LAYOUTS[name]
    src, dst = on(src_ids, src_spec), on(dst_ids, dst_spec)
    host = {
        "large": oracle.values((1024, 2048, 6), np.float32),
        "odd": oracle.values((514, 1026, 10), np.uint8),
        "small": oracle.values((34, 2, 14), np.uint8),
    }
    got = None
    for _ in range(3):
        params = jax.device_put(host, src)
        got = jreshard.transfer(params, src, dst, into=got, transport="nccl", timeout=60)
        oracle.assert_tree_holds(got, host, dst)


@pytest.mark.parametrize("name", ["0 to 1", "rows of 0,1 to 1", "0 to columns of 0,1", "rows to columns", "permuted"])
def test_many_parts(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if copying took longer than launching, so that the leaves go in parts."""
    launch_in_parts(monkeypatch, 1000)
    src_ids, src_spec, dst_ids, dst_spec = LAYOUTS[name]
    src, dst = on(src_ids, src_spec), on(dst_ids, dst_spec)
    old = None
    for seed in range(3):
        host = {f"w{i}": oracle.values((64, 8 * (1 + i % 5)), np.float32, 100 * seed + i) for i in range(80)}
        params = jax.device_put(host, src)
        old = jreshard.transfer(params, src, dst, into=old, **options)
        oracle.assert_tree_holds(old, host, dst)
    (route,) = jreshard.plan(params, src, dst).routes
    assert len(parts.arranged(route, options["transport"]).part_ends) > 2


def test_transports_in_turn() -> None:
    src, dst = on([0, 1], ROWS), on([0, 1], COLS)
    for seed in range(10):
        host = {f"w{i}": oracle.values((32, 64), np.float32, seed + i) for i in range(70)}
        params = jax.device_put(host, src)
        for transport in ("nccl", "p2p"):
            there = jreshard.transfer(params, src, dst, transport=transport, timeout=60)
            back = jreshard.transfer(there, dst, on([1], WHOLE), transport=transport, timeout=60)
            oracle.assert_tree_holds(back, host, on([1], WHOLE))


def test_thousand_refits_leave_memory_flat(options: dict[str, Any]) -> None:
    src, dst = on([0, 1], ROWS), on([0, 1], COLS)
    params = {f"w{i}": jax.device_put(oracle.values((64, 64), np.float32, i), src) for i in range(20)}
    got = jreshard.transfer(params, src, dst, **options)

    def used() -> int:
        return sum(d.memory_stats()["bytes_in_use"] for d in jax.devices("cuda")[:2])

    before = None
    for i in range(1000):
        got = jreshard.transfer(params, src, dst, into=got, **options)
        if i == 10:
            jax.block_until_ready(got)
            before = used()
    jax.block_until_ready(got)
    assert used() == before
