"""What each process of a cluster does; every function runs in all of them, and raises where something is wrong."""

import os
import signal
import statistics
import threading
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from repeats import clock, repeats
from small_parts import launch_in_parts

import jreshard
from jreshard import _compat, _transfer
from jreshard._control import rendezvous
from jreshard._planning.route import Route
from jreshard._runtime import communicator, links, parts
from jreshard._runtime.launch import Launcher
from jreshard._runtime.native import disconnect_process
from jreshard.bench.gpu import Gpu
from jreshard.bench.worker import open_gpus

LEAVES_AT_ONCE = {"a_process_dies_while_others_wait", "a_process_dies_between_calls", "survivors_go_on"}
OPTIONS: dict[str, Any] = {"timeout": 40.0, "transport": os.environ.get("JRESHARD_TEST_TRANSPORT", "auto")}

ROWS, COLS, WHOLE = P("x"), P(None, "x"), P()


def on(ids: list[int], spec: P, replicas: int = 1) -> NamedSharding:
    """Over these of all processes' devices, which hold everything so many times."""
    devices = np.array([jax.devices()[i] for i in ids]).reshape(replicas, -1)
    return NamedSharding(Mesh(devices, ("replica", "x")), spec)


def place(host: Any, sharding: NamedSharding) -> Any:
    def array(value: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i].copy(), dtype=value.dtype)

    return jax.tree.map(array, host)


def tree(seed: int = 0) -> dict[str, np.ndarray]:
    """Dims that divide by 2, 3, 4, 6 and 8."""
    return {
        "f32": oracle.values((48, 24, 8), np.float32, seed),
        "bf16": oracle.values((96, 240, 8), jnp.bfloat16, seed),
        "byte": oracle.values((24, 48, 24), np.uint8, seed),
        "int4": oracle.values((24, 48), jnp.int4, seed),
        "empty": np.zeros((0, 24), np.float32),
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


def layouts_of_many() -> list[tuple[NamedSharding, NamedSharding]]:
    """Pairs of layouts for four devices and more, with replicas, and meshes that overlap in part."""
    ids = list(range(jax.device_count()))
    half = len(ids) // 2
    lower, upper = ids[:half], ids[half:]
    src, dst = (ids[:6], upper) if len(ids) == 8 else (ids[:3], ids)
    return [
        (on(lower, ROWS), on(upper, COLS)),
        (on(lower, ROWS), on(upper, ROWS)),
        (on(ids[:1], WHOLE), on(ids[1:], WHOLE)),
        (on(lower, ROWS), on(upper, WHOLE, replicas=half)),
        (on(lower, WHOLE, replicas=half), on(upper, COLS)),
        (on(lower, COLS), on(upper, COLS, replicas=2)),
        (on(ids, ROWS), on(ids, COLS)),
        (on(ids, ROWS, replicas=2), on(ids[::-1], COLS, replicas=2)),
        (on(src, ROWS), on(dst, COLS)),
    ]


def every_layout_of_many() -> None:
    for src, dst in layouts_of_many():
        got = None
        for seed in range(3):
            host = tree(seed)
            params = place(host, src)
            got = jreshard.transfer(params, src, dst, into=got, **OPTIONS)
            oracle.assert_tree_holds(got, host, dst)
            oracle.assert_tree_holds(params, host, src)


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
    for _ in range(repeats(20, 200)):
        sums.append(total(busy))
        got = jreshard.transfer(params, src, dst, into=got, **OPTIONS)
        sums.append(total(busy))
    assert len({float(s.addressable_data(0)) for s in sums}) == 1
    oracle.assert_tree_holds(got, host, dst)


def many_leaves() -> None:
    """Between single devices, so that one source has many copies; each time the source is overwritten right after."""
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    step = jax.jit(lambda leaves: {name: x + 1 for name, x in leaves.items()}, donate_argnums=0)
    host = {f"w{i}": np.full((64, 64 + i), i, np.int32) for i in range(150)}
    params, old = place(host, src), None
    for round in range(6):
        old = jreshard.transfer(params, src, dst, into=old, **OPTIONS)
        if src.addressable_devices:
            params = step(params)
        oracle.assert_tree_holds(old, {name: value + round for name, value in host.items()}, dst)


def many_parts() -> None:
    """The same where copying takes longer than launching, so that the leaves go in parts."""
    arranged = parts.arranged
    made: list[Route] = []

    def in_parts(route: Route, transport: str) -> Route:
        made.append(arranged(route, "p2p" if transport == "host" else transport))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "arranged", in_parts)
        launch_in_parts(patch, 12_000)
        _transfer._plans._plans.clear()
        many_leaves()
    assert len(made[0].part_ends) > 2
    _transfer._plans._plans.clear()


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
            r"process 0: params\['f32'\]: float32\[48, 24, 8\] from .*\n  process 1: params\['f32'\]: int32",
        ),
        ({**host, "bf16": host["bf16"].reshape(48, 480, 8)}, r"bfloat16\[96, 240, 8\].*\n.*bfloat16\[48, 480, 8\]"),
    ]
    for other, named in others:
        params = place(other if odd else host, src)
        with pytest.raises(jreshard.MismatchError, match=rf"process 0.*process 1(.*\n)+.*{named}"):
            jreshard.transfer(params, src, dst, **OPTIONS)
    with pytest.raises(jreshard.MismatchError, match=r"verify=False\b.*'; process 1: .*verify=True\b.*'$"):
        jreshard.transfer(place(host, src), src, dst, verify=odd, **OPTIONS)
    for _ in range(2):
        got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)  # and all is well again
        oracle.assert_tree_holds(got, host, dst)


