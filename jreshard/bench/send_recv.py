"""`ncclSend` and `ncclRecv` of one large message, over communicators of their own, with no jreshard around them.

Names and numbers are those of nccl.h.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

from jax import Array

from jreshard.bench.gpu import Gpu, pointer, within
from jreshard.bench.peers import Peers

_UINT8 = 1  # ncclUint8
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_ABORT_SECONDS = 5


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * _ID_BYTES),)


def open_nccl(path: str) -> Any:
    """The library at `path`, which is in the process already."""
    library = ctypes.CDLL(path)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


class SendRecv:
    """One communicator over two GPUs, of this process or of two.

    Args:
        library: NCCL, or what stands in for it.
        gpus: the GPUs of this process, by rank.
        peers: the line to the other process.
        timeout: seconds for making the communicator, and for each message.
    """

    def __init__(self, library: Any, gpus: Mapping[int, Gpu], peers: Peers, timeout: float) -> None:
        self._library, self._gpus, self._timeout = library, gpus, timeout
        self._comms = {rank: ctypes.c_void_p() for rank in gpus}
        unique_id = self._unique_id(peers)
        within(timeout, "making the NCCL communicator", lambda: self._connect(unique_id))

    def _unique_id(self, peers: Peers) -> _UniqueId:
        """Made by the process of rank 0."""
        made = _UniqueId()
        if 0 in self._gpus:
            self._call("ncclGetUniqueId", ctypes.byref(made))
        said = peers.gather(bytes(made).hex() if 0 in self._gpus else None)
        [text] = [text for text in said if text is not None]
        return _UniqueId.from_buffer_copy(bytes.fromhex(text))

    def _connect(self, unique_id: _UniqueId) -> None:
        self._call("ncclGroupStart")
        for rank, gpu in self._gpus.items():
            with gpu.current():
                self._call("ncclCommInitRank", ctypes.byref(self._comms[rank]), 2, unique_id, rank)
        self._call("ncclGroupEnd")

    def send(self, src: Array | None, dst: Array | None, nbytes: int) -> float:
        """Moves a message from rank 0 to rank 1, and returns the seconds that the GPUs of this process were at it.

        Args:
            src: on rank 0, if that is in this process.
            dst: on rank 1, likewise.
            nbytes: the message's size.
        """
        try:
            # The first message connects the two, which blocks until both are there.
            within(self._timeout, "starting an NCCL message", lambda: self._launch(src, dst, nbytes))
            return max((gpu.elapsed(self._timeout) for gpu in self._gpus.values()), default=0.0)
        except TimeoutError:
            within(_ABORT_SECONDS, "ncclCommAbort", self._abort)
            raise

    def _launch(self, src: Array | None, dst: Array | None, nbytes: int) -> None:
        for gpu in self._gpus.values():
            gpu.start_clock()
        self._call("ncclGroupStart")
        for rank, (name, array) in enumerate((("ncclSend", src), ("ncclRecv", dst))):
            if array is not None:
                address, size = ctypes.c_void_p(pointer(array)), ctypes.c_size_t(nbytes)
                self._call(name, address, size, _UINT8, 1 - rank, self._comms[rank], self._gpus[rank].stream)
        self._call("ncclGroupEnd")
        for gpu in self._gpus.values():
            gpu.stop_clock()

    def _abort(self) -> None:
        for comm in self._comms.values():
            self._library.ncclCommAbort(comm)

    def _call(self, name: str, *args: Any) -> None:
        if result := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} failed: {self._library.ncclGetErrorString(result).decode()} ({result})")
