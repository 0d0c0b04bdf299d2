"""What the examination finds before anybody judges it: plain values, which tests make up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from jreshard._runtime import transport

#: What `"auto"` chooses among.
TRANSPORTS = tuple(name for name in transport.TRANSPORTS if name != "auto")


@dataclass(frozen=True)
class Device:
    """A device of JAX.

    Attributes:
        name: as JAX writes it.
        platform: `"cpu"` or `"gpu"`.
        kind: the model, such as `NVIDIA H200`.
        process: the process that drives it.
        memory: bytes that JAX may use on it; `None` where unknown.
        exports_memory: whether the driver can hand the device's memory to other processes; `None` where unknown.
    """

    name: str
    platform: str
    kind: str
    process: int
    memory: int | None = None
    exports_memory: bool | None = None


@dataclass(frozen=True)
class Link:
    """How two GPUs reach each other.

    Attributes:
        kind: `"nvlink"`, `"pcie"` or `"none"`.
        lanes: the NVLinks between them; `None` where NVML does not tell.
    """

    kind: str
    lanes: int | None = None

    def __str__(self) -> str:
        if self.kind != "nvlink":
            return {"pcie": "PCIe", "none": "none"}[self.kind]
        return "NVLink" if self.lanes is None else f"NVLink x {self.lanes}"


def pairs_of(devices: Sequence[Device], process: int) -> list[tuple[int, int]]:
    """The places of every two devices of which one at least is driven by `process`; the others know about the rest."""
    pairs = combinations(range(len(devices)), 2)
    return [pair for pair in pairs if any(devices[i].process == process for i in pair)]


@dataclass(frozen=True)
class Facts:
    """All that was found, in one process.

    Attributes:
        versions: of the software, by name; a missing one is absent.
        process: this process's number.
        hosts: the host of each process, where known.
        machines: for each such process, what is equal where two can reach each other's memory.
        devices: JAX's devices, those of other processes too.
        links: between devices of this process, by their places in `devices`, the lower first.
        refusals: for pairs as `pairs_of` gives them, and transports that jreshard does not offer between them, why not.
        jax_fault: why JAX has no devices.
        driver_fault: why the CUDA driver cannot be asked.
        unused_gpus: GPUs that the driver has and JAX does not use.
        nccl_fault: why there is no NCCL to use.
        nccl_copies: more than one copy in the process is why.
        native_fault: why the native library cannot be used.
        allocator: `XLA_PYTHON_CLIENT_ALLOCATOR`, or `"default"`.
        limits: limits of memory and descriptors, by name, as text.
    """

    versions: Mapping[str, str]
    process: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    machines: Mapping[int, str] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    refusals: Mapping[tuple[tuple[int, int], str], str] = field(default_factory=dict)
    jax_fault: str | None = None
    driver_fault: str | None = None
    unused_gpus: int = 0
    nccl_fault: str | None = None
    nccl_copies: bool = False
    native_fault: str | None = None
    allocator: str = "default"
    limits: Mapping[str, str] = field(default_factory=dict)
