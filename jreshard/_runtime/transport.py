"""Which transport carries a transfer."""

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from jreshard._deadline import Deadline
from jreshard._paper import PaperDevice
from jreshard._runtime import links
from jreshard._runtime.driver import DriverError, open_driver
from jreshard._runtime.party import Party

TRANSPORTS = ("auto", "nccl", "p2p", "host")
#: Allocators of JAX whose memory the driver does not lend to other processes.
UNEXPORTABLE = frozenset({"cuda_async"})

_log = logging.getLogger(__name__)
_agreed: dict[tuple[Any, ...], str] = {}  # what "auto" is between these GPUs of several processes


def choose_transport(transport: str, devices: Sequence[Any], deadline: Deadline) -> str:
    """The transport that `transport` stands for between these devices: `"host"`, `"p2p"` or `"nccl"`.

    Between GPUs of several processes `"auto"` has to be agreed on, once for each set of devices: all their
    processes call this with the same arguments.

    Raises:
        ValueError: it is unknown, or does not reach all of the devices.
        TimeoutError: another process has not come to agree.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(map(repr, TRANSPORTS))}")
    if any(isinstance(device, str) for device in devices):
        raise ValueError("the plan was made for meshes without devices; make one for meshes that have them")
    if any(isinstance(device, PaperDevice) for device in devices):
        raise ValueError("the plan's devices exist only on paper; expected ones that can hold arrays")
    if not devices:
        return "host"  # nothing moves
    platforms = {device.platform for device in devices}
    if platforms == {"gpu"}:
        if transport == "host":
            raise ValueError("transport 'host' moves arrays between CPUs; the devices are GPUs: use 'auto'")
        return transport if transport != "auto" else _between_gpus(devices, deadline)
    if platforms != {"cpu"}:
        names = " and ".join(sorted(platforms))
        raise ValueError(f"the devices are of platform {names}; expected all to be CPUs, or all to be GPUs")
    if transport in ("nccl", "p2p"):
        raise ValueError(f"transport {transport!r} needs GPUs; the devices are CPUs: use 'auto' or 'host'")
    return "host"


def _between_gpus(devices: Sequence[Any], deadline: Deadline) -> str:
    party = Party(devices)
    if not party.takes_part:
        return "nccl"  # whatever it is: this process has no part in it
    fault = _peer_fault(tuple(sorted(d.local_hardware_id for d in devices if d.process_index == party.process)))
    if party.alone:
        return _fall_back(fault) if fault else "p2p"
    if tuple(devices) not in _agreed:
        mine = {"machine": links.facts()["machine"], "fault": fault or _lending_fault()}
        said = party.agree("choose the transport between GPUs", mine, deadline)
        faults = [f"process {process}: {answer['fault']}" for process, answer in said.items() if answer["fault"]]
        if len({answer["machine"] for answer in said.values()}) > 1:
            faults.append("the processes run on several machines or in several containers")
        _agreed[tuple(devices)] = _fall_back("; ".join(faults)) if faults else "p2p"
    return _agreed[tuple(devices)]


def _fall_back(reason: str) -> str:
    _log.warning("transfers between these GPUs go by NCCL, since p2p does not work: %s", reason)
    return "nccl"


@cache
def _peer_fault(ordinals: tuple[int, ...]) -> str:
    """Why these GPUs of this process cannot read each other's memory, or empty text."""
    try:
        driver = open_driver()
        for reader in ordinals:
            for owner in ordinals:
                if reader != owner and not driver.can_access_peer(reader, owner):
                    return f"GPU {reader} cannot read the memory of GPU {owner}"
    except DriverError as error:
        return str(error)
    return ""


def _lending_fault() -> str:
    """Why other processes cannot read the arrays of this one, or empty text."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    if allocator in UNEXPORTABLE:
        return f"memory of XLA_PYTHON_CLIENT_ALLOCATOR={allocator} cannot be lent to another process"
    return ""
