"""What each process of a cluster does; every function runs in all of them, and raises where something is wrong."""

import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jreshard
from jreshard import _compat, _links, _native

LEAVES_AT_ONCE = {"a_process_dies_while_others_wait"}
OPTIONS: dict[str, Any] = {"timeout": 40.0, "transport": os.environ.get("JRESHARD_TEST_TRANSPORT", "auto")}

ROWS, COLS, WHOLE = P("x"), P(None, "x"), P()


def on(ids: list[int], spec: P) -> NamedSharding:
    """Over these of all processes' devices."""
    devices = np.array([jax.devices()[i] for i in ids])
    return NamedSharding(Mesh(devices, ("x",)), spec)


def place(host: Any, sharding: NamedSharding) -> Any:
    def array(value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i].copy(), dtype=value.dtype)

    return jax.tree.map(array, host)


def tree(seed: int = 0) -> dict[str, np.ndarray]:
    return {
        "f32": oracle.values((64, 36, 8), np.float32, seed),
        "bf16": oracle.values((128, 240, 4), jnp.bfloat16, seed),
        "byte": oracle.values((36, 4, 12), np.uint8, seed),
        "int4": oracle.values((16, 32), jnp.int4, seed),
        "empty": np.zeros((0, 8), np.float32),
    }


def layouts() -> list[tuple[list[int], P, list[int], P]]:
    """Pairs of layouts; with two devices some coincide."""
    last = jax.device_count() - 1
    all_ids = list(range(last + 1))
    half = len(all_ids) // 2
    return [
        ([0], WHOLE, [last], WHOLE),
        ([last], WHOLE, [0], WHOLE),
        (all_ids, ROWS, [last], WHOLE),
        (all_ids, ROWS, [0], WHOLE),
        ([0], WHOLE, all_ids, COLS),
        (all_ids, ROWS, all_ids, COLS),
        (all_ids, COLS, all_ids, ROWS),
        (all_ids, ROWS, all_ids[::-1], ROWS),
        (all_ids, ROWS, all_ids, ROWS),
        (all_ids, WHOLE, all_ids, COLS),
        ([last], WHOLE, all_ids, WHOLE),
        (all_ids[:half], ROWS, all_ids[half:], COLS),
        (all_ids[half:], COLS, all_ids[:half], ROWS),
        (all_ids, ROWS, all_ids, P(None, None, "x")),
    ]


def every_layout() -> None:
    for src_ids, src_spec, dst_ids, dst_spec in layouts():
        src, dst = on(src_ids, src_spec), on(dst_ids, dst_spec)
        got = None
        for seed in range(3):
            host = tree(seed)
            if len(dst_spec) == 3:
                host = {name: value for name, value in host.items() if value.ndim == 3}
            params = place(host, src)
            got = jreshard.transfer(params, src, dst, into=got, **OPTIONS)
            oracle.assert_tree_holds(got, host, dst)
            oracle.assert_tree_holds(params, host, src)


def options() -> None:
    last = jax.device_count() - 1
    src, dst = on(list(range(last + 1)), ROWS), on([last], WHOLE)
    host = {"w": oracle.numbers((256, 64))}
    params = place(host, src)
    got = jreshard.transfer(params, src, dst, dtype=jnp.bfloat16, donate=True, verify=True, **OPTIONS)
    assert params["w"].is_deleted()
    oracle.assert_tree_holds(got, {"w": host["w"].astype(jnp.bfloat16)}, dst)
    # A process without shards of the source need not have arrays.
    back = on([0], WHOLE)
    there = {"w": got["w"] if got["w"].addressable_shards else jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)}
    got = jreshard.transfer(there, dst, back, verify=True, **OPTIONS)
    oracle.assert_tree_holds(got, {"w": host["w"].astype(jnp.bfloat16)}, back)
    # Values of the host go to all.
    both = on(list(range(last + 1)), ROWS)
    got = jreshard.transfer({"w": place(host["w"], src), "n": np.arange(8.0, dtype=np.float32)}, None, both, **OPTIONS)
    oracle.assert_tree_holds(got, {"w": host["w"], "n": np.arange(8.0, dtype=np.float32)}, both)


def many_leaves_between_collectives() -> None:
    everywhere = list(range(jax.device_count()))
    src, dst = on(everywhere, ROWS), on(everywhere, COLS)
    host = {f"w{i}": oracle.values((32, 64), np.float32, i) for i in range(150)}
    params = place(host, src)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32), out_shardings=on(everywhere, WHOLE))
    busy = place(oracle.numbers((256, 256)), src)
    got, sums = None, []
    for _ in range(20):
        sums.append(total(busy))
        got = jreshard.transfer(params, src, dst, into=got, **OPTIONS)
        sums.append(total(busy))
    assert len({float(s.addressable_data(0)) for s in sums}) == 1
    oracle.assert_tree_holds(got, host, dst)


def plans_in_turn() -> None:
    last = jax.device_count() - 1
    ends, all_ids = (on([0], WHOLE), on([last], WHOLE)), list(range(last + 1))
    rows, cols = on(all_ids, ROWS), on(all_ids, COLS)
    host = tree()
    forth, back = jreshard.plan(place(host, ends[0]), *ends), None
    for _ in range(5):
        there = forth.execute(place(host, ends[0]), **OPTIONS)
        if back is None:
            if jax.process_index() == 1:
                time.sleep(1.0)  # the others wait while this process compiles
            back = jreshard.plan(there, ends[1], ends[0])
        oracle.assert_tree_holds(back.execute(there, **OPTIONS), host, ends[0])
        got = jreshard.transfer(place(host, rows), rows, cols, **OPTIONS)
        oracle.assert_tree_holds(got, host, cols)


