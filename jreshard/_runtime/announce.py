"""How arrays lie, as one process tells another that cannot work it out for itself."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def shardings_as_json(shardings: Sequence[NamedSharding | None]) -> dict[str, Any]:
    """What `shardings_from_json` reads: each sharding that differs from the others once."""
    kinds: dict[NamedSharding | None, int] = {}
    kind_of = [kinds.setdefault(sharding, len(kinds)) for sharding in shardings]
    return {"kinds": [sharding and _as_json(sharding) for sharding in kinds], "kind_of": kind_of}


def shardings_from_json(told: dict[str, Any]) -> list[NamedSharding | None]:
    """The shardings, over the devices that have those numbers in this process as well."""
    devices = {device.id: device for device in jax.devices()}
    kinds = [kind and _from_json(kind, devices) for kind in told["kinds"]]
    return [kinds[kind] for kind in told["kind_of"]]


def _as_json(sharding: NamedSharding) -> dict[str, Any]:
    mesh = sharding.mesh
    if odd := [name for name in mesh.axis_names if not isinstance(name, str)]:
        raise ValueError(f"mesh axis {odd[0]!r} cannot be told to another process; expected axis names to be text")
    axes = zip(mesh.axis_names, mesh.devices.shape, mesh.axis_types, strict=True)
    return {
        "devices": [device.id for device in mesh.devices.flat],
        "axes": [[name, size, kind.name] for name, size, kind in axes],
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec],
        "memory": sharding.memory_kind,
    }


def _from_json(told: dict[str, Any], devices: dict[int, jax.Device]) -> NamedSharding:
    names, sizes, types = ([axis[part] for axis in told["axes"]] for part in range(3))
    members = np.empty(math.prod(sizes), object)
    members[:] = [devices[i] for i in told["devices"]]
    mesh = Mesh(members.reshape(sizes), tuple(names), axis_types=tuple(AxisType[name] for name in types))
    spec = PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in told["spec"]))
    return NamedSharding(mesh, spec, memory_kind=told["memory"])
