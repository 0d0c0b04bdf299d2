"""A member's side of a group: rounds, and news of failures."""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jreshard._control import auth
from jreshard._control.errors import FrameError, MismatchError, PeerLost, PeerTimeout, seconds
from jreshard._control.frames import MAX_FRAME, Message, Stream, encode, unwrap, wrap
from jreshard._control.hub import BEAT, BEATS, MAX_SILENCE, peer_here
from jreshard._control.sockets import Waker, configure

SILENCE = 30.0
# How long the hub may take to confirm that a member whose deadline has passed is out of the round.
_GRACE = 2.0
# How long connecting and proving the token may take; both are tried again by who looks for a hub.
_HANDSHAKE = 5.0
# No frame may become longer than what four bytes can say, with margin.
_MAX_ANSWER = 1 << 31
_MAX_REASON = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Loss:
    """How a group has ended.

    Attributes:
        reason: why, in words.
        process: because of whom.
        left: that one has left, having done its part.
    """

    reason: str
    process: int
    left: bool = False


class Group:
    """Processes that take part in transfers together, as one of them sees it. Made by `join`.

    All methods may be called from any thread. A group cannot be used by a process that was forked from a member.

    Attributes:
        processes: the members' indices, ascending.
        process: this one's.
    """

    def __init__(self, stream: Stream, processes: tuple[int, ...], process: int, hub_peer: str, silence: float) -> None:
        self.processes = processes
        self.process = process
        self._stream = stream
        self._hub_peer = hub_peer
        self._silence = silence
        self._max_frame = min(MAX_FRAME, _MAX_ANSWER // len(processes))
        self._pid = os.getpid()
        self._turn = threading.Lock()  # a process takes part in one round at a time
        self._changed = threading.Condition()  # guards all that follows
        self._calls = 0
        self._waiting: int | None = None
        self._answer: Message | None = None
        self._lost: _Loss | None = None
        self._callbacks: dict[object, Callable[[str], None]] = {}
        self._in_call = False
        self._counted_on = False  # others go on as agreed, and what this process has to do is not done
        self._closing = False
        self._waker = Waker()
        self._reader = threading.Thread(target=self._run, name="jreshard-group", daemon=True)
        self._reader.start()

    @property
    def broken(self) -> bool:
        """Whether a member is gone, or this one has closed the group."""
        return self._closing or self._lost is not None

    def gather(self, what: str, payload: Any, timeout: float) -> dict[int, Any]:
        """Waits for all members to come, and gives each what all have brought.

        Either all that are in the round get its outcome or nobody does, but for one case: if the hub does not answer
        for two seconds after the deadline has passed here, this call gives up, and should the hub then turn out to have
        counted it, the others' callbacks of `on_failure` are called.

        Args:
            what: what the caller is about to do, in words, with a fingerprint of all that must be equal everywhere.
            payload: bytes, or what JSON can hold (tuples arrive as lists, keys as strings); 8 MiB at most.
            timeout: how long to wait for the others, in seconds.

        Returns:
            The payload of each process, in the order of their indices.

        Raises:
            MismatchError: all have come, and not all are about to do the same.
            PeerTimeout: the timeout is over; names who has not come. The group remains usable.
            PeerLost: a process is gone, now or earlier; connect anew for another group.
            ValueError: the payload is too large.

        Example:
            >>> group.gather("transfer of 291 leaves, fingerprint 7451ad8b", {"ready": True}, timeout=60)
            {0: {'ready': True}, 1: {'ready': True}}
        """
        deadline = time.monotonic() + timeout
        self._check_process()
        self.check_usable(what)
        if not self._turn.acquire(timeout=max(0.0, timeout)):
            message = f"{what}: another thread of this process has been in a round for all of {seconds(timeout)}"
            raise PeerTimeout(message, [self.process])
        try:
            answer = self._take_part(what, payload, deadline)
        finally:
            self._turn.release()
        match answer:
            case {"kind": "agreed", "payloads": dict(payloads)}:
                return {process: unwrap(payloads[str(process)]) for process in self.processes}
            case {"kind": "mismatch", "said": dict(said)}:
                raise MismatchError(f"the processes are about to do different things: {_quote(said)}", _by_index(said))
            case {"kind": "left", "missing": dict(missing), "said": dict(said)}:
                self._raise_timeout(what, _by_index(missing), said, timeout)
            case _:
                hub = self.processes[0]
                names = f"process {hub} ({self._hub_peer}), at which the processes meet,"
                raise PeerTimeout(f"{what}: {names} did not answer within {seconds(timeout)}", [hub])

    def fail(self, reason: str) -> None:
        """Tells all other members at once that what is under way has failed here.

        Their callbacks of `on_failure` are called with "process 1: reason"; the group remains usable. Where the group
        is broken they have been told already. Never blocks.
        """
        self._check_process()
        self._send({"kind": "fail", "reason": reason[:_MAX_REASON]})
        with self._changed:
            self._counted_on = False

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls `callback` with the reason whenever another member reports a failure, and when one is gone.

        Not when one has left that has done its part of what is under way (see `in_call`). Who waits for it in a round
        is told, and so is who begins one.

        Callbacks run on the group's reader thread, one after the other: they must be quick, and must not gather. If the
        group is broken already, `callback` is called at once, in this thread.

        Returns:
            A function that ends this; a call that is under way then is not waited for.
        """
        self._check_process()
        token = object()
        with self._changed:
            self._callbacks[token] = callback
            lost = self._lost
        if lost is not None and not lost.left:
            callback(lost.reason)

        def unsubscribe() -> None:
            with self._changed:
                self._callbacks.pop(token, None)

        return unsubscribe

    @contextlib.contextmanager
    def in_call(self) -> Iterator[None]:
        """Rounds within begin something that is not done before the context ends without an error, or `fail` is called.

        Who closes the group before that has died, to the others.
        """
        self._in_call = True
        try:
            yield
            with self._changed:
                self._counted_on = False
        finally:
            self._in_call = False

    def close(self) -> None:
        """Leaves the group: the others cannot meet in it any more, but go on with what is under way."""
        self._closing = True
        self._waker.wake()
        if threading.current_thread() is not self._reader and os.getpid() == self._pid:
            self._reader.join(timeout=10)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # its locks may be held by threads that are not in this process
            raise RuntimeError(f"the group belongs to pid {self._pid}, from which this process was forked")

    def check_usable(self, what: str) -> None:
        """Raises `PeerLost` where a process is gone, and `RuntimeError` where this one has closed the group."""
        if self._closing:
            raise RuntimeError(f"{what}: the group was closed")
        if self._lost is not None:
            raise PeerLost(f"{what}: {self._lost.reason}", self._lost.process)

    def _take_part(self, what: str, payload: Any, deadline: float) -> Message | None:
        """Enters a round, and leaves it at the deadline; the hub's answer, if there is one."""
        with self._changed:
            self._calls += 1
            call = self._waiting = self._calls
            self._answer = None
            self._counted_on = False
        try:
            frame = encode({"kind": "enter", "call": call, "what": what, "payload": wrap(payload)})
            if len(frame) > self._max_frame:
                raise ValueError(f"{what}: the payload takes {len(frame)} bytes; at most {self._max_frame} can be sent")
            self._send(frame)
            if not self._await_answer(what, deadline):
                self._send({"kind": "leave", "call": call})
                self._await_answer(what, time.monotonic() + _GRACE)
            return self._withdraw()
        except BaseException:  # an interrupt, mostly: the round must not count on this process
            self._send({"kind": "leave", "call": call})
            if (answer := self._withdraw()) is not None:
                self._disown(answer)
            raise

    def _withdraw(self) -> Message | None:
        """Ends the wait for an answer; the one that has come."""
        with self._changed:
            self._waiting = None
            return self._answer

    def _disown(self, answer: Message) -> None:
        """Tells the others if they count on this process for a call that has given up, or was interrupted."""
        if answer["kind"] == "agreed":
            self.fail("gave up before it knew that all had come")

    def _await_answer(self, what: str, deadline: float) -> bool:
        """Whether there is an answer by the deadline."""
        with self._changed:
            while self._answer is None:
                self.check_usable(what)
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _raise_timeout(
        self, what: str, missing: Mapping[int, str | None], said: Mapping[str, str], timeout: float
    ) -> NoReturn:
        names = _list([f"process {p} ({peer or 'not connected'})" for p, peer in missing.items()])
        message = f"{what}: {names} did not come within {seconds(timeout)}"
        if any(other != what for other in said.values()):
            message += f"; and those that came are about to do different things: {_quote(said)}"
        raise PeerTimeout(message, missing)

    def _send(self, message: Message | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        # Where the connection is broken, the reader reads what has arrived before, and then finds out and tells.
        with contextlib.suppress(OSError):
            self._stream.send(data)
        if self._stream.backlog and threading.current_thread() is not self._reader:
            self._waker.wake()  # the reader sends the rest

    def _run(self) -> None:
        lost = _Loss("the thread that reads what the hub sends has failed", self.process)
        try:
            lost = self._read()
        finally:
            self._stream.close()
            self._waker.close()
            with self._changed:
                self._lost = lost
                self._changed.notify_all()
                callbacks = list(self._callbacks.values())
            if not (self._closing or lost.left):
                _call(callbacks, lost.reason)

    def _read(self) -> _Loss:
        """Reads until the group ends; why, and because of whom."""
        hub = self.processes[0]
        name = f"process {hub} ({self._hub_peer})"
        try:
            return self._listen(name)
        except FrameError as error:
            return _Loss(f"{name} sent what jreshard does not send: {error}", hub)
        except OSError as error:
            return _Loss(f"{name} is gone: {error.strerror or error}", hub)

    def _listen(self, hub_name: str) -> _Loss:
        sock, wake = self._stream.sock.fileno(), self._waker.receiver.fileno()
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        heard = time.monotonic()
        next_beat = heard
        while not self._closing:
            poll.register(sock, select.POLLIN | (select.POLLOUT if self._stream.backlog else 0))
            events = dict(poll.poll(1000 * max(0.0, next_beat - time.monotonic())))
            if wake in events:
                self._waker.drain()
            if events.get(sock, 0) & select.POLLOUT:
                self._send(b"")  # what is left
            if events.get(sock, 0) & ~select.POLLOUT:
                self._stream.fill()
                heard = time.monotonic()
            elif time.monotonic() - heard > self._silence:  # only if nothing waits to be read: we may have been stopped
                return _Loss(f"{hub_name} has not been heard of for {self._silence:g} s", self.processes[0])
            while (message := self._stream.message()) is not None:
                match message:
                    case {"kind": "broken", "process": int(process), "reason": str(reason), "left": bool(left)}:
                        return _Loss(reason, process, left)
                    case _:
                        self._handle(message)
            if time.monotonic() >= next_beat:
                self._send(BEAT)
                next_beat = time.monotonic() + self._silence / BEATS
        self._send({"kind": "close", "unfinished": self._counted_on})
        return _Loss("the group was closed", self.process, left=True)

    def _handle(self, message: Message) -> None:
        match message:
            case {"kind": "beat"}:
                pass
            case {"kind": "agreed" | "mismatch", "calls": dict(calls)}:
                self._settle(calls[str(self.process)], message)
            case {"kind": "left", "call": int(call)}:
                self._settle(call, message)
            case {"kind": "failed", "process": int(process), "reason": str(reason)}:
                with self._changed:
                    callbacks = list(self._callbacks.values())
                _call(callbacks, f"process {process}: {reason}")
            case _:
                raise FrameError(f"a message of the kind {message.get('kind')!r}"[:100])

    def _settle(self, call: int, answer: Message) -> None:
        with self._changed:
            current = call == self._waiting
            if current:
                self._answer = answer
                # Here, and not where the answer is waited for: an interrupt may come between.
                self._counted_on = self._in_call and answer["kind"] == "agreed"
                self._changed.notify_all()
        if not current:
            self._disown(answer)


def join(
    address: tuple[str, int],
    token: bytes,
    processes: Iterable[int],
    process: int,
    *,
    timeout: float,
    silence: float = SILENCE,
) -> Group:
    """Connects to the hub of a group. The others need not be there yet.

    Args:
        address: host and port of the hub, which is in the process with the lowest index.
        token: the hub's token.
        processes: the indices of all members.
        process: this one's index.
        timeout: how long to try, in seconds.
        silence: after how many seconds without a sign of life a process counts as dead. A process that dies is
            noticed at once; one that is stopped, or whose host cannot be reached, after this time. Must exceed the
            time for which any extension module may hold the interpreter lock.

    Raises:
        OSError: the hub cannot be reached, does not answer in time, or does not know the token.
    """
    members = tuple(sorted(set(processes)))
    if process not in members:
        raise ValueError(f"process {process} is not among the group's processes {list(members)}")
    if not 0 < silence <= MAX_SILENCE:
        raise ValueError(f"silence is {silence!r}; expected seconds, more than 0 and at most {MAX_SILENCE:g}")
    deadline = time.monotonic() + timeout
    sock = socket.create_connection(address, min(timeout, _HANDSHAKE))
    try:
        if sock.getsockname() == sock.getpeername():  # happens to who dials a local port that nobody listens at
            raise ConnectionRefusedError("nobody listens there")
        configure(sock, silence)
        auth.authenticate(sock, token, min(deadline, time.monotonic() + _HANDSHAKE))
        stream = Stream(sock, min(_MAX_ANSWER, MAX_FRAME * (len(members) + 1)))
        me = {"processes": members, "process": process, "peer": peer_here(), "silence": silence}
        stream.send(encode({"kind": "join", **me}))
        hub_peer = _await_welcome(stream, deadline)
    except BaseException:
        sock.close()
        raise
    return Group(stream, members, process, hub_peer, silence)


def _await_welcome(stream: Stream, deadline: float) -> str:
    poll = select.poll()
    poll.register(stream.sock, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise TimeoutError("the hub did not answer in time")
        stream.fill()
        match stream.message():
            case None:
                pass
            case {"kind": "joined", "peer": str(peer)}:
                return peer
            case _:
                raise FrameError("the hub answered with something else than a welcome")


def _call(callbacks: Iterable[Callable[[str], None]], reason: str) -> None:
    for callback in callbacks:
        try:
            callback(reason)
        except Exception:  # the other callbacks, and the group, do not depend on it
            _log.exception("jreshard: a callback for failures failed itself")


def _by_index(said: Mapping[str, Any]) -> dict[int, Any]:
    return {int(process): value for process, value in said.items()}


def _quote(said: Mapping[str, str]) -> str:
    """Who said what, those that said the same together."""
    speakers: dict[str, list[str]] = {}
    for process, what in said.items():
        speakers.setdefault(what, []).append(process)
    parts = (f"process{'es' if len(who) > 1 else ''} {_list(who)}: {what!r}" for what, who in speakers.items())
    return "; ".join(parts)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
