"""NCCL communicators: this process's part of each, shared by all plans over the same devices."""

import ctypes
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jreshard._runtime import nccl
from jreshard._runtime.native import ERROR_BYTES, library, ordinals_of, told

_ID_BYTES = 128


class Communicator:
    """A communicator over an ordered tuple of devices.

    Every process with some of the devices makes it at the same time, with the same arguments.

    Args:
        devices: the device of each rank.
        unique_id: what `unique_id` gave one of the processes.
        timeout: seconds.

    Attributes:
        name: what tells it from all others.

    Raises:
        RuntimeError: NCCL cannot be used, or the others did not come in time.
    """

    def __init__(self, devices: Sequence[Any], unique_id: bytes, timeout: float) -> None:
        self.name = unique_id.hex()
        self._connected: set[tuple[int, int]] = set()
        self._lib = library()
        handle, error = ctypes.c_int64(), ctypes.create_string_buffer(ERROR_BYTES)
        ordinals = ordinals_of(devices)
        path = nccl.find().path.encode()
        if not self._lib.jreshard_nccl_join(
            path, unique_id, len(devices), ordinals.ctypes.data, timeout, ctypes.byref(handle), error, ERROR_BYTES
        ):
            raise RuntimeError(told(error))
        self.handle = handle.value
        # Also when Python ends: NCCL's threads must not outlive the driver.
        self._finalizer = weakref.finalize(self, self._lib.jreshard_nccl_close, self.handle)

    @property
    def broken(self) -> bool:
        """Whether it is of no use any more: an operation failed, a peer is gone, or it was closed."""
        return bool(self._lib.jreshard_nccl_broken(self.handle))

    def lacks(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """Whether some of the pairs have not been connected."""
        return not self._connected.issuperset(pairs)

    def connect(self, pairs: Iterable[tuple[int, int]], timeout: float) -> None:
        """Connects pairs of (sending rank, receiving rank) that are not yet; all processes do so together.

        Raises:
            RuntimeError: as the class.
        """
        new = sorted(set(pairs) - self._connected)
        if not new:
            return
        flat, error = np.array(new, np.int32), ctypes.create_string_buffer(ERROR_BYTES)
        if not self._lib.jreshard_nccl_warm_up(self.handle, flat.ctypes.data, len(new), timeout, error, ERROR_BYTES):
            raise RuntimeError(told(error))
        self._connected.update(new)

    def close(self) -> None:
        """Leaves the communicator."""
        self._finalizer()


def unique_id() -> bytes:
    """What all who are to join one communicator need; another one each time."""
    if os.environ.get("NCCL_COMM_ID"):
        raise RuntimeError("NCCL_COMM_ID is set, which would join all communicators into one; unset it")
    lib, out, error = library(), ctypes.create_string_buffer(_ID_BYTES), ctypes.create_string_buffer(ERROR_BYTES)
    if not lib.jreshard_nccl_unique_id(nccl.find().path.encode(), out, error, ERROR_BYTES):
        raise RuntimeError(told(error))
    return out.raw


_open: weakref.WeakValueDictionary[tuple[Any, ...], Communicator] = weakref.WeakValueDictionary()


def communicator_over(devices: tuple[Any, ...]) -> Communicator | None:
    """The communicator over these devices that plans use already, if it is of use."""
    found = _open.get(devices)
    return None if found is None or found.broken else found


def join(devices: tuple[Any, ...], unique_id: bytes, timeout: float) -> Communicator:
    """A new communicator, which `communicator_over` gives from now on."""
    if old := _open.pop(devices, None):
        old.close()
    made = _open[devices] = Communicator(devices, unique_id, timeout)
    return made
