"""Long runs: memory and time stay flat, long queues keep their order, threads do not get in each other's way."""

import gc
import os
import resource
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_holds, assert_tree_holds, mesh, named, numbers, put, tree_pointers, values
from repeats import clock

import jreshard

REFITS = 1000
WARM_UP = 100
MIB = 2**20

pytestmark = pytest.mark.timeout(240)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak_host(seed: int) -> dict:
    """Some 400 KiB: if one refit in two left its weights behind, 1,000 would leave 200 MiB."""
    return {
        "rows": values((256, 256), seed=seed),
        "columns": [values((128, 512), jnp.bfloat16, seed=seed + 10), values((64,), np.int32, seed=seed + 20)],
        "scale": values((), seed=seed + 30),
    }


def soak_layouts() -> tuple[dict, dict]:
    src, dst = mesh([0, 1, 2, 3], x=2, y=2), mesh([2, 3, 4, 5], x=2, y=2)
    return (
        {"rows": named(src, "x", "y"), "columns": [named(src, "x"), named(src, "y")], "scale": named(src)},
        {"rows": named(dst, None, ("y", "x")), "columns": [named(dst, None, "x"), named(dst)], "scale": named(dst)},
    )


def refit_times(refit, sources: list, old, count: int) -> tuple[list[float], object]:
    times = []
    for i in range(count):
        start = clock()
        old = jax.block_until_ready(refit(sources[i % len(sources)], old))
        times.append(clock() - start)
    return times, old


def usual(times: list[float]) -> float:
    """What a refit takes when nothing disturbs it."""
    return statistics.quantiles(times, n=10)[0]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("reuse", ["into", "fresh memory"])
def test_a_thousand_refits(reuse):
    src, dst = soak_layouts()
    hosts = [soak_host(seed) for seed in range(4)]
    sources = [jax.tree.map(put, host, src) for host in hosts]

    def refit(params, old):
        return jreshard.transfer(params, src, dst, into=old if reuse == "into" else None)

    old = jax.tree.map(put, hosts[-1], dst)
    _, old = refit_times(refit, sources, old, WARM_UP)
    addresses = tree_pointers(old)
    gc.collect()
    resident, arrays, objects = resident_bytes(), len(jax.live_arrays()), len(gc.get_objects())
    times, old = refit_times(refit, sources, old, REFITS)
    gc.collect()

    assert_tree_holds(old, hosts[(REFITS - 1) % len(hosts)], dst)
    if reuse == "into":
        assert tree_pointers(old) == addresses
    assert resident_bytes() - resident < 16 * MIB
    assert len(jax.live_arrays()) - arrays <= 8
    assert len(gc.get_objects()) - objects < REFITS
    quarter = REFITS // 4
    assert usual(times[-quarter:]) < 2 * usual(times[:quarter])


def test_errors_leave_no_memory_behind():
    src, dst = soak_layouts()
    params = jax.tree.map(put, soak_host(0), src)
    wrong = {"rows": dst["rows"], "columns": dst["columns"]}

    def refuse(count: int) -> None:
        for _ in range(count):
            with pytest.raises(ValueError, match="scale"):
                jreshard.transfer(params, src, wrong)

    refuse(20)
    gc.collect()
    arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
    refuse(200)
    gc.collect()
    assert len(jax.live_arrays()) == arrays
    assert len(gc.get_objects()) - objects < 200


# --- queues ----------------------------------------------------------------------------------------------------------

STEPS = 50


def queue_setup():
    """A train step big enough to be still running when the next calls are made."""
    src, dst = named(mesh([0, 1, 2, 3], x=2, y=2), "x", "y"), named(mesh([2, 3, 4, 5], x=4), None, "x")
    start = {"w": values((512, 512), np.int32), "b": values((512, 4), np.int32, seed=1)}
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    return src, dst, start, step


def after(start: dict, steps: int) -> dict:
    return jax.tree.map(lambda value: value + np.int32(steps), start)


def test_each_transfer_sees_its_own_step():
    """Nothing blocks; every step overwrites the memory that the transfer before it still reads."""
    src, dst, start, step = queue_setup()
    params = jax.tree.map(lambda value: put(value, src), start)
    results = []
    for _ in range(STEPS):
        params = step(params)
        results.append(jreshard.transfer(params, src, dst))
    params = step(params)
    for i, moved in enumerate(results):
        assert_tree_holds(moved, after(start, i + 1), dst)
    assert_tree_holds(params, after(start, STEPS + 1), src)


def test_each_donated_transfer_sees_its_own_step():
    src, dst, start, step = queue_setup()
    host = [after(start, i) for i in range(STEPS // 2)]
    queue = [jax.tree.map(lambda value: put(value, src), value) for value in host]
    results = [jreshard.transfer(step(params), src, dst, donate=True) for params in queue]
    for value, moved in zip(host, results, strict=True):
        assert_tree_holds(moved, after(value, 1), dst)


def test_each_reader_sees_its_own_refit():
    """Work queued on the old weights reads them whole, though the next refit writes to the same memory."""
    src, dst, start, step = queue_setup()
    read = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf ^ 0x55AA, tree))
    params = jax.tree.map(lambda value: put(value, src), start)
    weights, readings = None, []
    for _ in range(STEPS):
        params = step(params)
        weights = jreshard.transfer(params, src, dst, into=weights)
        readings.append(read(weights))
    for i, reading in enumerate(readings):
        expected = jax.tree.map(lambda value: value ^ np.int32(0x55AA), after(start, i + 1))
        assert all(map(np.array_equal, jax.tree.leaves(reading), jax.tree.leaves(expected)))
    assert_tree_holds(weights, after(start, STEPS), dst)


