"""Gathers the facts, in the process that it is called in. Takes no device memory."""

import contextlib
import json
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import jax

from jreshard import _compat
from jreshard._deadline import Deadline
from jreshard._runtime import nccl
from jreshard._runtime.driver import (
    P2P_NATIVE_ATOMICS,
    POSIX_FD_SUPPORTED,
    VMM_SUPPORTED,
    Driver,
    DriverError,
    open_driver,
)
from jreshard._runtime.links import facts as facts_of_links
from jreshard._runtime.native import library
from jreshard._runtime.transport import choose_transport
from jreshard.doctor.facts import TRANSPORTS, Device, Facts, Link, pairs_of
from jreshard.doctor.nvml import Nvml, lanes_between, open_nvml, place_of

_KEY = "jreshard/doctor/host/"
_HOSTS_SECONDS = 5.0  # the others may be at something else
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def gather() -> Facts:
    """The facts of this process and its devices; starts JAX if it has not started."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("jreshard", "jax", "jaxlib")}}
    facts: dict[str, Any] = {"versions": versions, "limits": _limits(), **_native_facts()}
    facts["allocator"] = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    try:
        jax_devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a message, if no platform is named
        platforms = os.environ.get("JAX_PLATFORMS", "")
        asked = f" (JAX_PLATFORMS is {platforms})" if platforms else ""
        return Facts(**facts, jax_fault=(_one_line(error) or "no usable platform") + asked)
    facts |= _process_facts()
    try:
        driver = open_driver()
        on_driver = _driver_facts(driver, open_nvml(), jax_devices, versions)
    except DriverError as error:
        on_driver = {"driver_fault": str(error), "devices": tuple(_device(device, None) for device in jax_devices)}
    if any(device.platform == "gpu" for device in jax_devices):
        facts |= _nccl_facts(versions)
    return Facts(**facts, **on_driver, refusals=_refusals(jax_devices, on_driver["devices"]))


def _process_facts() -> dict[str, Any]:
    """This process's number, and where each process runs that tells it here in time."""
    mine = [socket.gethostname(), str(facts_of_links()["machine"])]
    said = {jax.process_index(): mine}
    if client := _compat.distributed_client():
        _compat.coordination_set(client, f"{_KEY}{jax.process_index()}", json.dumps(mine))
        end = time.monotonic() + _HOSTS_SECONDS
        for process in range(jax.process_count()):
            if text := _compat.coordination_get(client, f"{_KEY}{process}", max(0, end - time.monotonic())):
                said[process] = json.loads(text)
    return {
        "process": jax.process_index(),
        "hosts": {process: host for process, (host, _) in said.items()},
        "machines": {process: machine for process, (_, machine) in said.items()},
    }


def _refusals(jax_devices: list[Any], devices: tuple[Device, ...]) -> dict[tuple[tuple[int, int], str], str]:
    refusals = {}
    for pair in pairs_of(devices, jax.process_index()):
        for transport in TRANSPORTS:
            try:
                choose_transport(transport, [jax_devices[i] for i in pair], Deadline.after(1.0))
            except ValueError as error:
                refusals[pair, transport] = str(error)
    return refusals


def _native_facts() -> dict[str, str]:
    try:
        library()
    except (ImportError, OSError, AttributeError) as error:  # not built, does not load, or of another version
        return {"native_fault": _one_line(error)}
    except (RuntimeError, AssertionError):
        return {}  # JAX does not start, which is a fact of its own
    return {}


def _nccl_facts(versions: dict[str, str]) -> dict[str, Any]:
    try:
        found = nccl.find()
    except nccl.NcclUnavailable as error:
        return {"nccl_fault": str(error), "nccl_copies": isinstance(error, nccl.TwoCopies)}
    versions["nccl"] = ".".join(map(str, found.version))
    return {}


def _driver_facts(driver: Driver, nvml: Nvml | None, devices: list[Any], versions: dict[str, str]) -> dict[str, Any]:
    """What the driver and NVML know of JAX's devices; adds their versions."""
    versions["cuda driver api"] = driver.api_version()
    if nvml and (text := nvml.driver_version()):
        versions["nvidia driver"] = text
    gpus = {i: d.local_hardware_id for i, d in enumerate(devices) if d.platform == "gpu" and _is_ours(d)}
    count = driver.device_count()
    return {
        "devices": tuple(_device(device, driver if i in gpus else None) for i, device in enumerate(devices)),
        "links": links(driver, nvml, gpus),
        "unused_gpus": 0 if any(device.platform == "gpu" for device in devices) else count,
    }


def _is_ours(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())


def _device(device: Any, driver: Driver | None) -> Device:
    memory = exports = None
    if _is_ours(device):
        memory = (device.memory_stats() or {}).get("bytes_limit")
    if driver:
        attributes = (VMM_SUPPORTED, POSIX_FD_SUPPORTED)
        exports = all(driver.attribute(device.local_hardware_id, attribute) for attribute in attributes)
    return Device(str(device), device.platform, device.device_kind, device.process_index, memory, exports)


def links(driver: Driver, nvml: Nvml | None, gpus: Mapping[int, int]) -> dict[tuple[int, int], Link]:
    """How the GPUs reach each other.

    Args:
        driver: the CUDA driver.
        nvml: NVML, if there is one; without it NVLinks are told from PCIe, and not counted.
        gpus: the driver's number of each GPU, by the number to report it under.
    """
    places = {i: driver.pci_bus_id(ordinal) for i, ordinal in gpus.items()}
    nvlinks = {i: nvml.nvlinks(bus_id) for i, bus_id in places.items()} if nvml else {}
    out = {}
    for a, b in combinations(gpus, 2):
        lanes = lanes_between(place_of(places[a]), nvlinks[a], place_of(places[b]), nvlinks[b]) if nvml else None
        out[a, b] = _link(driver, gpus[a], gpus[b], lanes)
    return out


def _link(driver: Driver, a: int, b: int, lanes: int | None) -> Link:
    if not (driver.can_access_peer(a, b) and driver.can_access_peer(b, a)):
        return Link("none")
    if lanes:
        return Link("nvlink", lanes)
    # Atomics on a peer's memory are what NVLink has and PCIe lacks.
    return Link("nvlink" if driver.p2p_attribute(P2P_NATIVE_ATOMICS, a, b) else "pcie")


def _limits() -> dict[str, str]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"open files": _amount(soft, "")}
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits["locked memory"] = _amount(soft, " bytes")
    with contextlib.suppress(OSError):
        limits["free in /dev/shm"] = f"{shutil.disk_usage('/dev/shm').free:,} bytes"
    with contextlib.suppress(OSError):  # kernels without Yama set no such limit
        limits["ptrace scope"] = _PTRACE_SCOPE.read_text().strip()
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if name in os.environ:
            limits[name] = os.environ[name]
    return limits


def _amount(number: int, unit: str) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}{unit}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
