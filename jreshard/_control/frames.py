"""Messages over a socket: a length of four bytes, then that much JSON. Nothing here ever blocks."""

import base64
import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from jreshard._control.errors import FrameError

# The largest message that a member sends; what the hub answers may hold one of these from each member.
MAX_FRAME = 8 << 20
_HEADER = struct.Struct("!I")
_CHUNK = 1 << 16

Message = dict[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """The frame of `message`."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def wrap(payload: Any) -> str:
    """What stands for `payload` in a message: text, which the hub passes on without looking into it."""
    if isinstance(payload, bytes | bytearray | memoryview):
        return "b" + base64.b64encode(payload).decode()
    return "j" + json.dumps(payload, separators=(",", ":"))


def unwrap(text: str) -> Any:
    """The inverse of `wrap`.

    Raises:
        FrameError: if `text` is not of `wrap`.
    """
    try:
        if text.startswith("b"):
            return base64.b64decode(text[1:], validate=True)
        if text.startswith("j"):
            return json.loads(text[1:])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a payload is neither JSON nor bytes: {error}") from None
    raise FrameError("a payload is neither JSON nor bytes")


class Stream:
    """One end of a connection. Any thread may send; one thread receives, and closes.

    Args:
        sock: a connected socket; becomes this object's.
        limit: the largest frame that is accepted, in bytes.
    """

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._limit = limit
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._lock = threading.Lock()  # held only for as long as the kernel copies

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent until the socket is writable again and `flush` is called."""
        return len(self._outgoing)

    @property
    def received(self) -> int:
        """How many bytes have arrived and were not taken yet."""
        return len(self._incoming)

    def send(self, data: bytes) -> None:
        """Sends what the kernel takes now, and keeps the rest.

        Raises:
            OSError: if the connection is broken.
        """
        with self._lock:
            self._outgoing += data
            self._flush()

    def flush(self) -> None:
        """Sends more of what was kept."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                sent = self.sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # nothing will ever be sent again
                raise
            del self._outgoing[:sent]

    def fill(self, size: int = _CHUNK) -> None:
        """Takes in what has arrived, `size` bytes at most.

        Raises:
            OSError: if the connection is broken, or was closed by the other side.
        """
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._incoming += data

    def take(self, size: int) -> bytes | None:
        """The next `size` bytes, if they have arrived."""
        if len(self._incoming) < size:
            return None
        data = bytes(self._incoming[:size])
        del self._incoming[:size]
        return data

    def message(self) -> Message | None:
        """The next message, if it has arrived.

        Raises:
            FrameError: if it is longer than the limit, or is not a JSON object.
        """
        if len(self._incoming) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._incoming)
        if size > self._limit:
            raise FrameError(f"a message of {size} bytes came; expected at most {self._limit}")
        end = _HEADER.size + size
        if len(self._incoming) < end:
            return None
        body = self._incoming[_HEADER.size : end]
        del self._incoming[:end]
        return _decode(body)

    def close(self) -> None:
        """Closes the socket."""
        with self._lock:
            self.sock.close()


def _decode(body: bytearray) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise FrameError(f"a message is a {type(message).__name__}; expected an object")
    return message
