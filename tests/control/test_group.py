import contextlib
import logging
import os
import random
import socket
import threading

import pytest
from control.helpers import TIMEOUT, Reasons, together

from jreshard._control import MismatchError, PeerLost, PeerTimeout
from jreshard._control import group as group_module
from jreshard._control.frames import MAX_FRAME

PAIR = (0, 1)


def test_all_get_what_all_have_brought(member):
    groups = [member((3, 5, 9), p) for p in (3, 5, 9)]
    said = together(*[lambda g=g: g.gather("x", {"from": g.process}, TIMEOUT) for g in groups])
    assert said == [{3: {"from": 3}, 5: {"from": 5}, 9: {"from": 9}}] * 3
    assert list(said[0]) == [3, 5, 9]


def test_payloads_of_bytes_and_json_may_be_mixed(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    blob = os.urandom(1 << 20)
    said = together(lambda: a.gather("x", blob, TIMEOUT), lambda: b.gather("x", (1, None), TIMEOUT))
    assert said == [{0: blob, 1: [1, None]}] * 2


def test_a_group_of_one(member):
    assert member((4,), 4).gather("x", 1, TIMEOUT) == {4: 1}


def test_many_rounds(member):
    a, b = member(PAIR, 0), member(PAIR, 1)

    def rounds(group):
        return [group.gather(f"round {i}", i, TIMEOUT) for i in range(300)]

    assert together(lambda: rounds(a), lambda: rounds(b)) == [[{0: i, 1: i} for i in range(300)]] * 2


def test_a_mismatch_is_raised_everywhere_and_says_who_said_what(member):
    groups = [member((0, 1, 2), p) for p in range(3)]
    what = ["transfer A", "transfer B", "transfer A"]
    for error in together(*[lambda g=g: g.gather(what[g.process], None, TIMEOUT) for g in groups]):
        assert isinstance(error, MismatchError)
        assert error.said == dict(enumerate(what))
        assert str(error) == (
            "the processes are about to do different things: processes 0 and 2: 'transfer A'; process 1: 'transfer B'"
        )
    assert together(*[lambda g=g: g.gather("x", 1, TIMEOUT) for g in groups]) == [{0: 1, 1: 1, 2: 1}] * 3


def test_a_timeout_names_who_is_missing_and_the_next_calls_find_one_another(member):
    a, b = member((0, 1, 2), 0), member((0, 1, 2), 1)
    with pytest.raises(PeerTimeout) as raised:
        a.gather("transfer A", None, 0.1)
    assert raised.value.processes == (1, 2)
    assert "transfer A: process 1 (" in str(raised.value)
    assert f"pid {os.getpid()}" in str(raised.value)
    assert "process 2 (not connected) did not come within 0.1 s" in str(raised.value)
    c = member((0, 1, 2), 2)
    calls = [lambda g=g: g.gather("x", g.process, TIMEOUT) for g in (a, b, c)]
    assert together(*calls) == [{0: 0, 1: 1, 2: 2}] * 3


def test_a_timeout_tells_that_the_others_differ(member):
    a, b = member((0, 1, 2), 0), member((0, 1, 2), 1)
    first, second = together(lambda: a.gather("x", None, 0.5), lambda: b.gather("y", None, 1.0))
    assert isinstance(first, PeerTimeout)
    assert "those that came are about to do different things: process 1: 'y'" in str(first)
    assert isinstance(second, PeerTimeout)
    assert second.processes == (0, 2)


def test_each_waits_for_its_own_deadline(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    gone = threading.Event()

    def impatient():
        try:
            return a.gather("x", "first", 0.1)
        except PeerTimeout:
            gone.set()
            return a.gather("x", "second", TIMEOUT)

    def late():
        gone.wait(TIMEOUT)
        return b.gather("x", "late", TIMEOUT)

    assert together(impatient, late) == [{0: "second", 1: "late"}] * 2


def test_deadlines_that_race_with_arrivals_never_give_half_an_outcome(member):
    groups = [member((0, 1, 2), p) for p in range(3)]

    def agreed(group):
        deadlines, outcomes = random.Random(group.process), []
        for i in range(300):
            with contextlib.suppress(PeerTimeout):
                outcomes.append(group.gather("x", i, deadlines.choice([0.0002, 0.0005, 0.001, 0.002, 0.005])))
        return outcomes

    first, *others = together(*[lambda g=g: agreed(g) for g in groups])
    assert isinstance(first, list)
    assert others == [first, first]


def test_a_call_that_gave_up_on_the_hub_but_was_counted_is_reported(member, monkeypatch):
    a, b = member(PAIR, 0), member(PAIR, 1)
    reasons = Reasons()
    b.on_failure(reasons)
    monkeypatch.setattr(group_module, "_GRACE", 0.0)
    send = a._send
    lost = {"kind": "leave", "call": 1}  # as if it reached the hub too late
    monkeypatch.setattr(a, "_send", lambda message: None if message == lost else send(message))
    with pytest.raises(PeerTimeout, match=r"process 0 \(.*\), at which the processes meet, did not answer"):
        a.gather("x", None, 0.1)
    assert b.gather("x", None, TIMEOUT) == {0: None, 1: None}
    assert "process 0: gave up" in reasons.wait()[0]


def test_too_large_a_payload_is_refused_here_and_harms_nobody(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    with pytest.raises(ValueError, match=r"x: the payload takes \d+ bytes; at most"):
        a.gather("x", b"0" * MAX_FRAME, TIMEOUT)
    with pytest.raises(TypeError, match="not JSON serializable"):
        a.gather("x", {1, 2}, TIMEOUT)
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (a, b)]
    assert together(*calls) == [{0: None, 1: None}] * 2


def test_threads_of_one_process_take_turns(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (a, a, b, b)]
    assert together(*calls) == [{0: None, 1: None}] * 4


def test_a_thread_whose_turn_does_not_come_says_so(member):
    a = member(PAIR, 0)
    first, second = together(lambda: a.gather("x", None, 0.6), lambda: a.gather("y", None, 0.2))
    assert {type(first), type(second)} == {PeerTimeout}
    assert "another thread of this process" in str(first) + str(second)


def test_groups_of_one_hub_do_not_meet(member):
    both = {p: (member((0, 1), p), member((0, 1, 2), p)) for p in (0, 1)}
    third = member((0, 1, 2), 2)
    calls = [lambda g=g: g.gather(str(g.processes), g.process, TIMEOUT) for pair in both.values() for g in pair]
    said = together(*calls, lambda: third.gather("(0, 1, 2)", 2, TIMEOUT))
    assert said == [{0: 0, 1: 1}, {0: 0, 1: 1, 2: 2}] * 2 + [{0: 0, 1: 1, 2: 2}]


def test_many_groups(member):
    groups = [member((0, k), p) for k in range(1, 21) for p in (0, k)]
    said = together(*[lambda g=g: g.gather("x", g.process, TIMEOUT) for g in groups])
    assert said == [{0: 0, g.processes[1]: g.processes[1]} for g in groups]


def test_a_failure_is_told_to_the_others_and_breaks_nothing(member):
    groups = [member((0, 1, 2), p) for p in range(3)]
    reasons = [Reasons() for _ in groups]
    for group, heard in zip(groups, reasons, strict=True):
        group.on_failure(heard)
    groups[1].fail("no memory")
    assert reasons[0].wait() == reasons[2].wait() == ["process 1: no memory"]
    assert together(*[lambda g=g: g.gather("x", None, TIMEOUT) for g in groups]) == [{0: None, 1: None, 2: None}] * 3
    assert reasons[1].heard == []


def test_a_failure_before_a_round_is_heard_before_its_outcome(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    reasons = Reasons()
    b.on_failure(reasons)

    def failing():
        a.fail("no memory")
        return a.gather("x", None, TIMEOUT)

    together(failing, lambda: b.gather("x", None, TIMEOUT))
    assert reasons.heard == ["process 0: no memory"]


def test_unsubscribed_callbacks_are_not_called(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    first, second = Reasons(), Reasons()
    unsubscribe = b.on_failure(first)
    b.on_failure(second)
    unsubscribe()
    unsubscribe()
    a.fail("no memory")
    second.wait()
    assert first.heard == []


def test_a_callback_that_raises_is_logged_and_does_not_keep_the_news_from_others(member, caplog):
    a, b = member(PAIR, 0), member(PAIR, 1)
    reasons = Reasons()
    b.on_failure(lambda _: 1 / 0)
    b.on_failure(reasons)
    with caplog.at_level(logging.ERROR):
        a.fail("no memory")
        reasons.wait()
    assert "ZeroDivisionError" in caplog.text
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (a, b)]
    assert together(*calls) == [{0: None, 1: None}] * 2


def test_who_leaves_the_group_is_named_to_all(member):
    groups = [member((0, 1, 2), p) for p in range(3)]
    (error, _) = together(lambda: groups[0].gather("transfer A", None, TIMEOUT), groups[1].close)
    assert isinstance(error, PeerLost)
    assert error.process == 1
    assert str(error).startswith("transfer A: process 1 (")
    assert "has left the group" in str(error)
    with pytest.raises(PeerLost, match="has left the group"):
        groups[2].gather("x", None, TIMEOUT)
    for group in groups:
        assert group.broken
    with pytest.raises(RuntimeError, match="the group was closed"):
        groups[1].gather("x", None, TIMEOUT)
    groups[2].fail("no memory")  # all have been told already


def begin_call(groups):
    """All agree on something; the first of them has not done it yet."""
    calls = contextlib.ExitStack()
    calls.enter_context(groups[0].in_call())

    def take_part(group):
        with group.in_call():
            group.gather("x", None, TIMEOUT)

    together(lambda: groups[0].gather("x", None, TIMEOUT), *[lambda g=g: take_part(g) for g in groups[1:]])
    return calls


def test_leaving_is_no_failure_of_what_is_under_way(member):
    a, b = groups = [member(PAIR, p) for p in PAIR]
    heard = Reasons()
    a.on_failure(heard)
    with begin_call(groups):
        b.fail("of this call")  # what the leaver has said before still arrives
        b.close()
        with pytest.raises(PeerLost, match="has left the group"):
            a.gather("the next call", None, TIMEOUT)
    a.on_failure(heard)
    a.close()  # waits for the thread that calls
    assert heard.heard == ["process 1: of this call"]


@pytest.mark.parametrize("how", ["die", "close", "fail"])
def test_who_is_left_still_hears_of_the_others(member, how):
    a, b, c = groups = [member((0, 1, 2), p) for p in range(3)]
    heard = Reasons()
    b.on_failure(heard)
    with begin_call(groups):
        c.close()
        if how == "die":
            a._stream.sock.shutdown(socket.SHUT_RDWR)
        elif how == "close":
            a.close()
        else:
            a.fail("no memory")
        assert heard.wait()[0].startswith("process 0")
    with pytest.raises(PeerLost):
        b.gather("x", None, TIMEOUT)


@pytest.mark.parametrize("done", [True, False])
def test_who_leaves_in_the_midst_of_what_was_agreed_has_failed(member, done):
    a, b = groups = [member(PAIR, p) for p in PAIR]
    heard = Reasons()
    b.on_failure(heard)
    calls = begin_call(groups)
    if done:
        calls.close()
        a.close()
    else:
        with pytest.raises(KeyboardInterrupt), calls:
            raise KeyboardInterrupt
        a.close()
        assert "has left the group in the midst of a transfer" in heard.wait()[0]
    with pytest.raises(PeerLost, match="has left the group"):
        b.gather("x", None, TIMEOUT)
    b.close()
    assert len(heard.heard) == (0 if done else 1)


def test_a_round_that_did_not_come_about_leaves_nothing_unfinished(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    heard = Reasons()
    b.on_failure(heard)
    with begin_call([a, b]):
        pass
    for what, timeout, error in (("alone", 0.05, PeerTimeout), ("this", TIMEOUT, MismatchError)):
        calls = [lambda: b.gather("that", None, TIMEOUT)] if error is MismatchError else []

        def fails(what=what, timeout=timeout):
            with a.in_call():
                a.gather(what, None, timeout)

        assert isinstance(together(fails, *calls)[0], error)
    a.close()
    with pytest.raises(PeerLost, match=r"has left the group$"):
        b.gather("x", None, TIMEOUT)
    b.close()  # waits for the thread that calls
    assert heard.heard == []


def test_who_subscribes_to_a_broken_group_is_told_at_once(member):
    a = member(PAIR, 0)
    member(PAIR, 1)
    broken = Reasons()
    a.on_failure(broken)
    member(PAIR, 1)
    broken.wait()
    late: list[str] = []
    a.on_failure(late.append)
    assert late == broken.heard


def test_after_a_break_the_same_processes_can_meet_again(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    b.close()
    with pytest.raises(PeerLost, match="has left the group"):
        a.gather("x", None, TIMEOUT)
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (member(PAIR, 0), member(PAIR, 1))]
    assert together(*calls) == [{0: None, 1: None}] * 2


def test_a_process_that_connects_anew_ends_the_group_of_its_predecessor(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    successor = member(PAIR, 1)
    for old in (a, b):
        with pytest.raises(PeerLost, match="process 1 has connected anew"):
            old.gather("x", None, TIMEOUT)
    calls = [lambda g=g: g.gather("x", None, TIMEOUT) for g in (member(PAIR, 0), successor)]
    assert together(*calls) == [{0: None, 1: None}] * 2


def test_closing_ends_a_wait_in_another_thread(member):
    a = member(PAIR, 0)
    error, _ = together(lambda: a.gather("x", None, TIMEOUT), a.close)
    assert isinstance(error, RuntimeError)


def test_a_callback_may_close_the_group(member):
    a, b = member(PAIR, 0), member(PAIR, 1)
    closed = Reasons()
    b.on_failure(lambda reason: (b.close(), closed(reason)))
    a.fail("no memory")
    closed.wait()
    with pytest.raises(PeerLost, match="process 1"):
        a.gather("x", None, TIMEOUT)


def test_a_process_outside_the_group_cannot_join(member):
    with pytest.raises(ValueError, match=r"process 2 is not among the group's processes \[0, 1\]"):
        member(PAIR, 2)
