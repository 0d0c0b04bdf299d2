"""The server that the members of groups meet at: one thread, which never waits for any one of them."""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from jreshard._control import auth
from jreshard._control.errors import FrameError
from jreshard._control.frames import MAX_FRAME, Message, Stream, encode
from jreshard._control.room import Entry, Room, Seat
from jreshard._control.sockets import Waker, close_on_fork, configure

BEAT = encode({"kind": "beat"})
# A member is sent, and sends, this many beats within the time in which silence is taken for death.
BEATS = 6
MAX_SILENCE = 86400.0
# Strangers, and members that have not yet said who they are; one more makes the hub drop the oldest.
_MAX_PENDING = 256
_MAX_WAITING = 1024  # to be accepted
# A member that has left more than this unread does not read at all.
_MAX_BACKLOG = 64 << 20
_TICK = 0.2
_IDLE = 5.0
_LINGER = 2.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Connection:
    """A connection, from the greeting to its end.

    Attributes:
        nonce: what its proof is expected over; None once that has been given.
        deadline: when it is dropped, unless it has joined a room by then.
        room: the room that it has a seat in, as `process`, described by `peer`.
        excused: its room has ended; it has been told, and is not listened to any more.
        done: it leaves, and has done its part of all that was begun.
    """

    stream: Stream
    nonce: bytes | None
    deadline: float
    room: Room | None = None
    excused: bool = False
    done: bool = False
    closed: bool = False
    process: int = -1
    peer: str = ""
    silence: float = 0.0
    heard: float = 0.0
    next_beat: float = 0.0