def a_step_right_after() -> None:
    last = jax.device_count() - 1
    all_ids = list(range(last + 1))
    src, dst = on(all_ids, ROWS), on(all_ids, COLS)
    step = jax.jit(lambda x: (x + 1) % 1021, donate_argnums=0, out_shardings=src)
    expected = np.arange(1024 * 512, dtype=np.int32).reshape(1024, 512) % 1021
    params, old = place(expected, src), None
    for _ in range(20):
        old = jreshard.transfer(params, src, dst, into=old, **OPTIONS)
        params = step(params)  # overwrites the source at once: the transfer must have read it before
        oracle.assert_holds(old, expected, dst)
        expected = (expected + 1) % 1021


def mismatches() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    odd = jax.process_index() == 1
    others = [
        ({**host, "more": host["f32"]}, r"process 0: no further leaf\n  process 1: params\['more'\]: float32"),
        (
            {**host, "f32": host["f32"].astype(np.float32).view(np.int32)},
            r"process 0: params\['f32'\]: float32\[64, 36, 8\] from .*\n  process 1: params\['f32'\]: int32",
        ),
        ({**host, "bf16": host["bf16"].reshape(64, 480, 4)}, r"bfloat16\[128, 240, 4\].*\n.*bfloat16\[64, 480, 4\]"),
    ]
    for other, named in others:
        params = place(other if odd else host, src)
        with pytest.raises(jreshard.MismatchError, match=rf"process 0.*process 1(.*\n)+.*{named}"):
            jreshard.transfer(params, src, dst, **OPTIONS)
    with pytest.raises(jreshard.MismatchError, match=r"verify=False'; process 1: .*verify=True'$"):
        jreshard.transfer(place(host, src), src, dst, verify=odd, **OPTIONS)
    for _ in range(2):
        got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)  # and all is well again
        oracle.assert_tree_holds(got, host, dst)


def renamed(weights: dict[str, Any]) -> dict[str, Any]:
    fused = jnp.concatenate([weights["f32"], weights["f32"][::-1]], axis=0)
    return {"model": {"fused": fused, "turned": weights["byte"].T}, "scale": jnp.float32(3.0)}


def fails(weights: dict[str, Any]) -> dict[str, Any]:
    if jax.process_index() == 0:
        raise ZeroDivisionError("no such layer")
    return weights


def transforms() -> None:
    last = jax.device_count() - 1
    all_ids = list(range(last + 1))
    host = tree()
    fused = np.concatenate([host["f32"], host["f32"][::-1]], axis=0)
    expected = {"model": {"fused": fused, "turned": host["byte"].T}, "scale": np.float32(3.0)}
    for src, dst in [
        (on([0], WHOLE), on([last], WHOLE)),
        (on([0], WHOLE), on(all_ids, WHOLE)),
        (on(all_ids, ROWS), on([last], WHOLE)),
    ]:
        elsewhere = not src.addressable_devices
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=src), host)  # noqa: B023
        params = params if elsewhere else place(host, src)
        got = None
        for _ in range(2):
            got = jreshard.transfer(params, src, dst, transform=renamed, into=got, **OPTIONS)
            oracle.assert_tree_holds(got, expected, dst)
    src, dst = on([0], WHOLE), on([last], WHOLE)
    with pytest.raises(ZeroDivisionError if jax.process_index() == 0 else RuntimeError, match="no such layer"):
        jreshard.transfer(place(host, src), src, dst, transform=fails, **OPTIONS)
    oracle.assert_tree_holds(jreshard.transfer(place(host, src), src, dst, **OPTIONS), host, dst)


def links_that_broke() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    for breaks in (0, 1):
        if jax.process_index() == breaks:
            _native.disconnect_process(1 - breaks)
        got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)  # links them anew
        oracle.assert_tree_holds(got, host, dst)


def linking_fails_on_one_side() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    real = _links.connect_process

    def fails(*_: Any) -> None:
        raise OSError("no more descriptors")

    if jax.process_index() == 1:
        _native.disconnect_process(0)
        _links.connect_process = fails
    with pytest.raises((OSError, RuntimeError), match="no more descriptors"):
        jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    _links.connect_process = real
    got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    oracle.assert_tree_holds(got, host, dst)


def a_process_is_late() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    client = _compat.distributed_client()
    if jax.process_index() == 1:
        assert _compat.coordination_get(client, "given up", OPTIONS["timeout"])
    else:
        with pytest.raises(TimeoutError, match="process 1"):
            jreshard.transfer(place(host, src), src, dst, **{**OPTIONS, "timeout": 1.0})
        _compat.coordination_set(client, "given up", "yes")
    got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    oracle.assert_tree_holds(got, host, dst)


def a_process_dies_while_others_wait() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    if jax.process_index() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ConnectionError, match="process 1"):  # a TimeoutError if nobody noticed
        jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    assert float(jnp.sum(jnp.ones(8))) == 8.0  # other work goes on


def many_refits() -> None:
    everywhere = list(range(jax.device_count()))
    src, dst = on(everywhere, ROWS), on(everywhere, COLS)
    params = place({f"w{i}": oracle.values((64, 64), np.float32, i) for i in range(10)}, src)
    got, before = None, None
    for i in range(300):
        got = jreshard.transfer(params, src, dst, into=got, **OPTIONS)
        if i == 50:
            jax.block_until_ready(got)
            before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    jax.block_until_ready(got)
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    assert before is not None
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 2
