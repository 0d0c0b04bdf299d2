"""What many copies lose between one and the next, on one stream and on several.

    python benchmarks/lanes.py --json lanes.json

A copy engine of a GPU pauses between two copies; copies on another stream may fill the pause. Needs a GPU. Copies
pieces of 1 GiB with the driver alone, in one batch for each stream, between the host and a GPU, and between two GPUs
where there are two: medians by the GPU's clock, as rates, and what each copy took beyond its share of one copy of all.
"""

import argparse
import contextlib
import ctypes
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from jreshard._runtime.driver import Driver, DriverError, open_driver
from jreshard.bench.gpu import Gpu

TOTAL = 1 << 30
PIECES = (256 << 10, 1 << 20, 4 << 20, 20 << 20)
LANES = (1, 2, 4, 8)
ROUNDS = 9
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_TIMEOUT = 20.0


@contextlib.contextmanager
def memory(gpu: Gpu, *, on_host: bool) -> Iterator[int]:
    """The address of so much memory."""
    driver, address = gpu.driver, ctypes.c_uint64()
    allocate, free = ("cuMemHostAlloc", "cuMemFreeHost") if on_host else ("cuMemAlloc_v2", "cuMemFree_v2")
    with gpu.current():
        driver.call(allocate, ctypes.byref(address), ctypes.c_size_t(TOTAL), *([0] if on_host else []))
    try:
        yield address.value
    finally:
        with gpu.current():
            driver.call(free, address)


def enqueue(driver: Driver, stream: ctypes.c_void_p, pairs: list[tuple[int, int]], size: int) -> None:
    """Copies of `size` bytes from the first to the second address of each pair, in one batch."""
    count = len(pairs)
    addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
    src, dst = zip(*pairs, strict=True)
    attributes, first, failed = (ctypes.c_uint * 6)(_STREAM_ORDER), ctypes.c_size_t(), ctypes.c_size_t()
    driver.call(
        "cuMemcpyBatchAsync", addresses(*dst), addresses(*src), sizes(*[size] * count), ctypes.c_size_t(count),
        attributes, ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed), stream,
    )  # fmt: skip


def seconds(gpu: Gpu, sides: list[Gpu], src: int, dst: int, size: int) -> float:
    """Median of copying all in pieces, which the streams of `sides` take in turn."""
    pairs = [(src + at, dst + at) for at in range(0, TOTAL - size + 1, size)]
    lanes = [pairs[i :: len(sides)] for i in range(len(sides))]
    event, times = ctypes.c_void_p(), []
    with gpu.current():
        gpu.driver.call("cuEventCreate", ctypes.byref(event), 0)
        for _ in range(ROUNDS):
            gpu.start_clock()
            for side, lane in zip(sides, lanes, strict=True):
                gpu.driver.call("cuEventRecord", event, gpu.stream)
                gpu.driver.call("cuStreamWaitEvent", side.stream, event, 0)
                enqueue(gpu.driver, side.stream, lane, size)
            for side in sides:
                gpu.driver.call("cuEventRecord", event, side.stream)
                gpu.driver.call("cuStreamWaitEvent", gpu.stream, event, 0)
            gpu.stop_clock()
            times.append(gpu.elapsed(_TIMEOUT))
    return statistics.median(times) * TOTAL / (len(pairs) * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        driver = open_driver()
        count = driver.device_count()
    except DriverError as error:
        parser.exit(1, f"needs a GPU: {error}\n")
    if count == 0:
        parser.exit(1, "needs a GPU\n")
    gpu = Gpu(driver, 0)
    sides = [Gpu(driver, 0) for _ in range(max(LANES))]
    cases = []
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(memory(gpu, on_host=False))
        host = stack.enter_context(memory(gpu, on_host=True))
        ways = {"host to GPU": (host, here), "GPU to host": (here, host)}
        if count > 1:
            other = Gpu(driver, 1)
            there = stack.enter_context(memory(other, on_host=False))
            with gpu.current():
                driver.call("cuCtxEnablePeerAccess", other.context, 0)
            ways["GPU to GPU"] = (there, here)
        for way, (src, dst) in ways.items():
            whole = seconds(gpu, sides[:1], src, dst, TOTAL)
            print(f"{way}: one copy {TOTAL / whole / 1e9:.1f} GB/s", flush=True)
            for size in PIECES:
                for lanes in LANES:
                    took = seconds(gpu, sides[:lanes], src, dst, size)
                    lost = (took - whole) / (TOTAL // size)
                    case = {"way": way, "bytes": size, "lanes": lanes, "bytes_per_s": TOTAL / took, "lost_s": lost}
                    cases.append(case | {"of_one_copy": whole / took})
                    print(f"  {size >> 10:6} KiB, {lanes} streams: {whole / took:.3f}, {1e6 * lost:.2f} us a copy")
    if args.json is not None:
        text = ctypes.create_string_buffer(100)
        with gpu.current():
            driver.call("cuDeviceGetName", text, len(text), 0)
        host_facts = {"device": text.value.decode(), "gpus": count, "cuda driver api": driver.api_version()}
        args.json.write_text(json.dumps({"host": host_facts, "total_bytes": TOTAL, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
