"""Meshes of devices that exist only on paper, and where these sit in a cluster."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jreshard import PaperDevice, Topology, paper_devices


@dataclass(frozen=True)
class ConsecutiveDomains:
    """Puts devices with consecutive numbers into domains of `size`. Equal if the sizes are, as plans are cached."""

    size: int

    def __call__(self, device: PaperDevice) -> int:
        """The domain of `device`."""
        return device.id // self.size


def paper_meshes(
    src_axes: Mapping[str, int], dst_axes: Mapping[str, int], topology: Topology, *, colocated: bool
) -> tuple[Mesh, Mesh, Topology]:
    """A source mesh, a destination mesh, and the topology that knows the domain of each of their devices.

    Devices fill the domains in mesh order. The destination has the first devices of the source if `colocated`;
    otherwise devices of its own, from the first domain on that the source leaves alone.
    """
    size = topology.domain_size
    first = 0 if colocated else math.ceil(math.prod(src_axes.values()) / size) * size
    topology = dataclasses.replace(topology, domains=ConsecutiveDomains(size))
    return _mesh(src_axes, 0), _mesh(dst_axes, first), topology


def _mesh(axes: Mapping[str, int], first: int) -> Mesh:
    devices = paper_devices(math.prod(axes.values()), first=first)
    return Mesh(np.array(devices, dtype=object).reshape(*axes.values()), tuple(axes))