def renamed(weights: dict[str, Any]) -> dict[str, Any]:
    fused = jnp.concatenate([weights["f32"], weights["f32"][::-1]], axis=0)
    return {"model": {"fused": fused, "turned": weights["byte"].T}, "scale": jnp.float32(3.0)}


def fails(where: int, weights: dict[str, Any]) -> dict[str, Any]:
    if jax.process_index() == where:
        raise ZeroDivisionError("no such layer")
    return weights


def makes_more(weights: dict[str, Any]) -> dict[str, Any]:
    return weights if jax.process_index() == 0 else {**weights, "more": jnp.zeros(3, jnp.int8)}


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
    for loses in (0, 1):  # one process has lost its plan, or would make another one now
        if jax.process_index() == loses:
            _transfer._plans._plans.clear()
        got = jreshard.transfer(place(host, src), src, dst, transform=renamed, **OPTIONS)
        oracle.assert_tree_holds(got, expected, dst)
    for where in (0, 1):
        kind = ZeroDivisionError if jax.process_index() == where else RuntimeError
        with pytest.raises(kind, match="no such layer"):
            jreshard.transfer(place(host, src), src, dst, transform=partial(fails, where), **OPTIONS)
    with pytest.raises(jreshard.MismatchError, match=r"process 0: no further leaf\n  process 1: \['more'\]: int8\[3\]"):
        jreshard.transfer(place(host, src), src, dst, transform=makes_more, **OPTIONS)
    oracle.assert_tree_holds(jreshard.transfer(place(host, src), src, dst, **OPTIONS), host, dst)


def links_that_broke() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    for breaks in (0, 1):
        if jax.process_index() == breaks:
            disconnect_process(1 - breaks)
        got = jreshard.transfer(place(host, src), src, dst, **OPTIONS)  # links them anew
        oracle.assert_tree_holds(got, host, dst)


def linking_fails_on_one_side() -> None:
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    real = links.connect_process

    def fails(*_: Any) -> None:
        raise OSError("no more descriptors")

    if jax.process_index() == 1:
        disconnect_process(0)
        links.connect_process = fails
    with pytest.raises((OSError, RuntimeError), match="no more descriptors"):
        jreshard.transfer(place(host, src), src, dst, **OPTIONS)
    links.connect_process = real
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


def a_gpu_is_shared() -> None:
    """NCCL takes a GPU once only, which is told and does no harm."""
    last = jax.device_count() - 1
    src, dst = on([0], WHOLE), on([last], WHOLE)
    host = tree()
    with pytest.raises(RuntimeError, match=r"process 0 and process 1 share a GPU.*transport='p2p'"):
        jreshard.transfer(place(host, src), src, dst, **{**OPTIONS, "transport": "nccl"})
    got = jreshard.transfer(place(host, src), src, dst, **{**OPTIONS, "transport": "auto"})
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


