"""What the facts mean: which transports work between which devices, and what is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass

from jreshard._runtime.transport import UNEXPORTABLE
from jreshard.doctor.facts import TRANSPORTS, Device, Facts, pairs_of


@dataclass(frozen=True)
class Verdict:
    """Whether a transport moves arrays between two devices.

    Attributes:
        pair: the places of the two in `Facts.devices`.
        transport: its name.
        works: `None` where this process cannot tell.
        reason: why it does not, or why that is not known.
    """

    pair: tuple[int, int]
    transport: str
    works: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """Something that the user should know.

    Attributes:
        fault: whether it keeps transfers from working; otherwise they work, but not as well as they could.
        text: what it is, and what to do.
    """

    fault: bool
    text: str


def verdicts(facts: Facts) -> list[Verdict]:
    """For every pair with a device of this process, what each transport can do."""
    return [
        Verdict(pair, transport, *_judge(facts, transport, pair))
        for pair in pairs_of(facts.devices, facts.process)
        for transport in TRANSPORTS
    ]


def findings(facts: Facts, judged: list[Verdict]) -> list[Finding]:
    """What is wrong, and what could be better."""
    return [*_faults(facts, judged), *_warnings(facts, judged)]


def _judge(facts: Facts, transport: str, pair: tuple[int, int]) -> tuple[bool | None, str]:
    a, b = (facts.devices[i] for i in pair)
    if refusal := facts.refusals.get((pair, transport)):
        return False, refusal
    if transport == "nccl":
        return (False, facts.nccl_fault) if facts.nccl_fault else (True, "")
    if a.process != b.process:
        return _judge_processes(facts, transport, a, b)
    return (True, "") if transport == "host" else _judge_peers(facts, pair)


def _judge_peers(facts: Facts, pair: tuple[int, int]) -> tuple[bool | None, str]:
    """The p2p transport within a process."""
    link = facts.links.get(pair)
    if link is None:
        return None, facts.driver_fault or "the driver does not tell how the GPUs are linked"
    if link.kind == "none":
        return False, "the driver gives neither GPU access to the other's memory (cuDeviceCanAccessPeer)"
    return True, ""


def _judge_processes(facts: Facts, transport: str, a: Device, b: Device) -> tuple[bool | None, str]:
    """A transport that reads another process's memory."""
    machines = [facts.machines.get(device.process) for device in (a, b)]
    if None in machines:
        return None, "where the other process runs is not known here"
    if machines[0] != machines[1]:
        hosts = [facts.hosts[device.process] for device in (a, b)]
        return False, f"they run on two machines, or in two containers: {hosts[0]} and {hosts[1]}"
    if transport == "p2p":
        if facts.allocator in UNEXPORTABLE:
            return False, f"memory of XLA_PYTHON_CLIENT_ALLOCATOR={facts.allocator} cannot be exported to a process"
        if False in (a.exports_memory, b.exports_memory):
            return False, "the driver cannot export the GPU's memory as a file descriptor"
        return None, "whether the GPUs reach each other shows when the processes connect"
    return True, ""


def _faults(facts: Facts, judged: list[Verdict]) -> Iterator[Finding]:
    if facts.jax_fault:
        yield Finding(True, f"JAX has no devices: {facts.jax_fault}")
    if facts.native_fault:
        yield Finding(True, f"the native library cannot be used: {facts.native_fault}")
    if facts.nccl_fault and facts.nccl_copies:
        yield Finding(True, facts.nccl_fault)
    cut_off = [pair for pair, some in _by_pair(judged).items() if all(verdict.works is False for verdict in some)]
    if cut_off:
        yield Finding(True, f"no transport works between {_names(facts, cut_off)}")


def _warnings(facts: Facts, judged: list[Verdict]) -> Iterator[Finding]:
    gpus = [device for device in facts.devices if device.platform == "gpu"]
    if facts.unused_gpus:
        yield Finding(
            False,
            f"the driver has {facts.unused_gpus} GPU(s) that JAX does not use: "
            'pip install "jreshard[cuda13]", and unset JAX_PLATFORMS if it is set',
        )
    if gpus and facts.driver_fault:
        yield Finding(False, facts.driver_fault)
    if gpus and facts.nccl_fault and not facts.nccl_copies:
        yield Finding(False, f"no transfers by nccl: {facts.nccl_fault}")
    if gpus and facts.allocator in UNEXPORTABLE:
        yield Finding(
            False,
            f"XLA_PYTHON_CLIENT_ALLOCATOR={facts.allocator}: its memory cannot be exported, so p2p does not work "
            "between processes; unset it, or use platform or vmm",
        )
    slow = [pair for pair, link in facts.links.items() if link.kind == "pcie"]
    if slow:
        yield Finding(False, f"linked by PCIe, much slower than NVLink: {_names(facts, slow)}")


def _by_pair(judged: list[Verdict]) -> dict[tuple[int, int], list[Verdict]]:
    out: dict[tuple[int, int], list[Verdict]] = {}
    for verdict in judged:
        out.setdefault(verdict.pair, []).append(verdict)
    return out


def _names(facts: Facts, pairs: list[tuple[int, int]], most: int = 6) -> str:
    """The pairs by the names of their devices, the first ones if there are many."""
    names = [" and ".join(facts.devices[i].name for i in pair) for pair in pairs[:most]]
    return "; ".join(names) + (f"; and {len(pairs) - most} pairs more" if len(pairs) > most else "")
