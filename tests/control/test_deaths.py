"""Processes that die, are stopped, or fork."""

import os
import signal
import threading
import time

import pytest
from control.helpers import TIMEOUT, Reasons, together

from jreshard._control import Hub, PeerLost, PeerTimeout, join

PAIR = (0, 1)

# Joins as process 1, says so, and enters a round whenever it is told to go on.
MEMBER = """
import json, sys
from jreshard._control import join

host, port, token, silence = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), float(sys.argv[4])
group = join((host, port), token, (0, 1), 1, timeout=30, silence=silence)
print(json.dumps("joined"), flush=True)
while sys.stdin.readline():
    group.gather("x", None, 60)
"""

# Holds the hub, and is process 0; then waits to be ended.
HUB = """
import json, sys
from jreshard._control import Hub, join

hub = Hub()
group = join(hub.address, hub.token, (0, 1), 0, timeout=30)
print(json.dumps([hub.address, hub.token.hex()]), flush=True)
sys.stdin.readline()
group.gather("last words", "a" * (1 << 20), 60)
hub.close()
"""


def start_member(start, hub, silence=TIMEOUT):
    child = start(MEMBER, *hub.address, hub.token.hex(), silence)
    assert child.said() == "joined"
    return child


def test_a_killed_process_is_named_to_who_waits_and_to_callbacks(hub, member, start):
    a, child = member(PAIR, 0), start_member(start, hub)
    reasons = Reasons()
    a.on_failure(reasons)
    child.go_on()
    assert a.gather("x", None, TIMEOUT) == {0: None, 1: None}
    child.signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match=rf"transfer A: process 1 \(.*, pid {child.pid}\) is gone") as raised:
        a.gather("transfer A", None, TIMEOUT)
    assert raised.value.process == 1
    assert f"pid {child.pid}" in reasons.wait()[0]
    with pytest.raises(PeerLost):
        a.gather("x", None, TIMEOUT)


def test_a_killed_process_can_be_started_again(hub, member, start):
    a, child = member(PAIR, 0), start_member(start, hub)
    child.signal(signal.SIGKILL)
    with pytest.raises(PeerLost):
        a.gather("x", None, TIMEOUT)
    start_member(start, hub).go_on()
    assert member(PAIR, 0).gather("x", None, TIMEOUT) == {0: None, 1: None}


def test_a_stopped_process_is_noticed_and_may_come_back(hub, member, start):
    a, child = member(PAIR, 0, silence=1.5), start_member(start, hub, silence=1.5)
    child.signal(signal.SIGSTOP)
    with pytest.raises(PeerLost, match=rf"process 1 \(.*, pid {child.pid}\) has not been heard of for 1\.5 s"):
        a.gather("x", None, TIMEOUT)
    child.signal(signal.SIGCONT)
    child.go_on()
    assert child.ended() == 1  # it finds out too
    start_member(start, hub).go_on()
    assert member(PAIR, 0).gather("x", None, TIMEOUT) == {0: None, 1: None}


def test_a_process_stopped_for_a_moment_stays(hub, member, start):
    a, child = member(PAIR, 0), start_member(start, hub)
    child.signal(signal.SIGSTOP)
    child.go_on()
    with pytest.raises(PeerTimeout):
        a.gather("x", None, 0.3)
    child.signal(signal.SIGCONT)
    assert a.gather("x", None, TIMEOUT) == {0: None, 1: None}


def start_hub(start):
    child = start(HUB)
    address, token = child.said()
    return child, tuple(address), bytes.fromhex(token)


def test_the_death_of_the_hubs_process_is_noticed(start):
    child, address, token = start_hub(start)
    group = join(address, token, PAIR, 1, timeout=TIMEOUT)
    reasons = Reasons()
    group.on_failure(reasons)
    child.signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match=rf"process 0 \(.*, pid {child.pid}\) is gone") as raised:
        group.gather("x", None, TIMEOUT)
    assert raised.value.process == 0
    assert f"pid {child.pid}" in reasons.wait()[0]
    group.close()