def a_process_dies_between_calls() -> None:
    src, dst = on([1], WHOLE), on([0], WHOLE)
    params = place(tree(), src)
    jax.block_until_ready(jreshard.transfer(params, src, dst, **OPTIONS))
    client = _compat.distributed_client()
    if jax.process_index() == 1:
        assert _compat.coordination_get(client, "arrived", OPTIONS["timeout"])
        os.kill(os.getpid(), signal.SIGKILL)
    _compat.coordination_set(client, "arrived", "yes")
    time.sleep(2.0)
    begin = time.monotonic()
    with pytest.raises(jreshard.PeerLost, match="process 1"):  # not when the timeout is over
        jreshard.transfer(params, src, dst, **OPTIONS)
    assert time.monotonic() - begin < OPTIONS["timeout"] / 2
    with pytest.raises(jreshard.PeerTimeout, match="process 1"):  # it might have come back
        jreshard.transfer(params, src, dst, **{**OPTIONS, "timeout": 1.0})


def a_process_leaves_early() -> None:
    """One process has all that it wanted, and ends, while another has not begun to launch."""
    src, dst = on([0], WHOLE), on([1, 2], WHOLE, replicas=2)
    host = tree()
    params = place(host, src)
    jreshard.transfer(params, src, dst, **OPTIONS)
    client, launch = _compat.distributed_client(), Launcher._launch

    def launch_late(*arguments: Any) -> Any:
        assert _compat.coordination_get(client, "left", OPTIONS["timeout"])
        time.sleep(0.5)
        return launch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 2:
            patch.setattr(Launcher, "_launch", launch_late)
        got = jreshard.transfer(params, src, dst, **OPTIONS)
        oracle.assert_tree_holds(got, host, dst)
    if jax.process_index() == 1:
        rendezvous._close_job()  # as at exit
        _compat.coordination_set(client, "left", "yes")
    else:
        with pytest.raises(jreshard.PeerLost, match=r"process 1 .* has left the group"):
            jreshard.transfer(params, src, dst, **OPTIONS)


def a_process_is_interrupted() -> None:
    """It ends when the others count on it, before it has begun."""
    last = jax.device_count() - 1
    src, dst = on([last], WHOLE), on([0], WHOLE)
    params = place(tree(), src)
    jreshard.transfer(params, src, dst, **OPTIONS)
    client, meet = _compat.distributed_client(), Launcher._meet

    def interrupt(*arguments: Any) -> Any:
        meet(*arguments)
        raise KeyboardInterrupt

    if jax.process_index() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launcher, "_meet", interrupt)
            with pytest.raises(KeyboardInterrupt):
                jreshard.transfer(params, src, dst, **OPTIONS)
        rendezvous._close_job()  # as at exit
        assert _compat.coordination_get(client, "told", OPTIONS["timeout"])
    else:  # not when the timeout is over
        with pytest.raises(jreshard.TransferError, match=r"process 1 .* has left the group in the midst"):
            jax.block_until_ready(jreshard.transfer(params, src, dst, **OPTIONS))
        _compat.coordination_set(client, "told", "yes")


def survivors_go_on() -> None:
    """A process is killed while transfers run: the others raise, and those among them work on."""
    ids = list(range(jax.device_count()))
    src, dst = on(ids, ROWS), on(ids, COLS)
    host = {f"w{i}": oracle.values((96, 240), np.float32, i) for i in range(20)}
    params = place(host, src)
    old = jreshard.transfer(params, src, dst, **OPTIONS)
    if jax.process_index() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begin = time.monotonic()

    def refit_until_it_fails() -> None:
        latest = old
        while time.monotonic() < begin + OPTIONS["timeout"]:
            latest = jax.block_until_ready(jreshard.transfer(params, src, dst, into=latest, **OPTIONS))

    with pytest.raises((ConnectionError, RuntimeError), match="process 1"):  # the latter in what had been launched
        refit_until_it_fails()
    assert time.monotonic() - begin < OPTIONS["timeout"]
    left = [i for i in ids if jax.devices()[i].process_index != 1]
    src, dst = on(left[:1], WHOLE), on(left[-1:], WHOLE)
    params, old = place(host, src), None
    for _ in range(3):
        old = jreshard.transfer(params, src, dst, into=old, **OPTIONS)
        oracle.assert_tree_holds(old, host, dst)
    # The others are shot down when the process ends in which they meet.
    client, others = _compat.distributed_client(), {jax.devices()[i].process_index for i in left} - {0}
    if jax.process_index() != 0:
        _compat.coordination_set(client, f"done {jax.process_index()}", "yes")
    else:
        for process in others:
            assert _compat.coordination_get(client, f"done {process}", OPTIONS["timeout"])
        time.sleep(2.0)