def test_there_and_back():
    """Two meshes that feed each other: each side waits for the other, step after step."""
    src, dst, start, step = queue_setup()
    params = jax.tree.map(lambda value: put(value, src), start)
    for _ in range(STEPS):
        params = jreshard.transfer(step(jreshard.transfer(params, src, dst, donate=True)), dst, src, donate=True)
    assert_tree_holds(params, after(start, STEPS), src)


def test_many_transfers_in_flight_to_many_meshes():
    src = named(mesh(range(8), x=4, y=2), "x", "y")
    routes = [named(mesh([7 - i, i], x=2), None, "x") for i in range(4)] + [named(mesh(range(8)), None, "x")]
    host = {str(i): values((64, 64), seed=i) for i in range(4)}
    params = jax.tree.map(lambda value: put(value, src), host)
    results = [(dst, jreshard.transfer(params, src, dst)) for _ in range(10) for dst in routes]
    for dst, moved in results:
        assert_tree_holds(moved, host, dst)


# --- threads ---------------------------------------------------------------------------------------------------------


def thread_routes() -> list:
    """Each thread has its own pair of layouts; all of them share devices."""
    return [
        (named(mesh([0, 1, 2, 3], x=2, y=2), "x", "y"), named(mesh([2, 3, 4, 5], x=4), None, "x")),
        (named(mesh([4, 5], x=2), "x"), named(mesh([0, 1, 2, 3], x=4), None, "x")),
        (named(mesh(range(8), x=8), "x"), named(mesh([7, 6, 5, 4, 3, 2, 1, 0], x=2, y=4), "y", "x")),
        (named(mesh([3], x=1)), named(mesh(range(8), x=8), None, "x")),
    ]


def move_repeatedly(number: int, start: threading.Barrier, count: int) -> None:
    src, dst = thread_routes()[number]
    old = None
    start.wait()
    for i in range(count):
        host = {"a": values((32, 48), seed=1000 * number + i), "b": values((16, 8), np.int8, seed=1000 * number + i)}
        params = jax.tree.map(lambda value: put(value, src), host)
        moved = jreshard.transfer(params, src, dst, into=old, donate=i % 2 == 0)
        assert_tree_holds(moved, host, dst)
        old = moved if i % 3 else None


def test_transfers_from_several_threads():
    threads = len(thread_routes())
    start = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(move_repeatedly, i, start, 15) for i in range(threads)]:
            future.result()


def test_several_threads_move_the_same_weights():
    """One publisher, several readers, the same plan at the same time."""
    src, dst = thread_routes()[0]
    value = values((64, 96))
    params = {"w": put(value, src)}
    start = threading.Barrier(4)

    def read() -> None:
        start.wait()
        for _ in range(15):
            assert_holds(jreshard.transfer(params, src, dst)["w"], value, dst)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(read) for _ in range(4)]:
            future.result()


def test_beside_a_running_collective():
    """The trainer goes on with its all-reduces while another thread sends its weights away."""
    everywhere = named(mesh(range(8), x=8), "x")
    src, dst = thread_routes()[0]
    total = jax.jit(lambda x: x - x.sum(axis=0, keepdims=True) * 0 + 1, donate_argnums=0)
    host = numbers((64, 32))
    running, value = put(host, everywhere), values((64, 96))
    params = {"w": put(value, src)}

    def send() -> None:
        for _ in range(20):
            assert_holds(jreshard.transfer(params, src, dst)["w"], value, dst)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for _ in range(20):
            running = jax.block_until_ready(total(running))
        sending.result()
    expected = host
    for _ in range(20):
        expected = expected + np.float32(1)
    assert_holds(running, expected, everywhere)


# --- peak memory -----------------------------------------------------------------------------------------------------


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not let a process reset its peak memory")


@pytest.mark.parametrize("dst_spec", [("x",), (None, "x")], ids=["contiguous", "strided"])
def test_peak_memory_is_the_destination(dst_spec):
    """Weights pass from shard to shard, not through a second whole copy."""
    src, dst = named(mesh([0, 1]), "x"), named(mesh([2, 3]), *dst_spec)
    small = {str(i): put(values((16, 16)), src) for i in range(8)}
    jax.block_until_ready(jreshard.transfer(small, src, dst))
    host = values((4096, 2048))
    params = jax.block_until_ready({str(i): put(host, src) for i in range(4)})
    gc.collect()
    reset_peak()
    before = resident_bytes()
    moved = jax.block_until_ready(jreshard.transfer(params, src, dst))
    extra = peak_bytes() - before - 4 * host.nbytes
    assert_tree_holds(moved, dict.fromkeys(params, host), dst)
    assert extra < 16 * MIB, f"{extra / MIB:.0f} MiB beyond the destination"
