"""The native core: loading the library, registering its FFI handlers, and the calls that Python makes.

A plain shared library behind `ctypes` and `jax.ffi.pycapsule` needs no Python ABI: one build serves every Python
version, and the handlers are all that XLA calls.
"""

import atexit
import ctypes
import socket
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import jax
import numpy as np

import jreshard

PUBLISH, RECEIVE, RELEASE = "jreshard_publish", "jreshard_receive", "jreshard_release"

ERROR_BYTES = 1024
_EXIT_SECONDS = 5.0
_LONGEST_SECONDS = 1e9  # what the clock's arithmetic can take


@cache
def library() -> ctypes.CDLL:
    """The native library, with its FFI handlers registered.

    Handlers are registered after the backend has started: a library that a backend refuses would otherwise keep it
    from starting at all.

    Raises:
        ImportError: the package was not built.
    """
    found = [path for base in jreshard.__path__ if (path := Path(base) / "libjreshard_native.so").exists()]
    if not found:
        raise ImportError(
            f"libjreshard_native.so is not in {list(jreshard.__path__)}; install jreshard with pip, "
            "in a clone of it with `pip install -e .`: there the folder hides an installed package"
        )
    lib = ctypes.CDLL(str(found[0]))
    lib.jreshard_open.restype = ctypes.c_bool
    lib.jreshard_open.argtypes = [
        ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.jreshard_open_nccl.restype = ctypes.c_bool
    lib.jreshard_open_nccl.argtypes = [
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64,
        ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.jreshard_close.restype = None
    lib.jreshard_close.argtypes = [ctypes.c_int64]
    lib.jreshard_begin.restype = ctypes.c_bool
    lib.jreshard_begin.argtypes = [ctypes.c_int64, ctypes.c_uint32, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t]
    lib.jreshard_release_now.restype = ctypes.c_bool
    lib.jreshard_release_now.argtypes = [ctypes.c_int64, ctypes.c_uint32]
    lib.jreshard_steps_run.restype = ctypes.c_int
    lib.jreshard_steps_run.argtypes = [ctypes.c_int64, ctypes.c_uint32]
    lib.jreshard_broken.restype = ctypes.c_bool
    lib.jreshard_broken.argtypes = [ctypes.c_int64]
    lib.jreshard_wait.restype = ctypes.c_bool
    lib.jreshard_wait.argtypes = [ctypes.c_int64, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    lib.jreshard_abort.restype = None
    lib.jreshard_abort.argtypes = [ctypes.c_int64, ctypes.c_uint32, ctypes.c_char_p]
    lib.jreshard_connect.restype = ctypes.c_bool
    lib.jreshard_connect.argtypes = [
        ctypes.c_int32, ctypes.c_int32, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.jreshard_connected.restype = ctypes.c_bool
    lib.jreshard_connected.argtypes = [ctypes.c_int32, ctypes.c_int32]
    lib.jreshard_disconnect.restype = ctypes.c_bool
    lib.jreshard_disconnect.argtypes = [ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t]
    lib.jreshard_drain.restype = None
    lib.jreshard_drain.argtypes = [ctypes.c_double]
    lib.jreshard_nccl_unique_id.restype = ctypes.c_bool
    lib.jreshard_nccl_unique_id.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    lib.jreshard_nccl_join.restype = ctypes.c_bool
    lib.jreshard_nccl_join.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_double,
        ctypes.POINTER(ctypes.c_int64), ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.jreshard_nccl_warm_up.restype = ctypes.c_bool
    lib.jreshard_nccl_warm_up.argtypes = [
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    lib.jreshard_nccl_broken.restype = ctypes.c_bool
    lib.jreshard_nccl_broken.argtypes = [ctypes.c_int64]
    lib.jreshard_nccl_close.restype = None
    lib.jreshard_nccl_close.argtypes = [ctypes.c_int64]
    # Calls that are under way when Python ends must not outlive the memory that the backend frees.
    atexit.register(lib.jreshard_drain, _EXIT_SECONDS)
    jax.devices()
    for target in (PUBLISH, RECEIVE, RELEASE):
        step = target.removeprefix("jreshard_")
        for platform, prefix in (("cpu", "jreshard_cpu_"), ("CUDA", "jreshard_cuda_")):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(lib, prefix + step)), platform=platform)
    return lib


def told(error: ctypes.Array[ctypes.c_char]) -> str:
    """What the core says went wrong; it names the package where the text may also reach users by way of XLA."""
    return "jreshard: " + error.value.decode(errors="replace").removeprefix("jreshard: ")


def connect_process(process: int, link: socket.socket, name: str) -> None:
    """Links this process with another of the same user on this machine, whose arrays are then read directly.

    Both sides do this, each with its end of the connection; nothing is sent before either has. Without a link to a
    process that a transfer needs, the transfer fails; so it does when the link breaks.

    Args:
        process: the other's number (`jax.process_index()` there).
        link: a connected Unix stream socket. It is duplicated, and may be closed afterwards.
        name: how errors call the other process.

    Raises:
        RuntimeError: the socket cannot serve, or the process is linked already.
    """
    error = ctypes.create_string_buffer(ERROR_BYTES)
    this = jax.process_index()
    if not library().jreshard_connect(this, process, link.fileno(), name.encode(), error, ERROR_BYTES):
        raise RuntimeError(told(error))


def disconnect_process(process: int) -> None:
    """Ends the link with another process, if there is one; transfers under way that need it fail."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    if not library().jreshard_disconnect(jax.process_index(), process, error, ERROR_BYTES):
        raise RuntimeError(told(error))


def is_connected(process: int) -> bool:
    """Whether there is a link with another process."""
    return bool(library().jreshard_connected(jax.process_index(), process))


class _Calls:
    """Numbers of calls: they only rise, also past those that other processes have chosen."""

    def __init__(self) -> None:
        self._last, self._lock = 0, threading.Lock()

    def next(self) -> int:
        """The next one."""
        with self._lock:
            self._last += 1
            return self._last % 2**32

    def reach(self, number: int) -> int:
        """Sees to it that the next one is higher than `number`, which it returns."""
        with self._lock:
            self._last = max(self._last, number)
            return number


_calls = _Calls()


class TransferError(RuntimeError):
    """A transfer that was under way and failed; its result is not there."""


class ExchangeBroken(RuntimeError):
    """An exchange that takes no more calls."""


def ordinals_of(devices: Sequence[jax.Device]) -> np.ndarray:
    """`int32[devices]`: what handlers are told of each device of this process; -1 for those of other processes.

    For GPUs the ordinal within the process, for CPU devices the id among all.
    """
    mine = jax.process_index()
    told = [d.local_hardware_id if d.platform == "gpu" else d.id for d in devices]
    return np.array([t if d.process_index == mine else -1 for t, d in zip(told, devices, strict=True)], np.int32)


class Exchange:
    """One plan's table of copies in the native core, until `close`.

    Args:
        key: what the compiled programs carry as their attribute; equal tables may share a key.
        table: the words of `plan_words`.
        devices: the device of each rank; those of other processes too.
        nccl: the handle of an NCCL communicator over these devices, which may be of several processes, and how many
            bytes one wave may stage.
    """

    def __init__(
        self, key: int, table: np.ndarray, devices: Sequence[jax.Device], nccl: tuple[int, int] | None = None
    ) -> None:
        self.key = key
        self._lib = library()
        error = ctypes.create_string_buffer(ERROR_BYTES)
        names = "\n".join(map(str, devices)).encode()
        ordinals = ordinals_of(devices)
        table = np.ascontiguousarray(table, np.int64)
        words = table.ctypes.data, table.size
        if nccl is not None:
            opened = self._lib.jreshard_open_nccl(key, *words, ordinals.ctypes.data, names, *nccl, error, ERROR_BYTES)
        else:
            gpu = devices[0].platform == "gpu"
            processes = np.array([device.process_index for device in devices], np.int32)
            opened = self._lib.jreshard_open(
                key, gpu, *words, ordinals.ctypes.data, processes.ctypes.data, jax.process_index(), names, error,
                ERROR_BYTES,
            )  # fmt: skip
        if not opened:
            raise RuntimeError(told(error))

    @staticmethod
    def next_call() -> int:
        """A number for the next call, higher than all that this process has used."""
        return _calls.next()

    @staticmethod
    def agree_on_call(proposed: Iterable[int]) -> int:
        """The number that processes use which have proposed these."""
        return _calls.reach(max(proposed))

    def begin(self, call: int, timeout: float) -> None:
        """Opens a call that fails by itself after `timeout` seconds.

        Args:
            call: its number, the same in all processes that take part, and used for no other call of this exchange.
            timeout: seconds.

        Raises:
            ExchangeBroken: an earlier call failed in a way that leaves this exchange unusable.
        """
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if not self._lib.jreshard_begin(self.key, call, min(timeout, _LONGEST_SECONDS), error, ERROR_BYTES):
            raise ExchangeBroken(told(error))

    @property
    def broken(self) -> bool:
        """Whether a call has failed in a way after which no other can be opened."""
        return bool(self._lib.jreshard_broken(self.key))

    def wait(self, call: int) -> None:
        """Returns when the call has ended; at once where the arrays themselves tell how it ended.

        Raises:
            TransferError: it failed.
        """
        error = ctypes.create_string_buffer(ERROR_BYTES)
        if not self._lib.jreshard_wait(self.key, call, error, ERROR_BYTES):
            raise TransferError(told(error))

    def release_now(self, call: int) -> bool:
        """Whether every reader of the call is done already; if so, no release is to follow."""
        return bool(self._lib.jreshard_release_now(self.key, call))

    def steps_run(self, call: int) -> int:
        """How many publish and receive steps of the call have run: one a chunk on each device of this process.

        0 where they run later than they are launched, between CPU devices; elsewhere more than there are once the call
        has ended.
        """
        return int(self._lib.jreshard_steps_run(self.key, call))

    def abort(self, call: int, reason: str) -> None:
        """Fails the call, if it is still open; whoever waits for it gets `reason` as the error."""
        self._lib.jreshard_abort(self.key, call, reason.encode())

    def close(self) -> None:
        """Forgets the table, once calls that are under way have ended."""
        self._lib.jreshard_close(self.key)
