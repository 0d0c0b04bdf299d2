"""Which ranks of a plan share a fast domain, and what the links between them carry."""

import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Domains = Sequence[Hashable] | Callable[[Any], Hashable]


@dataclass(frozen=True)
class HostCosts:
    """What the host spends on a transfer beside the copying, in seconds.

    The defaults were fitted to `benchmarks/results/gpu_p2p.json` (two H200 in one process, jax 0.11.2); how is told in
    docs/planning.md.

    Attributes:
        call: once a transfer.
        publish: for each array on each rank that it is read from.
        receive: for each array on each rank that it is written to.
        copy: for each box that is copied, within a rank or between ranks.
        message: for each box that crosses the network, on each of its two ends. An assumption, not measured.
        collective: for each collective of the usual practice that plans are compared with. An assumption.
        launch: how many times longer these take where the links have nothing to do meanwhile, and the host is what
            everybody waits for.
    """

    call: float = 0.85e-3
    publish: float = 3.3e-6
    receive: float = 3.1e-6
    copy: float = 3.3e-6
    message: float = 2e-6
    collective: float = 20e-6
    launch: float = 1.54


@dataclass(frozen=True)
class Topology:
    """Ranks in domains of fast links (NVLink, one host or many), and domains joined by a network.

    Within a domain every rank reaches every other at `nvlink`; between domains bytes pass through the network cards
    (NICs) of both ends, and the network itself carries whatever the cards send. Rates are bytes a second, one way;
    both ways at once do not slow each other.

    A plan's ranks are the source mesh's devices first, then the destination's that are not in it. Unless `domains` says
    otherwise they fill domains in that order, `domain_size` each, and the destination's own devices begin in a fresh
    domain: trainer and rollout share no host unless they share devices.

    Attributes:
        domain_size: ranks in a domain.
        nvlink: what a rank sends, and what it receives, within its domain.
        nic: what a network card sends, and what it receives.
        ranks_per_nic: ranks that share a network card: 1, or the ranks of a host that has one card.
        ranks_per_process: ranks whose copies one process launches.
        memory: what a rank copies within its own memory.
        domains: the domain of each rank, or a function from a device to its domain, in place of `domain_size`.
        smallest_piece: bytes; boxes are not split below this to even out loads.
        costs: what the host spends.
        name: what the topology is called.
        origins: where each figure comes from.

    Example:
        >>> Topology.preset("h100-8").domain_size
        8
        >>> one_card_a_host = dataclasses.replace(Topology.preset("h100-8"), ranks_per_nic=8)
        >>> Topology(domain_size=4, nvlink=200e9, nic=25e9).place(["a"] * 6, 2).domain.tolist()
        [0, 0, 1, 1, 1, 1]
    """

    domain_size: int
    nvlink: float
    nic: float
    ranks_per_nic: int = 1
    ranks_per_process: int = 1
    memory: float = 1.44e12
    domains: Domains | None = None
    smallest_piece: int = 1 << 18
    costs: HostCosts = HostCosts()
    name: str = "custom"
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("domain_size", "ranks_per_nic", "ranks_per_process", "smallest_piece"):
            value = getattr(self, name)
            # bool is an int to Python
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"topology: {name} is {value!r}; expected a whole number of at least 1")
            object.__setattr__(self, name, int(value))
        for name in ("nvlink", "nic", "memory"):
            rate = getattr(self, name)
            if not isinstance(rate, int | float | np.integer | np.floating) or isinstance(rate, bool):
                raise TypeError(f"topology: {name} is {rate!r}; expected bytes a second, as a number")
            rate = rate.item() if isinstance(rate, np.generic) else rate
            if not 0 < rate <= sys.float_info.max:
                raise ValueError(f"topology: {name} is {rate!r}; expected bytes a second, above 0 and finite")
            object.__setattr__(self, name, float(rate))
        if self.domains is not None and not callable(self.domains):
            object.__setattr__(self, "domains", tuple(self.domains))

    @staticmethod
    def preset(name: str) -> "Topology":
        """A known kind of cluster by name; `Topology.presets()` lists them.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in _PRESETS:
            raise ValueError(f"no topology named {name!r}; there are {', '.join(_PRESETS)}")
        return _PRESETS[name]

    @staticmethod
    def presets() -> tuple[str, ...]:
        """The names that `preset` takes."""
        return tuple(_PRESETS)

    def by_process(self) -> "Topology":
        """The same links, with the devices of each process as a domain: right where one process drives a host."""
        return dataclasses.replace(self, domains=_process_of)

    def place(self, devices: Sequence[Any], sources: int) -> "Placement":
        """Where each rank of a plan sits.

        Args:
            devices: the device of each rank.
            sources: how many of them are of the source meshes.

        Raises:
            ValueError: `domains` has no entry for some rank.
        """
        ranks = np.arange(len(devices))
        if self.domains is None:
            first = -(-sources // self.domain_size)
            other = first + (ranks - sources) // self.domain_size
            domain = np.where(ranks < sources, ranks // self.domain_size, other)
        else:
            domain = _numbered(self._labels(devices))
        order = np.argsort(domain, kind="stable")
        place = np.empty(len(ranks), np.int64)
        place[order] = ranks - np.searchsorted(domain[order], domain[order])
        return Placement(
            domain, _within(domain, place // self.ranks_per_nic), _within(domain, place // self.ranks_per_process)
        )

    def _labels(self, devices: Sequence[Any]) -> list[Hashable]:
        if callable(self.domains):
            return [self.domains(device) for device in devices]
        given: Sequence[Hashable] = self.domains or ()
        if len(given) < len(devices):
            raise ValueError(f"topology: domains names {len(given)} ranks; the plan has {len(devices)}")
        return list(given[: len(devices)])


@dataclass(frozen=True)
class Placement:
    """Where each rank of a plan sits; everything is numbered from 0.

    Attributes:
        domain: `int64[ranks]`, its domain.
        port: `int64[ranks]`, the network card that it uses.
        process: `int64[ranks]`, the process that drives it.
    """

    domain: np.ndarray
    port: np.ndarray
    process: np.ndarray

    @property
    def num_ports(self) -> int:
        """Network cards that some rank uses."""
        return int(self.port.max(initial=-1)) + 1


def _process_of(device: Any) -> Hashable:
    process: int = device.process_index
    return process


def _numbered(labels: Sequence[Hashable]) -> np.ndarray:
    """Equal labels get equal numbers, in order of appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels], np.int64)


