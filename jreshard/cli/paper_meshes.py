"""Meshes of devices that exist only on paper, and where these sit in a cluster."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jreshard import PaperDevice, Topology, paper_devices
from jreshard.cli.errors import UsageError
from jreshard.cli.mesh_spec import format_mesh_spec

#: More would fill the memory before anything is planned.
_MOST_DEVICES = 1 << 20


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

    Devices fill the domains in mesh order. The destination has the devices of the source if `colocated`; otherwise
    devices of its own, from the first domain on that the source leaves alone.

    Raises:
        UsageError: a mesh has too many devices or axes, or `colocated` meshes have not equally many.
    """
    sources, targets = _num_devices(src_axes), _num_devices(dst_axes)
    if colocated and sources != targets:
        raise UsageError(
            f"--colocated: the source mesh has {sources:,} devices and the destination mesh {targets:,}; "
            "expected equally many"
        )
    size = topology.domain_size
    first = 0 if colocated else math.ceil(sources / size) * size
    topology = dataclasses.replace(topology, domains=ConsecutiveDomains(size))
    return _mesh(src_axes, 0), _mesh(dst_axes, first), topology


def _num_devices(axes: Mapping[str, int]) -> int:
    count = math.prod(axes.values())
    if count > _MOST_DEVICES:
        raise UsageError(f"mesh {format_mesh_spec(axes)!r} has {count:,} devices; expected at most {_MOST_DEVICES:,}")
    return count


def _mesh(axes: Mapping[str, int], first: int) -> Mesh:
    devices = paper_devices(math.prod(axes.values()), first=first)
    return Mesh(np.array(devices, dtype=object).reshape(*axes.values()), tuple(axes))
