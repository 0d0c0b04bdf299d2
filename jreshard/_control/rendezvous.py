"""How the processes of a `jax.distributed` job find the hub of a group: through its coordination service.

A process in which groups meet publishes one address and one token, for all its groups. Whoever can talk to the
coordination service can read them, as it can read whatever else `jax.distributed` keeps there.
"""

import atexit
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from jreshard._compat import (
    coordination_get,
    coordination_set,
    coordinator_address,
    distributed_client,
    distributed_process,
)
from jreshard._control.errors import PeerTimeout, seconds
from jreshard._control.group import SILENCE, Group, join
from jreshard._control.hub import Hub, peer_here

# One attempt to read the store, which cannot be interrupted.
_ATTEMPT = 1.0
_PAUSE = 0.1
# An address that is nobody's (RFC 5737): the way to it is the way to other hosts.
_ELSEWHERE = ("192.0.2.1", 9)


def connect(processes: Iterable[int], timeout: float, *, silence: float = SILENCE) -> Group:
    """The group of these processes of the `jax.distributed` job.

    The same group for the same processes, until it breaks; then a new one. Returns once this process is in; the others
    may come later.

    Args:
        processes: the members, by `jax.process_index`; this process is one of them.
        timeout: how long to wait for the process in which the group meets, in seconds.
        silence: see `join`; the call that makes the group decides.

    Raises:
        PeerTimeout: the process in which the group meets could not be reached in time.
        RuntimeError: `jax.distributed` is not initialised.
        ValueError: this process is not among them.
    """
    return _current_job().connect(tuple(sorted(set(processes))), timeout, silence)


class _Job:
    """This process's part in a job: its groups, and the hub at which groups meet that it is the first process of."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.pid = os.getpid()
        self._process = distributed_process()
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._groups: dict[tuple[int, ...], Group] = {}
        self._making: dict[tuple[int, ...], threading.Lock] = {}

    def connect(self, processes: tuple[int, ...], timeout: float, silence: float) -> Group:
        if self._process not in processes:
            raise ValueError(f"this is process {self._process}; expected one of the group's, {list(processes)}")
        deadline = time.monotonic() + timeout
        with self._lock:
            making = self._making.setdefault(processes, threading.Lock())
        if not making.acquire(timeout=max(0.0, timeout)):
            raise PeerTimeout(
                f"another thread has been connecting to this group for {seconds(timeout)}", [processes[0]]
            )
        try:
            group = self._groups.get(processes)
            if group is None or group.broken:
                if self._process == processes[0]:
                    self._open_hub()
                group = self._groups[processes] = self._join(processes, deadline, timeout, silence)
            return group
        finally:
            making.release()

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        if self._hub is not None:
            self._hub.close()

    def _open_hub(self) -> None:
        with self._lock:
            if self._hub is None:
                hub = Hub(_own_address(coordinator_address()))
                host, port = hub.address
                card = {"host": host, "port": port, "token": hub.token.hex(), "peer": peer_here()}
                coordination_set(self.client, _key(self._process), json.dumps(card))
                self._hub = hub

    def _join(self, processes: tuple[int, ...], deadline: float, timeout: float, silence: float) -> Group:
        """Tries what is published, again and again: it may be of a process that is gone, until its successor writes."""
        hub = processes[0]
        problem = f"process {hub} has not published its address"
        while (left := deadline - time.monotonic()) > 0:
            text = coordination_get(self.client, _key(hub), min(left, _ATTEMPT))
            if text is None:
                continue
            card = json.loads(text)
            address, token = (card["host"], card["port"]), bytes.fromhex(card["token"])
            left = max(_PAUSE, deadline - time.monotonic())
            try:
                return join(address, token, processes, self._process, timeout=left, silence=silence)
            except OSError as error:
                problem = f"process {hub} ({card['peer']}) cannot be reached at {address[0]}:{address[1]}: {error}"
            time.sleep(min(_PAUSE, max(0.0, deadline - time.monotonic())))
        raise PeerTimeout(f"no group of the processes {list(processes)} within {seconds(timeout)}: {problem}", [hub])


_lock = threading.Lock()
_job: _Job | None = None


def _current_job() -> _Job:
    global _job
    client = distributed_client()
    if client is None:
        raise RuntimeError("several processes need jax.distributed: call jax.distributed.initialize in each of them")
    if _job is not None and _job.pid != os.getpid():
        raise RuntimeError(f"jax.distributed belongs to pid {_job.pid}, from which this process was forked")
    with _lock:
        if _job is None or _job.client is not client:
            _close_job()
            _job = _Job(client)
        return _job


@atexit.register
def _close_job() -> None:
    """Leaves, so that what this process has said still gets to the others."""
    if _job is not None and _job.pid == os.getpid():
        _job.close()


def _key(process: int) -> str:
    return f"jreshard/control/hub/{process}"


def _own_address(coordinator: str) -> str:
    """The address of this host that the others reach: where packets to the coordinator come from."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    own = _source_towards((host, int(port)))
    if ipaddress.ip_address(own).is_loopback and not _means_loopback(host):
        # Some systems resolve a host's own name to loopback, and only there.
        try:
            return _source_towards(_ELSEWHERE)
        except OSError:  # no way to other hosts: then there are none
            return own
    return own


def _source_towards(address: tuple[str, int]) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(target)  # sends nothing
        return str(sock.getsockname()[0])


def _means_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
