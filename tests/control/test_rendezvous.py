import json
import socket
import threading
from typing import Any

import pytest
from control.helpers import TIMEOUT, Reasons, together

from jreshard._control import Hub, PeerLost, PeerTimeout, rendezvous
from jreshard._control.rendezvous import _Job, _means_loopback, _own_address

PAIR = (0, 1)


class Store:
    """Stands for the client of the coordination service."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.written[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.written, timeout)
            return self.written.get(key)


@pytest.fixture
def job(monkeypatch):
    """Makes the part of one process in a job; all of them in this process."""
    store, jobs = Store(), []
    monkeypatch.setattr(rendezvous, "coordination_set", lambda client, key, value: client.set(key, value))
    monkeypatch.setattr(rendezvous, "coordination_get", lambda client, key, timeout: client.get(key, timeout))
    monkeypatch.setattr(rendezvous, "coordinator_address", lambda: "127.0.0.1:1")

    def make(process: int) -> _Job:
        monkeypatch.setattr(rendezvous, "distributed_process", lambda: process)
        jobs.append(_Job(store))
        return jobs[-1]

    make.store = store
    yield make
    for each in jobs:
        each.close()


def meet(*groups: Any) -> None:
    expected = {group.process: group.process for group in groups}
    assert together(*[lambda g=g: g.gather("x", g.process, TIMEOUT) for g in groups]) == [expected] * len(groups)


def connect(job, processes=PAIR, timeout=TIMEOUT):
    return job.connect(processes, timeout, TIMEOUT)


def test_a_group_is_made_once(job):
    first, second = job(0), job(1)
    late, early = together(lambda: connect(second), lambda: connect(first))
    meet(early, late)
    assert connect(first) is early
    assert connect(second) is late


def test_threads_that_connect_together_get_the_same_group(job):
    first = job(0)
    groups = together(*[lambda: connect(first)] * 4)
    assert len({id(group) for group in groups}) == 1


def test_one_hub_serves_all_groups_of_its_process(job):
    jobs = [job(p) for p in range(3)]
    for processes in ((0, 1), (0, 2), (0, 1, 2)):
        meet(*[connect(jobs[p], processes) for p in processes])
    meet(*[connect(jobs[p], (1, 2)) for p in (1, 2)])
    assert sorted(job.store.written) == ["jreshard/control/hub/0", "jreshard/control/hub/1"]


def test_a_broken_group_is_made_anew(job):
    first, second = job(0), job(1)
    old = connect(first), connect(second)
    old[1].close()
    with pytest.raises(PeerLost, match="has left the group"):
        old[0].gather("x", None, TIMEOUT)
    new = connect(first), connect(second)
    assert new[0] is not old[0]
    meet(*new)


def test_the_process_of_the_hub_leaves_first(job):
    first, second = job(0), job(1)
    heard = Reasons()
    meet(connect(first), group := connect(second))
    group.on_failure(heard)
    first.close()
    with pytest.raises(PeerLost, match=r"process 0 .* has left the group"):
        group.gather("x", None, TIMEOUT)
    group.close()
    assert heard.heard == []


def test_what_a_dead_hub_has_published_is_read_anew(job):
    dead, second = job(0), job(1)
    group = connect(second) if connect(dead) else None
    dead.close()
    with pytest.raises(PeerLost):
        group.gather("x", None, TIMEOUT)
    waiting = threading.Event()
    restarted = job(0)

    def wait_for_the_successor():
        waiting.set()
        return connect(second)

    def come_back():
        waiting.wait(TIMEOUT)
        return connect(restarted)

    meet(*together(come_back, wait_for_the_successor))


def test_an_address_that_another_hub_has_now_is_read_anew(job):
    second = job(1)
    with_token_of_another = Hub()
    host, port = with_token_of_another.address
    stale = {"host": host, "port": port, "token": "00" * 32, "peer": "stale"}
    job.store.set("jreshard/control/hub/0", json.dumps(stale))
    with pytest.raises(PeerTimeout, match=r"process 0 \(stale\) cannot be reached at 127\.0\.0\.1:\d+: .*token"):
        connect(second, timeout=0.5)
    first = job(0)
    meet(connect(first), connect(second))
    with_token_of_another.close()


def test_a_process_that_never_publishes_is_named(job):
    with pytest.raises(PeerTimeout, match=r"\[0, 1\] within 0\.2 s: process 0 has not published") as raised:
        connect(job(1), timeout=0.2)
    assert raised.value.processes == (0,)


def test_a_process_whose_hub_is_gone_is_named(job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    card = {"host": "127.0.0.1", "port": port, "token": "00" * 32, "peer": "host-a, pid 7"}
    job.store.set("jreshard/control/hub/0", json.dumps(card))
    with pytest.raises(PeerTimeout, match=r"process 0 \(host-a, pid 7\) cannot be reached at .*refused"):
        connect(job(1), timeout=0.3)


def test_a_process_outside_the_group_is_refused(job):
    with pytest.raises(ValueError, match=r"this is process 2; expected one of the group's, \[0, 1\]"):
        connect(job(2))


def test_without_a_job_there_is_no_group():
    with pytest.raises(RuntimeError, match=r"call jax\.distributed\.initialize"):
        rendezvous.connect(PAIR, TIMEOUT)


@pytest.mark.parametrize("coordinator", ["127.0.0.1:1234", "localhost:1234", "[::1]:1234"])
def test_a_job_on_loopback_stays_there(coordinator):
    assert _own_address(coordinator) in ("127.0.0.1", "::1")


def test_the_hubs_address_is_the_one_towards_the_coordinator(monkeypatch):
    monkeypatch.setattr(rendezvous, "_source_towards", lambda address: f"10.0.0.{address[1]}")
    assert _own_address("some-host:3") == "10.0.0.3"


def test_a_name_that_only_this_host_takes_for_loopback_is_not_believed(monkeypatch):
    towards = {("some-host", 3): "127.0.1.1", rendezvous._ELSEWHERE: "10.0.0.7"}
    monkeypatch.setattr(rendezvous, "_source_towards", towards.__getitem__)
    assert _own_address("some-host:3") == "10.0.0.7"


@pytest.mark.parametrize(("host", "expected"), [("127.1.2.3", True), ("::1", True), ("localhost", True), ("a", False)])
def test_names_of_loopback(host, expected):
    assert _means_loopback(host) is expected


PROCESS = """
import json, sys
import jax
from jreshard._control import MismatchError, PeerLost, PeerTimeout, connect

process = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, process, local_device_ids=[0])
group = connect((0, 1), 60)
assert connect([1, 0], 60) is group
heard = []
group.on_failure(heard.append)
results = [group.gather("transfer", {"from": process}, 60)]
try:
    group.gather(f"transfer {process}", None, 60)
except MismatchError as error:
    results.append(error.said)
if process == 1:
    group.fail("no memory")
group.gather("end", None, 60)
results.append(heard)
print(json.dumps(results), flush=True)
sys.stdin.readline()
"""


def test_two_processes_of_one_job(start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    children = [start(PROCESS, coordinator, process) for process in PAIR]
    said = [child.said() for child in children]
    both = [{"0": {"from": 0}, "1": {"from": 1}}, {"0": "transfer 0", "1": "transfer 1"}]
    assert said == [[*both, ["process 1: no memory"]], [*both, []]]
    for child in children:
        child.go_on()
    assert [child.ended() for child in children] == [0, 0]
