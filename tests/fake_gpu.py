"""Stand-ins for the CUDA driver, NCCL and cuBLAS that work at once, on the memory of CPU devices."""

import ctypes
import threading
import time
from typing import Any


def put(pointer: Any, value: Any) -> int:
    """Writes through what `ctypes.byref` made, and returns success."""
    pointer._obj.value = value
    return 0


class FakeDriver:
    """Contexts are 100 and more, streams 1000 times their context and more.

    Attributes:
        stuck: no stream ever finishes.
        loses: copies leave out the last byte.
    """

    def __init__(self, stuck: bool = False, loses: bool = False) -> None:
        self.stuck, self.loses = stuck, loses
        self.contexts: dict[int, list[int]] = {}
        self.events: dict[int, float] = {}
        self.work: dict[int, int] = {}  # how often a stream is still asked in vain
        self.made = 0

    def current(self) -> list[int]:
        return self.contexts.setdefault(threading.get_ident(), [])

    def cuGetErrorString(self, result: int, text: Any) -> int:
        return put(text, b"a fault")

    def cuDevicePrimaryCtxRetain(self, context: Any, ordinal: int) -> int:
        return put(context, 100 + ordinal)

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current().append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return put(context, self.current().pop())

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        assert flags == 1
        self.made += 1
        return put(stream, self.current()[-1] * 1000 + self.made)

    def cuStreamQuery(self, stream: Any) -> int:
        left = self.work.get(stream.value, 0)
        self.work[stream.value] = max(0, left - 1)
        return 600 if self.stuck or left else 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        self.made += 1
        return put(event, self.made)

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        assert stream.value // 1000 == self.current()[-1], "the stream is of another context"
        self.events[event.value] = time.perf_counter()
        self.work[stream.value] = 2
        return 0

    def cuEventElapsedTime(self, milliseconds: Any, start: Any, end: Any) -> int:
        return put(milliseconds, (self.events[end.value] - self.events[start.value]) * 1e3)

    def cuMemcpyAsync(self, dst: Any, src: Any, size: Any, stream: Any) -> int:
        assert stream.value // 1000 == self.current()[-1], "the stream is of another context"
        ctypes.memmove(dst.value, src.value, size.value - self.loses)
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        put(free, 30 << 30)
        return put(total, 100 << 30)


class FakeNccl:
    """Two ranks of one process.

    Attributes:
        hangs: making a communicator, or not at all.
        fails: the function that fails.
    """

    def __init__(self, hangs: bool = False, fails: str = "") -> None:
        self.hangs, self.fails = hangs, fails
        self.pending: dict[str, tuple[int, int, int]] = {}
        self.aborted: list[int] = []

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"unhandled system error"

    def ncclGetUniqueId(self, unique_id: Any) -> int:
        unique_id._obj.internal[0] = 7
        return 0

    def ncclCommInitRank(self, comm: Any, size: int, unique_id: Any, rank: int) -> int:
        assert size == 2
        assert unique_id.internal[0] == 7
        if self.hangs:
            time.sleep(10)
        return put(comm, 50 + rank)

    def ncclGroupStart(self) -> int:
        return 0

    def ncclSend(self, address: Any, size: Any, dtype: int, peer: int, comm: Any, stream: Any) -> int:
        return self._queue("send", address, size, dtype, peer, comm, stream)

    def ncclRecv(self, address: Any, size: Any, dtype: int, peer: int, comm: Any, stream: Any) -> int:
        return self._queue("recv", address, size, dtype, peer, comm, stream)

    def _queue(self, kind: str, address: Any, size: Any, dtype: int, peer: int, comm: Any, stream: Any) -> int:
        assert dtype == 1
        assert comm.value == 50 + 1 - peer, "the communicator of the peer"
        assert stream.value // 1000 == 100 + 1 - peer, "the stream of the peer's GPU"
        self.pending[kind] = address.value, size.value, peer
        return 5 if self.fails == kind else 0

    def ncclGroupEnd(self) -> int:
        if self.pending:
            (src, size, to), (dst, expected, origin) = self.pending.pop("send"), self.pending.pop("recv")
            assert (size, to, origin) == (expected, 1, 0)
            ctypes.memmove(dst, src, size)
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        self.aborted.append(comm.value)
        return 0


class FakeCublas:
    """Counts the products on each stream."""

    def __init__(self) -> None:
        self.streams: dict[int, int] = {}
        self.products: dict[int, int] = {}

    def cublasCreate_v2(self, handle: Any) -> int:
        return put(handle, 1 + len(self.streams))

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        self.streams[handle.value] = stream.value
        return 0

    def cublasGemmEx(self, handle: Any, *arguments: Any) -> int:
        assert len(arguments) == 18
        stream = self.streams[handle.value]
        self.products[stream] = self.products.get(stream, 0) + 1
        return 0
