"""One group as its hub sees it: who is there, and the round under way. No sockets, no clocks, no threads."""

from collections.abc import Callable
from dataclasses import dataclass

from jreshard._control.frames import Message, encode


@dataclass(frozen=True)
class Entry:
    """A member's part in the round under way: its number for the call, what it is about to do, what it hands over."""

    call: int
    what: str
    payload: str


@dataclass(frozen=True)
class Seat:
    """A member that is connected.

    Attributes:
        peer: its host and pid, for people.
        send: sends it a frame; never blocks, never raises.
    """

    peer: str
    send: Callable[[bytes], None]


class Room:
    """Forms rounds out of the members that are present.

    A round is complete when every process has entered; then, and in one step, all get the same verdict. There are no
    numbers of rounds that could drift apart: who leaves before that has not been there.

    When a member has gone home there are no more rounds, but the others still hear of one another: they may be in the
    midst of what the last round has begun.
    """

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self._seats: dict[int, Seat] = {}
        self._entries: dict[int, Entry] = {}  # of the members that wait for the others
        self._departure: tuple[int, str] | None = None  # who has gone home first, in words too

    @property
    def closed(self) -> bool:
        """Whether there are no more rounds."""
        return self._departure is not None

    def has(self, process: int) -> bool:
        """Whether the process is connected."""
        return process in self._seats

    def sit(self, process: int, seat: Seat) -> None:
        """A member has connected."""
        self._seats[process] = seat

    def waits(self, process: int) -> bool:
        """Whether the process waits for the others."""
        return process in self._entries

    def enter(self, process: int, entry: Entry) -> None:
        """A member has come to the round."""
        self._entries[process] = entry
        if len(self._entries) == len(self.processes):
            self._conclude()

    def leave(self, process: int, call: int) -> None:
        """A member's deadline has passed; a verdict that is on its way to it stands."""
        entry = self._entries.get(process)
        if entry is None or entry.call != call:
            return
        missing = [p for p in self.processes if p not in self._entries]
        peers = {p: self._seats[p].peer if p in self._seats else None for p in missing}
        del self._entries[process]
        self._seats[process].send(encode({"kind": "left", "call": call, "missing": peers, "said": self._said()}))

    def fail(self, process: int, reason: str) -> None:
        """A member's operation has failed."""
        frame = encode({"kind": "failed", "process": process, "reason": reason})
        for other, seat in self._seats.items():
            if other != process:
                seat.send(frame)

    def end(self, process: int, reason: str) -> None:
        """A member is gone, and the group with it."""
        frame = encode({"kind": "broken", "process": process, "reason": reason, "left": False})
        for seat in self._seats.values():
            seat.send(frame)

    def go_home(self, process: int, reason: str) -> None:
        """A member has left, having done its part of all that rounds have begun."""
        self._departure = self._departure or (process, reason)
        del self._seats[process]

    def turn_away(self, process: int) -> None:
        """Tells a member that there are no more rounds, and why."""
        home, reason = self._departure or (process, "the group has ended")
        self._entries.pop(process, None)
        self._seats.pop(process).send(encode({"kind": "broken", "process": home, "reason": reason, "left": True}))

    def _said(self) -> dict[int, str]:
        return {p: entry.what for p, entry in sorted(self._entries.items())}

    def _conclude(self) -> None:
        verdict: Message = {"calls": {p: entry.call for p, entry in self._entries.items()}}
        if len({entry.what for entry in self._entries.values()}) == 1:
            verdict |= {"kind": "agreed", "payloads": {p: entry.payload for p, entry in self._entries.items()}}
        else:
            verdict |= {"kind": "mismatch", "said": self._said()}
        self._entries.clear()
        frame = encode(verdict)
        # The hub's own process last: it may exit as soon as it knows.
        for _, seat in sorted(self._seats.items(), reverse=True):
            seat.send(frame)