def _within(domain: np.ndarray, part: np.ndarray) -> np.ndarray:
    """One number for each pair (domain, part)."""
    _, number = np.unique(np.stack([domain, part]), axis=1, return_inverse=True)
    return np.asarray(number, np.int64).reshape(-1)


_NVLINK_EFFICIENCY = 395 / 450  # what copy engines reached between two H200, of the nominal rate

_NVLINK_4 = (
    "NVLink 4, 18 links of 25 GB/s each way (NVIDIA H100 datasheet: 900 GB/s both ways); 395 of the 450 GB/s is what "
    "the copy engines reach between two H200 (benchmarks/results/gpu_p2p.json)"
)
_CX7 = "one ConnectX-7 port of 400 Gb/s for each GPU, at line rate"
_MEMORY = "copy engine within an H200, measured; not scaled to other GPUs"

_PRESETS = {
    preset.name: preset
    for preset in (
        Topology(
            domain_size=8,
            nvlink=395e9,
            nic=50e9,
            name="h100-8",
            origins={
                "nvlink": _NVLINK_4,
                "nic": f"{_CX7} (NVIDIA DGX H100 user guide: eight ports for eight GPUs)",
                "memory": _MEMORY,
            },
        ),
        Topology(
            domain_size=8,
            nvlink=395e9,
            nic=50e9,
            name="h200-8",
            origins={
                "nvlink": _NVLINK_4,
                "nic": f"{_CX7} (NVIDIA DGX H200 datasheet)",
                "memory": _MEMORY,
            },
        ),
        Topology(
            domain_size=72,
            nvlink=900e9 * _NVLINK_EFFICIENCY,
            nic=50e9,
            name="gb200-72",
            origins={
                "nvlink": "NVLink 5, 900 GB/s each way (NVIDIA GB200 NVL72 datasheet: 1.8 TB/s both ways), times the "
                "share of its nominal rate that NVLink 4 was measured to carry",
                "nic": f"{_CX7} (NVIDIA DGX GB200 datasheet: 72 ports)",
                "memory": _MEMORY,
            },
        ),
    )
}
