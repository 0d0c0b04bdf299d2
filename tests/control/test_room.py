import json
from typing import Any

from jreshard._control.room import Entry, Room, Seat


class Members:
    """A room whose members keep what they are sent."""

    def __init__(self, *processes: int) -> None:
        self.room = Room(processes)
        self.inbox: dict[int, list[dict[str, Any]]] = {}

    def sit(self, process: int) -> None:
        inbox = self.inbox[process] = []
        self.room.sit(process, Seat(f"host-{process}", lambda frame: inbox.append(json.loads(frame[4:]))))

    def enter(self, process: int, call: int, what: str = "x") -> None:
        self.room.enter(process, Entry(call, what, str(process)))

    def kinds(self, process: int) -> list[str]:
        return [message["kind"] for message in self.inbox[process]]


def seated(*processes: int) -> Members:
    members = Members(*processes)
    for process in processes:
        members.sit(process)
    return members


def test_the_last_to_enter_completes_the_round_for_all():
    members = seated(0, 1)
    members.enter(1, call=7)
    assert members.inbox == {0: [], 1: []}
    members.enter(0, call=3)
    expected = {"kind": "agreed", "calls": {"0": 3, "1": 7}, "payloads": {"0": "0", "1": "1"}}
    assert members.inbox == {0: [expected], 1: [expected]}


def test_the_hubs_own_process_hears_last():
    order: list[int] = []
    room = Room((0, 1, 2))
    for process in (1, 0, 2):
        room.sit(process, Seat("", lambda _, process=process: order.append(process)))
    for process in (0, 1, 2):
        room.enter(process, Entry(1, "x", ""))
    assert order == [2, 1, 0]


def test_who_has_not_connected_is_waited_for():
    members = Members(0, 1, 2)
    members.sit(0)
    members.sit(1)
    members.enter(0, call=1)
    members.enter(1, call=1)
    assert members.kinds(0) == []
    members.sit(2)
    members.enter(2, call=1)
    assert members.kinds(0) == members.kinds(1) == members.kinds(2) == ["agreed"]


def test_who_has_left_is_not_counted():
    members = seated(0, 1)
    members.enter(0, call=1)
    members.room.leave(0, call=1)
    members.enter(1, call=1)
    assert members.kinds(1) == []
    assert members.inbox[0] == [{"kind": "left", "call": 1, "missing": {"1": "host-1"}, "said": {}}]
    members.enter(0, call=2)
    assert members.kinds(1) == ["agreed"]
    assert members.inbox[1][0]["calls"] == {"0": 2, "1": 1}


def test_a_verdict_stands_though_a_member_leaves_too_late():
    members = seated(0, 1)
    members.enter(0, call=1)
    members.enter(1, call=1)
    members.room.leave(0, call=1)
    assert members.kinds(0) == ["agreed"]


def test_leaving_an_earlier_call_does_not_end_a_later_one():
    members = seated(0, 1)
    members.enter(0, call=2)
    members.room.leave(0, call=1)
    members.enter(1, call=1)
    assert members.kinds(0) == ["agreed"]


def test_who_leaves_learns_what_the_others_said_and_who_is_missing():
    members = Members(0, 1, 2, 3)
    for process in (0, 1, 2):
        members.sit(process)
    members.enter(0, call=1)
    members.enter(1, call=1, what="y")
    members.room.leave(0, call=1)
    (message,) = members.inbox[0]
    assert message["missing"] == {"2": "host-2", "3": None}
    assert message["said"] == {"1": "y"}


def test_a_mismatch_waits_for_all_and_reaches_all():
    members = seated(0, 1, 2)
    members.enter(0, call=1)
    members.enter(1, call=1, what="y")
    assert members.kinds(0) == []
    members.enter(2, call=1)
    for process in (0, 1, 2):
        assert members.inbox[process][0]["said"] == {"0": "x", "1": "y", "2": "x"}
    for process in (0, 1, 2):
        members.enter(process, call=2)
    assert members.kinds(1) == ["mismatch", "agreed"]


def test_a_failure_reaches_the_others_and_leaves_the_round_as_it_is():
    members = seated(0, 1, 2)
    members.enter(0, call=1)
    members.room.fail(1, "no memory")
    assert members.kinds(1) == []
    assert members.inbox[0] == members.inbox[2] == [{"kind": "failed", "process": 1, "reason": "no memory"}]
    members.enter(1, call=1)
    members.enter(2, call=1)
    assert members.kinds(0) == ["failed", "agreed"]
