"""Transfers between two GPUs of one process, against the copy engine's ceiling and `jax.device_put`, in one run.

    python benchmarks/gpu_p2p.py --json benchmarks/results/gpu_p2p.json

`--scale 0.001` runs the same cases small, also on two simulated CPU devices, to try the script.
"""

import argparse
import ctypes
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jreshard

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
REPEATS = 7


def llama_8b(scale: float) -> dict[str, tuple[int, ...]]:
    """Shapes of Llama-3.1-8B, one array a weight: 291 leaves, 8.03e9 parameters."""
    layers = 32 if scale == 1 else 2
    hidden, ffn, vocab, kv = 4096, 14336, 128256, 1024
    shapes = {"embed": (vocab, hidden), "lm_head": (hidden, vocab), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"{i}.q": (hidden, hidden),
            f"{i}.k": (hidden, kv),
            f"{i}.v": (hidden, kv),
            f"{i}.o": (hidden, hidden),
            f"{i}.gate": (hidden, ffn),
            f"{i}.up": (hidden, ffn),
            f"{i}.down": (ffn, hidden),
            f"{i}.norm1": (hidden,),
            f"{i}.norm2": (hidden,),
        }
    shrink = 1 if scale == 1 else 32
    return {name: tuple(n // shrink for n in shape) for name, shape in shapes.items()}


def on(devices: list[Any], spec: P) -> NamedSharding:
    """The spec over a one-dimensional mesh of the devices, axis `x`."""
    return NamedSharding(Mesh(np.array(devices), ("x",)), spec)


def rows_of(shape: tuple[int, ...]) -> P:
    return P("x")


def cols_of(shape: tuple[int, ...]) -> P:
    return P(None, "x") if len(shape) == 2 else P("x")


def cases(scale: float) -> dict[str, tuple[dict[str, tuple[int, ...]], Any, Any, str]]:
    """Each case: shapes, sharding of the source and of the destination by shape, dtype."""
    a, b = jax.devices()[:2]
    big = (int(8 * scale * GIB) // 8192 // 2 * 2, 4096)
    two = (int(2 * scale * GIB) // 8192 // 2 * 2, 4096)

    def single(device: Any) -> Callable[[tuple[int, ...]], NamedSharding]:
        return lambda shape: on([device], P())

    def both(spec: Callable[[tuple[int, ...]], P]) -> Callable[[tuple[int, ...]], NamedSharding]:
        return lambda shape: on([a, b], spec(shape))

    medium = {f"w{i}": (2560, 4096) for i in range(max(2, int(400 * scale)))}
    small = {f"w{i}": (64, 128) for i in range(2000 if scale == 1 else 20)}
    llama = llama_8b(scale)
    return {
        "8 GiB, 0 -> 1": ({"w": big}, single(a), single(b), "bfloat16"),
        "llama-8b, 0 -> 1": (llama, single(a), single(b), "bfloat16"),
        "400 x 20 MiB, 0 -> 1": (medium, single(a), single(b), "bfloat16"),
        "2000 x 16 KiB, 0 -> 1": (small, single(a), single(b), "bfloat16"),
        "2 GiB, {0,1} rows -> 1": ({"w": two}, both(rows_of), single(b), "bfloat16"),
        "2 GiB, 0 -> {0,1} cols": ({"w": two}, single(a), both(cols_of), "bfloat16"),
        "2 GiB, {0,1} rows -> cols": ({"w": two}, both(rows_of), both(cols_of), "bfloat16"),
        "llama-8b, {0,1} rows -> 1": (llama, both(rows_of), single(b), "bfloat16"),
        "llama-8b, 0 -> {0,1} cols": (llama, single(a), both(cols_of), "bfloat16"),
        "llama-8b, fsdp=2 -> tp=2": (llama, both(rows_of), both(cols_of), "bfloat16"),
    }


def median_seconds(call: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float, float]:
    """Median, least and most of the time from call to ready."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times), max(times)


def copy_engine_ceiling(nbytes: int) -> float | None:
    """Bytes a second of one large copy between the two GPUs' arrays by the driver alone; `None` without GPUs."""
    if jax.devices()[0].platform != "gpu":
        return None
    cuda = ctypes.CDLL("libcuda.so.1")
    shape = (nbytes // 2,)
    src = jax.device_put(jnp.ones(shape, jnp.bfloat16), jax.devices()[0])
    dst = jax.device_put(jnp.zeros(shape, jnp.bfloat16), jax.devices()[1])
    jax.block_until_ready((src, dst))
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), 1)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxPushCurrent_v2(context)
    cuda.cuStreamCreate(ctypes.byref(stream), 1)

    def copy() -> None:
        result = cuda.cuMemcpyAsync(
            ctypes.c_uint64(dst.unsafe_buffer_pointer()),
            ctypes.c_uint64(src.unsafe_buffer_pointer()),
            ctypes.c_size_t(nbytes),
            stream,
        )
        if result or cuda.cuStreamSynchronize(stream):
            raise RuntimeError(f"cuMemcpyAsync failed: {result}")

    seconds = median_seconds(copy)[0]
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    return nbytes / seconds


@functools.lru_cache
def filler(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Any:
    """A program that fills an array of this kind with values that depend on the position and a seed."""

    def make(seed: Any) -> Any:
        row = jnp.arange(shape[-1], dtype=jnp.float32) % 251 + seed
        column = jnp.arange(shape[0], dtype=jnp.float32)[:, None] % 127 if len(shape) == 2 else 0
        return (row + column).astype(dtype)

    return jax.jit(make, out_shardings=sharding)


def fill(shape: tuple[int, ...], dtype: str, sharding: NamedSharding, seed: int) -> Any:
    return filler(shape, dtype, sharding)(np.float32(seed))


def run_case(shapes: Any, src: Any, dst: Any, dtype: str, with_device_put: bool) -> dict[str, Any]:
    """Times one case three ways."""
    src_tree = {name: src(shape) for name, shape in shapes.items()}
    dst_tree = {name: dst(shape) for name, shape in shapes.items()}
    params = {name: fill(shape, dtype, src_tree[name], i) for i, (name, shape) in enumerate(shapes.items())}
    jax.block_until_ready(params)
    plan = jreshard.plan(params, src_tree, dst_tree)
    got = jreshard.transfer(params, src_tree, dst_tree)
    for name in list(shapes)[:: max(1, len(shapes) // 5)]:
        if params[name].nbytes <= 1 << 28:
            np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), np.asarray(params[name]).view(np.uint8))
    state = {"old": got}
    del got

    def into() -> Any:
        state["old"] = jreshard.transfer(params, src_tree, dst_tree, into=state["old"])
        return state["old"]

    start = time.perf_counter()
    queued = into()
    dispatch = time.perf_counter() - start
    jax.block_until_ready(queued)
    del queued
    out: dict[str, Any] = {"dispatch_first_s": dispatch}
    out["into_s"] = median_seconds(into)
    start = time.perf_counter()
    queued = into()
    out["dispatch_s"] = time.perf_counter() - start
    jax.block_until_ready(queued)
    del queued
    state.clear()
    out["new_s"] = median_seconds(lambda: jreshard.transfer(params, src_tree, dst_tree))
    if with_device_put:
        out["device_put_s"] = median_seconds(lambda: jax.device_put(params, dst_tree), 3)
    one_way = plan.traffic - np.diag(plan.traffic.diagonal())
    out |= {"bytes_moved": plan.bytes_moved, "bytes_local": plan.bytes_local, "busiest_pair": int(one_way.max())}
    return out


def main() -> None:
    """Runs all cases and prints a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scale", type=float, default=1)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.scale != 1:
        jax.config.update("jax_num_cpu_devices", 2)
    ceiling = copy_engine_ceiling(int(8 * GIB * args.scale))
    device = jax.devices()[0]
    out: dict[str, Any] = {
        "host": f"{len(jax.devices())} x {device.device_kind}, {platform.machine()}",
        "versions": {"jax": jax.__version__, "jreshard": jreshard.__version__, "python": platform.python_version()},
        "copy_engine_bytes_per_s": ceiling,
        "cases": {},
    }
    print(out, flush=True)
    for name, (shapes, src, dst, dtype) in cases(args.scale).items():
        if args.only not in name:
            continue
        r = run_case(shapes, src, dst, dtype, with_device_put=True)
        out["cases"][name] = r
        if ceiling:
            r["of_ceiling"] = r["busiest_pair"] / ceiling / r["into_s"][0]
        put, into = r["device_put_s"][0], r["into_s"][0]
        times = {"into": into, "new": r["new_s"][0], "dispatch": r["dispatch_s"], "device_put": put}
        line = "  ".join(f"{way} {seconds * 1e3:8.2f} ms" for way, seconds in times.items())
        print(f"{name:28} {line} ({put / into:5.1f}x)  of ceiling {r.get('of_ceiling', 0):.3f}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
