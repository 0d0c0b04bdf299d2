"""A GPU by the driver alone: a stream beside JAX's, events, and waits that end."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from jreshard._runtime.driver import Driver, DriverError

T = TypeVar("T")

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_POLL_SECONDS = 20e-6


class Gpu:
    """A GPU with a stream of its own.

    Args:
        driver: the CUDA driver.
        ordinal: the GPU's number in this process.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self.context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._events = [ctypes.c_void_p(), ctypes.c_void_p()]
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), ordinal)
        with self.current():
            driver.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)
            for event in self._events:
                driver.call("cuEventCreate", ctypes.byref(event), 0)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the GPU's context, which JAX uses as well, that of the calling thread."""
        self.driver.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def used_bytes(self) -> int:
        """Memory that the driver has given away, to whomever."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def start_clock(self) -> None:
        """Marks the start of what is queued next."""
        self._record(self._events[0])

    def stop_clock(self) -> None:
        """Marks the end of what was queued."""
        self._record(self._events[1])

    def _record(self, event: ctypes.c_void_p) -> None:
        with self.current():
            self.driver.call("cuEventRecord", event, self.stream)

    def busy(self) -> bool:
        """Whether the stream has work left."""
        with self.current():
            try:
                self.driver.call("cuStreamQuery", self.stream)
            except DriverError as error:
                if error.result != _NOT_READY:
                    raise
                return True
        return False

    def elapsed(self, timeout: float) -> float:
        """Seconds between the two marks, once the stream is done.

        Raises:
            TimeoutError: it is not, in time.
        """
        deadline = time.monotonic() + timeout
        while self.busy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"GPU {self.ordinal} has not finished after {timeout:.0f} s")
            time.sleep(_POLL_SECONDS)
        milliseconds = ctypes.c_float()
        with self.current():
            self.driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return milliseconds.value / 1e3


def within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a thread of its own since it may never end.

    Raises:
        TimeoutError: it has not ended in time; the thread is left to itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} has not ended after {seconds:.0f} s")
    return results[0]


def pointer(array: Any) -> int:
    """Where the only shard of `array` lies."""
    [shard] = array.addressable_shards
    address: int = shard.data.unsafe_buffer_pointer()
    return address
