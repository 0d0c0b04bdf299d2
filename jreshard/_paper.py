"""Devices that exist only on paper, for meshes that are planned and never executed."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh


class _PaperClient:
    """What JAX asks for the number of its own process, to tell the devices that it can address."""

    def process_index(self) -> int:
        return PaperDevice.process_index


@dataclass(frozen=True, order=True)
class PaperDevice:
    """A device for `jax.sharding.Mesh` that nobody has. Devices of equal `id` are the same device.

    Attributes:
        id: its number in the cluster.
    """

    id: int

    platform = "paper"
    device_kind = "paper"
    process_index = 0

    client = _PaperClient()

    def __str__(self) -> str:
        return f"paper {self.id}"


def paper_devices(count: int, *, first: int = 0) -> list[PaperDevice]:
    """Devices `first` to `first + count - 1` of a cluster that exists only on paper.

    They go wherever JAX takes devices to lay out an array: in a `Mesh`, in any order, the same ones in two meshes. Only
    `jreshard.plan` can do anything with such a mesh.

    Example:
        >>> trainer = Mesh(np.array(paper_devices(64)).reshape(8, 8), ("fsdp", "tp"))
        >>> rollout = Mesh(np.array(paper_devices(16, first=64)), ("tp",))
        >>> colocated = Mesh(np.array(paper_devices(64))[::-1].reshape(16, 4), ("dp", "tp"))
    """
    return [PaperDevice(first + i) for i in range(count)]


def on_paper(mesh: Any) -> bool:
    """Whether some device of the mesh exists only on paper."""
    return isinstance(mesh, Mesh) and any(isinstance(device, PaperDevice) for device in mesh.devices.flat)
