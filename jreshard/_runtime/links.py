"""Connections between the processes of one machine, over which the native core tells who may read what, and when."""

import os
import secrets
import socket
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jreshard._deadline import Deadline
from jreshard._runtime.native import connect_process, disconnect_process, is_connected
from jreshard._runtime.party import Party

_NAME_BYTES = 16
_names: dict[int, str] = {}  # of the link with each process, the same on both sides


def facts() -> dict[str, Any]:
    """What the other processes have to know before `mend`."""
    live = {str(process): name for process, name in _names.items() if is_connected(process)}
    return {"machine": _machine(), "links": live}


def mend(party: Party, said: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> None:
    """Links each two processes of the party that are not linked; all of them call this with the same facts.

    Args:
        party: the processes.
        said: the `facts` of each.
        deadline: when this process gives up.

    Raises:
        RuntimeError: they do not all run on one machine.
    """
    machines = {process: answer["machine"] for process, answer in said.items()}
    if len(set(machines.values())) > 1:
        other = next(process for process, machine in machines.items() if machine != machines[party.process])
        raise RuntimeError(
            f"jreshard: process {other} runs on another machine than process {party.process}, or in another "
            "container; arrays can be read only within one"
        )
    pairs = [
        (low, high)
        for low in said
        for high in said
        if low < high and not _same_link(said[low]["links"].get(str(high)), said[high]["links"].get(str(low)))
    ]
    if not pairs:
        return
    with _listener() as listener:
        addresses = party.agree("link the processes", listener.getsockname().hex(), deadline)

        def link() -> None:
            for low, high in pairs:
                if high == party.process:
                    _connect(low, bytes.fromhex(addresses[low]), party.process, deadline)
            for _ in range(sum(low == party.process for low, _ in pairs)):
                _accept(listener, party.processes, deadline)

        party.all_or_none("link the processes of this machine", link, deadline)


def _same_link(one: str | None, other: str | None) -> bool:
    return one is not None and one == other


@cache
def _machine() -> str:
    """Equal for processes that can reach each other's memory and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _listener() -> socket.socket:
    """Listens at an address that only who is told can find; it is gone with the socket."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0jreshard-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener


def _connect(process: int, address: bytes, me: int, deadline: Deadline) -> None:
    name = secrets.token_bytes(_NAME_BYTES)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(deadline.left)
        link.connect(address)
        _check_user(link, process)
        link.sendall(struct.pack("<i", me) + name)
        _hand_over(link, process, name)


def _accept(listener: socket.socket, processes: tuple[int, ...], deadline: Deadline) -> None:
    listener.settimeout(deadline.left)
    link, _ = listener.accept()
    with link:
        link.settimeout(deadline.left)
        hello = link.recv(4 + _NAME_BYTES, socket.MSG_WAITALL)
        if len(hello) < 4 + _NAME_BYTES:
            raise ConnectionError("jreshard: a process closed its link before it had introduced itself")
        (process,) = struct.unpack("<i", hello[:4])
        if process not in processes:
            raise ConnectionError(f"jreshard: process {process} wants a link and takes no part")
        _check_user(link, process)
        _hand_over(link, process, hello[4:])


def _check_user(link: socket.socket, process: int) -> None:
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise PermissionError(f"jreshard: process {process} belongs to user {user}, this one to {os.geteuid()}")


def _hand_over(link: socket.socket, process: int, name: bytes) -> None:
    disconnect_process(process)  # should this side not know yet that the last link has ended
    connect_process(process, link, f"process {process}")
    _names[process] = name.hex()