def test_a_stopped_hub_ends_a_call_soon_after_its_deadline_and_then_the_group(start, monkeypatch):
    monkeypatch.setattr("jreshard._control.group._GRACE", 0.1)
    child, address, token = start_hub(start)
    group = join(address, token, PAIR, 1, timeout=TIMEOUT, silence=1.5)
    child.signal(signal.SIGSTOP)
    with pytest.raises(PeerTimeout, match=rf"process 0 \(.*, pid {child.pid}\), at which the processes meet, did not"):
        group.gather("x", None, 0.1)
    with pytest.raises(PeerLost, match=rf"process 0 \(.*, pid {child.pid}\) has not been heard of for 1\.5 s"):
        group.gather("x", None, TIMEOUT)
    child.signal(signal.SIGCONT)
    group.close()


def test_the_outcome_of_the_last_round_arrives_though_the_hubs_process_exits(start):
    child, address, token = start_hub(start)
    group = join(address, token, PAIR, 1, timeout=TIMEOUT)
    child.go_on()
    assert group.gather("last words", None, TIMEOUT) == {0: "a" * (1 << 20), 1: None}
    assert child.ended() == 0
    group.close()


def test_the_exit_of_a_process_is_not_held_up(start):
    code = """
from jreshard._control import Hub, join
hub = Hub()
groups = [join(hub.address, hub.token, (0, 1), p, timeout=30) for p in (0, 1)]
import threading
threading.Thread(target=groups[0].gather, args=("x", None, 600), daemon=True).start()
"""
    assert start(code).ended() == 0


def test_a_forked_child_does_not_keep_a_dead_process_alive(hub, member, start):
    code = """
import json, os, sys
from jreshard._control import join

group = join((sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]), (0, 1), 1, timeout=30, silence=60)
if os.fork() == 0:
    try:
        group.gather("x", None, 60)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    a = member(PAIR, 0, silence=2 * TIMEOUT)
    child = start(code, *hub.address, hub.token.hex())
    assert child.said() == f"the group belongs to pid {child.pid}, from which this process was forked"
    child.signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match=rf"process 1 \(.*, pid {child.pid}\) is gone"):
        a.gather("x", None, TIMEOUT)


def test_an_interrupted_call_leaves_the_round(hub, member, start):
    code = """
import json, signal, sys, threading
from jreshard._control import join

group = join((sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]), (0, 1), 1, timeout=30)
print(json.dumps("joined"), flush=True)
try:
    group.gather("x", "first", 60)
except KeyboardInterrupt:
    print(json.dumps("interrupted"), flush=True)
sys.stdin.readline()
print(json.dumps(group.gather("x", "second", 60)), flush=True)
"""
    a = member(PAIR, 0)
    child = start(code, *hub.address, hub.token.hex())
    assert child.said() == "joined"
    time.sleep(0.5)  # most probably in the call by then; the test holds wherever the interrupt comes
    child.signal(signal.SIGINT)
    assert child.said() == "interrupted"
    with pytest.raises(PeerTimeout):
        a.gather("x", None, 0.1)
    child.go_on()
    assert a.gather("x", None, TIMEOUT) == {0: None, 1: "second"}


def test_the_hubs_end_is_noticed():
    hub = Hub()
    group = join(hub.address, hub.token, PAIR, 1, timeout=TIMEOUT)
    error, _ = together(lambda: group.gather("x", None, TIMEOUT), hub.close)
    assert isinstance(error, PeerLost)
    assert error.process == 0
    group.close()


def test_nothing_is_left_of_a_hundred_groups(hub):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def once():
        groups = [join(hub.address, hub.token, PAIR, p, timeout=TIMEOUT) for p in PAIR]
        assert together(*[lambda g=g: g.gather("x", None, TIMEOUT) for g in groups]) == [{0: None, 1: None}] * 2
        for group in groups:
            group.close()
        deadline = time.monotonic() + TIMEOUT
        while hub._connections and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not hub._connections

    once()
    before = descriptors(), threading.active_count()
    for _ in range(100):
        once()
    assert descriptors() < before[0] + 10
    assert threading.active_count() <= before[1]  # a thread of an earlier test may have ended meanwhile
    assert not hub._rooms
    assert not hub._pending
