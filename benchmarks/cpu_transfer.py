"""Transfers between simulated CPU devices of one process against `jax.device_put`, in one run.

    python benchmarks/cpu_transfer.py --json benchmarks/results/cpu_transfer.json

Answers: how much faster where `device_put` gathers whole arrays on the host, and where it does not; what a leaf costs
when it is small; what memory a transfer takes beside the destination. The two ways take turns, and ratios are of
medians. `--scale 0.01` is for trying the script.
"""

import argparse
import ctypes
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jreshard  # noqa: E402

REPEATS = 9
HIDDEN, FFN, LAYERS, VOCAB = 1024, 2816, 33, 16384  # 291 + 9 leaves, 1.3 GB in float32


def model_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """A decoder of 300 weights, one array each."""
    side = 1 if scale == 1 else max(0.02, scale**0.5)

    def size(n: int) -> int:
        return max(8, int(n * side) // 8 * 8)

    shapes = {"embed": (size(VOCAB), size(HIDDEN)), "head": (size(HIDDEN), size(VOCAB)), "norm": (size(HIDDEN),)}
    for i in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            shapes[f"{i}.{name}"] = (size(HIDDEN), size(HIDDEN))
        shapes |= {f"{i}.gate": (size(HIDDEN), size(FFN)), f"{i}.up": (size(HIDDEN), size(FFN))}
        shapes |= {f"{i}.down": (size(FFN), size(HIDDEN)), f"{i}.norm1": (size(HIDDEN),), f"{i}.norm2": (size(HIDDEN),)}
    return shapes


def sharding(ids: list[int], spec: P, **axes: int) -> NamedSharding:
    devices = np.array([jax.devices()[i] for i in ids])
    axes = axes or {"x": len(ids)}
    return NamedSharding(Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), spec)


@functools.lru_cache
def rows(ids: tuple[int, ...], ndim: int) -> NamedSharding:
    return sharding(list(ids), P("x"))


@functools.lru_cache
def cols(ids: tuple[int, ...], ndim: int) -> NamedSharding:
    return sharding(list(ids), P(None, "x") if ndim == 2 else P("x"))


def fill(shape: tuple[int, ...], on: NamedSharding, seed: int) -> jax.Array:
    host = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(jax.device_put(host, on), on, may_alias=False)


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds from call to ready of every call, taking turns."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            result = jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
            del result  # giving the memory back is not part of it
    return seconds


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        name: {"median_s": statistics.median(s), "min_s": min(s), "max_s": max(s)} for name, s in seconds.items()
    }
    for name in seconds:
        if name != "device_put":
            out[name]["speedup"] = out["device_put"]["median_s"] / out[name]["median_s"]
    return out


def compare(params: Any, src: Any, dst: Any) -> dict[str, Any]:
    """One case: new memory, old memory and `device_put`."""
    plan = jreshard.plan(params, src, dst)
    state = {"old": jreshard.transfer(params, src, dst)}
    for name in list(params)[:: max(1, len(params) // 4)]:
        np.testing.assert_array_equal(np.asarray(state["old"][name]), np.asarray(params[name]))

    def into() -> Any:
        state["old"] = jreshard.transfer(params, src, dst, into=state["old"])
        return state["old"]

    seconds = in_turns(
        {
            "device_put": lambda: jax.device_put(params, dst),
            "transfer": lambda: jreshard.transfer(params, src, dst),
            "transfer into": into,
        }
    )
    return {"leaves": len(params), "bytes": plan.nbytes, **summary(seconds)}


def high_water(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes by which the process's resident memory rose above its start, at most, while `call` ran; and its result."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before must not serve now, unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    result = jax.block_until_ready(call())
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return peak - before, result


def memory(params: Any, src: Any, dst: Any) -> dict[str, int]:
    """Peak memory beyond the destination's own."""
    old = jax.block_until_ready(jreshard.transfer(params, src, dst))
    nbytes = jreshard.plan(params, src, dst).nbytes
    into, _kept = high_water(lambda: jreshard.transfer(params, src, dst, into=old))
    new, _ = high_water(lambda: jreshard.transfer(params, src, dst))
    return {"bytes": nbytes, "extra into": into, "extra new": new - nbytes}


def overhead(count: int) -> dict[str, float]:
    """Seconds from call to ready for leaves of 4 bytes, and from call to return."""
    src, dst = rows((0,), 1), rows((4,), 1)
    params = {f"w{i}": fill((1,), src, i) for i in range(count)}
    returns = []

    def call() -> Any:
        start = time.perf_counter()
        out = jreshard.transfer(params, src, dst)
        returns.append(time.perf_counter() - start)
        return out

    seconds = in_turns({"ready": call}, 15)["ready"]
    return {"ready_s": statistics.median(seconds), "returned_s": statistics.median(returns[1:])}


def main() -> None:
    """Runs every case, prints a line for each, and writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scale", type=float, default=1)
    args = parser.parse_args()
    shapes = model_shapes(args.scale)
    a, b = (0, 1, 2, 3), (4, 5, 6, 7)
    cases = {
        "model, rows of 4 -> columns of 2": (rows, a, cols, b[:2]),
        "model, rows of 4 -> columns of 4": (rows, a, cols, b),
        "model, rows of 4 -> rows of 4": (rows, a, rows, b),
        "model, 1 -> 1": (rows, a[:1], rows, b[:1]),
    }
    out: dict[str, Any] = {
        "host": f"{os.cpu_count()} x {cpu_name()}",
        "versions": {"jax": jax.__version__, "jreshard": jreshard.__version__, "python": platform.python_version()},
        "cases": {},
    }
    for name, (src_of, src_ids, dst_of, dst_ids) in cases.items():
        src = {n: src_of(src_ids, len(s)) for n, s in shapes.items()}
        dst = {n: dst_of(dst_ids, len(s)) for n, s in shapes.items()}
        params = {n: fill(s, src[n], i) for i, (n, s) in enumerate(shapes.items())}
        out["cases"][name] = compare(params, src, dst)
        if "memory" not in out:
            out["memory"] = memory(params, src, dst)
        report(name, out["cases"][name])
    count = 2000 if args.scale == 1 else 50
    for layout, src, dst in (
        ("1 -> 1", rows(a[:1], 2), rows(b[:1], 2)),
        ("rows of 4 -> rows of 4", rows(a, 2), rows(b, 2)),
        ("rows of 4 -> columns of 2", rows(a, 2), cols(b[:2], 2)),
    ):
        params = {f"w{i}": fill((64, 64), src, i) for i in range(count)}
        name = f"{count} x 16 KiB, {layout}"
        out["cases"][name] = compare(params, src, dst)
        report(name, out["cases"][name])
    one, many = overhead(1), overhead(count)
    out["overhead_per_leaf_us"] = {key: (many[key] - one[key]) / (count - 1) * 1e6 for key in one}
    print("memory beyond the destination:", {k: f"{v / 1e6:.1f} MB" for k, v in out["memory"].items()})
    print("overhead a leaf:", {k: f"{v:.1f} us" for k, v in out["overhead_per_leaf_us"].items()})
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(out, indent=1) + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def report(name: str, r: dict[str, Any]) -> None:
    times = "  ".join(
        f"{way} {r[way]['median_s'] * 1e3:8.1f} ms" + (f" ({r[way]['speedup']:.1f}x)" if "speedup" in r[way] else "")
        for way in ("device_put", "transfer", "transfer into")
    )
    print(f"{name:40} {r['bytes'] / 1e9:5.2f} GB  {times}", flush=True)


if __name__ == "__main__":
    main()