class Hub:
    """Serves any number of groups at one address.

    Args:
        host: the address to listen at, which the members reach.
        token: what members have to know; a fresh one if not given.
        handshake_timeout: how long a connection may take to say who it is, in seconds.

    Attributes:
        address: host and port.
        token: what members have to know.
    """

    def __init__(self, host: str = "127.0.0.1", *, token: bytes | None = None, handshake_timeout: float = 5.0) -> None:
        self.token = token or auth.new_token()
        self._handshake_timeout = handshake_timeout
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_WAITING)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        close_on_fork(self._listener)
        close_on_fork(self._selector)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker.receiver, selectors.EVENT_READ)
        self._accepting = True
        self._connections: dict[_Connection, None] = {}
        self._pending: dict[_Connection, None] = {}  # oldest first
        self._doomed: dict[_Connection, str] = {}  # to be dropped, and why, once what is being done is done
        self._rooms: dict[tuple[int, ...], Room] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="jreshard-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the hub, and with it the groups that meet here."""
        self._closing = True
        self._waker.wake()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            tick = time.monotonic()
            while not self._closing:
                self._serve_events(max(0.0, tick - time.monotonic()) if self._connections else _IDLE)
                if time.monotonic() >= tick:
                    self._check_clocks()
                    tick = time.monotonic() + _TICK
                self._drop_doomed()
            self._finish()
        finally:  # also after a fault of ours: the members notice at once, and do not wait for a hub that is no more
            for connection in self._connections:
                connection.stream.close()
            self._listener.close()
            self._selector.close()
            self._waker.close()

    def _finish(self) -> None:
        """Passes on what has been said before the end."""
        deadline = time.monotonic() + _LINGER
        self._serve_events(0.0)
        self._drop_doomed()
        for connection in self._connections:
            if connection.room is not None and connection.room.closed:
                self._turn_away(connection, connection.room)
        while any(connection.stream.backlog for connection in self._connections) and time.monotonic() < deadline:
            self._serve_events(_TICK)
            self._drop_doomed()

    def _serve_events(self, patience: float) -> None:
        for key, events in self._selector.select(patience):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._waker.receiver:
                self._waker.drain()
            elif not key.data.closed:  # by what came before it in this batch
                self._serve(key.data, events)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors or memory: again at the next tick, not in a busy loop
            _log.warning("jreshard: cannot accept a connection: %s", error)
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        if len(self._pending) >= _MAX_PENDING:
            self._drop(next(iter(self._pending)))
        configure(sock, self._handshake_timeout)
        nonce = auth.new_nonce()
        connection = _Connection(Stream(sock, MAX_FRAME), nonce, time.monotonic() + self._handshake_timeout)
        self._connections[connection] = self._pending[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._send(connection, auth.GREETING + nonce)

    def _serve(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(OSError):  # as in `_send`
                    connection.stream.flush()
                self._watch(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except FrameError as error:
            self._doomed.setdefault(connection, f"sent what jreshard does not send: {error}")
        except OSError as error:
            self._doomed.setdefault(connection, f"is gone: {error.strerror or error}")

    def _read(self, connection: _Connection) -> None:
        if connection.nonce is not None:
            self._admit(connection, connection.nonce)
            return
        connection.stream.fill()
        connection.heard = time.monotonic()
        while not (connection.excused or connection in self._doomed):
            message = connection.stream.message()
            if message is None:
                return
            if connection.room is None:
                self._join(connection, message)
            else:
                self._handle(connection, connection.room, message)

    def _admit(self, connection: _Connection, nonce: bytes) -> None:
        """Reads a stranger's proof, and not a byte more."""
        size = auth.NONCE_SIZE + auth.PROOF_SIZE
        connection.stream.fill(size - connection.stream.received)
        answer = connection.stream.take(size)
        if answer is None:
            return
        if not auth.is_member(self.token, nonce, answer):
            self._doomed[connection] = "does not know the token"
            return
        connection.nonce = None
        self._send(connection, auth.proof(self.token, b"hub", nonce, answer[: auth.NONCE_SIZE]))

    def _join(self, connection: _Connection, message: Message) -> None:
        match message:
            case {
                "kind": "join",
                "processes": list(members),
                "process": int(process),
                "peer": str(peer),
                "silence": int() | float() as silence,
            } if process in members and all(isinstance(p, int) for p in members) and 0 < silence <= MAX_SILENCE:
                pass
            case _:
                raise FrameError(f"expected a member to join, got {_kind(message)}")
        processes = tuple(members)
        room = self._rooms.get(processes)
        if room is not None and room.has(process):  # it has been restarted before its death was noticed
            self._end(room, process, f"process {process} has connected anew ({peer})")
            room = None
        if room is None:
            room = self._rooms[processes] = Room(processes)
        room.sit(process, Seat(peer, lambda data: self._send(connection, data)))
        del self._pending[connection]
        now = time.monotonic()
        connection.room, connection.process, connection.peer = room, process, peer
        connection.silence, connection.heard, connection.next_beat = silence, now, now + silence / BEATS
        configure(connection.stream.sock, silence)
        self._send(connection, encode({"kind": "joined", "peer": peer_here()}))

    def _handle(self, connection: _Connection, room: Room, message: Message) -> None:
        match message:
            case {"kind": "beat"}:
                pass
            case {"kind": "enter"} if room.closed:
                self._turn_away(connection, room)
            case {"kind": "enter", "call": int(call), "what": str(what), "payload": str(payload)}:
                room.enter(connection.process, Entry(call, what, payload))
            case {"kind": "leave", "call": int(call)}:
                room.leave(connection.process, call)
            case {"kind": "fail", "reason": str(reason)}:
                room.fail(connection.process, reason)
            case {"kind": "close", "unfinished": bool(unfinished)}:
                connection.done = not unfinished
                self._doomed[connection] = "has left the group" + (" in the midst of a transfer" if unfinished else "")
            case _:
                raise FrameError(f"a message of the kind {_kind(message)}")

    def _send(self, connection: _Connection, data: bytes) -> None:
        """Sends what can be sent now; never blocks, and leaves it to the end of the step to drop who is gone."""
        if connection.closed or connection in self._doomed:
            return
        if connection.stream.backlog > _MAX_BACKLOG:
            self._doomed[connection] = "does not read what it is sent"
            return
        with contextlib.suppress(OSError):  # what has arrived before the end is read first, and then the end is seen
            connection.stream.send(data)
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.stream.backlog else 0)
        if self._selector.get_key(connection.stream.sock).events != events:
            self._selector.modify(connection.stream.sock, events, connection)

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for connection in self._connections:
            if connection.room is None:
                if now > connection.deadline:
                    self._doomed.setdefault(connection, "did not say who it is in time")
            elif now - connection.heard > connection.silence:
                self._doomed.setdefault(connection, f"has not been heard of for {connection.silence:g} s")
            elif now >= connection.next_beat:
                connection.next_beat = now + connection.silence / BEATS
                self._send(connection, BEAT)
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True

    def _drop_doomed(self) -> None:
        while self._doomed:
            connection, reason = next(iter(self._doomed.items()))
            room, process = connection.room, connection.process
            self._drop(connection)
            if room is not None:
                reason = f"process {process} ({connection.peer}) {reason}"
                (self._go_home if connection.done else self._end)(room, process, reason)

    def _drop(self, connection: _Connection) -> None:
        self._doomed.pop(connection, None)
        self._pending.pop(connection, None)
        self._connections.pop(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.stream.sock)
        connection.stream.close()
        connection.closed = True

    def _end(self, room: Room, process: int, reason: str) -> None:
        """Tells all that `process` is gone; they connect anew for another group."""
        room.end(process, reason)
        self._forget(room)
        for connection in self._connections:
            if connection.room is room:
                self._excuse(connection)

    def _go_home(self, room: Room, process: int, reason: str) -> None:
        """Has the others go on with what is under way, but meet no more in this group."""
        room.go_home(process, reason)
        self._forget(room)
        for connection in self._connections:
            if connection.room is room and room.waits(connection.process):
                self._turn_away(connection, room)

    def _turn_away(self, connection: _Connection, room: Room) -> None:
        room.turn_away(connection.process)
        self._excuse(connection)

    def _excuse(self, connection: _Connection) -> None:
        connection.room, connection.excused = None, True
        connection.deadline = time.monotonic() + self._handshake_timeout

    def _forget(self, room: Room) -> None:
        """Who connects from now on makes another group."""
        if self._rooms.get(room.processes) is room:
            del self._rooms[room.processes]


def peer_here() -> str:
    """This process, for people elsewhere."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _kind(message: Message) -> str:
    return repr(message.get("kind"))[:80]