@cache
def own_gpus() -> dict[int, Gpu]:
    return open_gpus(jax.devices())


def held() -> dict[str, int]:
    """What this process holds that a leak would add to."""
    gpus = own_gpus()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "device": sum(device.memory_stats()["bytes_in_use"] for device in jax.local_devices() if gpus),
        "driver": sum(gpu.used_bytes() for gpu in gpus.values()),
    }


# Threads and the C library's arenas come and go; what the driver has given away, other processes take as well.
MORE = {"descriptors": 0, "threads": 2, "mappings": 20, "device": 0, "driver": 8 << 20}


def assert_holds_no_more_than(before: dict[str, int]) -> None:
    """At once, or when what was closed has been given back."""
    deadline = time.monotonic() + 10
    while True:
        now = held()
        more = {what: (before[what], now[what]) for what in now if now[what] > before[what] + MORE[what]}
        if not more or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert not more, f"before and now: {more}"


def many_refits() -> None:
    everywhere = list(range(jax.device_count()))
    src, dst = on(everywhere, ROWS), on(everywhere, COLS)
    params = place({f"w{i}": oracle.values((64, 64), np.float32, i) for i in range(10)}, src)
    got, before, seconds = None, None, []
    for i in range(repeats(300, 1000)):
        begin = clock()
        got = jax.block_until_ready(jreshard.transfer(params, src, dst, into=got, **OPTIONS))
        seconds.append(clock() - begin)
        if i == 50:
            before = held()
    assert before is not None
    assert_holds_no_more_than(before)
    quarter = len(seconds[50:]) // 4
    first, last = (statistics.quantiles(some, n=10)[0] for some in (seconds[50:][:quarter], seconds[-quarter:]))
    assert last < 2 * first, "each refit is slower than the one before"


def into_takes_no_second_copy() -> None:
    """Beyond source and destination GPUs need next to no memory; their allocator never forgets its highest use."""
    ids = list(range(jax.device_count()))
    src, dst = on(ids, ROWS), on(ids, COLS)
    (mine,) = jax.local_devices()
    params = place(np.arange(1 << 28, dtype=np.float32).reshape(1 << 14, 1 << 14), src)
    old = jax.block_until_ready(jreshard.transfer(params, src, dst, **OPTIONS))
    most = 64 << 20
    before, gpus = mine.memory_stats(), own_gpus()
    taken = sum(gpu.used_bytes() for gpu in gpus.values())
    assert before["peak_bytes_in_use"] - before["bytes_in_use"] < most, "a second copy would not show"
    for _ in range(3):
        old = jax.block_until_ready(jreshard.transfer(params, src, dst, into=old, **OPTIONS))
    assert mine.memory_stats()["peak_bytes_in_use"] - before["bytes_in_use"] < most
    assert sum(gpu.used_bytes() for gpu in gpus.values()) - taken < most


def connects_again_and_again() -> None:
    last = jax.device_count() - 1
    all_ids = list(range(last + 1))
    src, dst = on(all_ids, ROWS), on(all_ids, COLS)
    host = tree()
    client = _compat.distributed_client()
    params, got, before = place(host, src), None, None
    for i in range(repeats(10, 100)):
        got = jax.block_until_ready(jreshard.transfer(params, src, dst, into=got, **OPTIONS))
        client.wait_at_barrier(f"everybody has read {i}", round(1000 * OPTIONS["timeout"]))
        for process in range(jax.process_count()):
            if process != jax.process_index():
                disconnect_process(process)
        for opened in list(communicator._open.values()):
            opened.close()
        if i == 4:
            before = held()
    assert before is not None
    assert_holds_no_more_than(before)
    oracle.assert_tree_holds(got, host, dst)
