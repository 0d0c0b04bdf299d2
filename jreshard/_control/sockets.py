"""Sockets as the control plane wants them: prompt, kept alive, and not kept open by forked children."""

import contextlib
import os
import selectors
import socket
import weakref

# All sockets and selectors of this process; a child that is forked closes its copies.
_open: weakref.WeakSet[socket.socket | selectors.BaseSelector] = weakref.WeakSet()


def close_on_fork(thing: socket.socket | selectors.BaseSelector) -> None:
    """Sees to it that a forked child does not hold `thing` open.

    It would otherwise keep the connections of a dead parent open, and its peers would notice its death late.
    """
    _open.add(thing)


def _close_inherited() -> None:
    for thing in list(_open):
        thing.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_inherited)


def configure(sock: socket.socket, silence: float) -> None:
    """Makes a TCP connection send at once, and fail when the other host has been unreachable for `silence` seconds."""
    close_on_fork(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, round(silence / 6))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(silence * 1000)))


class Waker:
    """Ends another thread's wait for events."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        for end in (self.receiver, self._sender):
            end.setblocking(False)
            close_on_fork(end)

    def wake(self) -> None:
        """Makes `receiver` readable."""
        # Full: it is readable already. Closed: nobody waits any more.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def drain(self) -> None:
        """Forgets all calls of `wake` so far."""
        with contextlib.suppress(BlockingIOError):
            self.receiver.recv(4096)

    def close(self) -> None:
        """Closes both ends."""
        self.receiver.close()
        self._sender.close()
