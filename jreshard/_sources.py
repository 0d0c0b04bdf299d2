"""What is handed over to be moved: which leaves are arrays on devices, which values of the host, which neither."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jreshard._compat import is_array, is_tracer, row_major
from jreshard._leaves import LeafErrors, Path, describe
from jreshard._wire import UNUSABLE

HOST_TYPES = (bool, int, float, complex, np.ndarray, np.generic)


@dataclass(frozen=True)
class Source:
    """A leaf before it moves.

    Attributes:
        shape: the global shape.
        dtype: its dtype, an extended one for PRNG keys.
        sharding: where it lies; `None` for a value of the host.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding | None


def read_source(x: Any, wanted: Sharding | None, path: Path, errors: LeafErrors, *, structs: bool) -> Source | None:
    """The source that leaf `x` is, or `None` with its faults in `errors`.

    Args:
        x: the leaf.
        wanted: where the caller says that it lies; `None` for wherever that is.
        path: its key path.
        errors: where faults are noted.
        structs: whether a `ShapeDtypeStruct` will do; it always does for what lies on devices of other processes.
    """
    if is_tracer(x):
        message = "is a tracer; call transfer outside jit, on arrays that exist"
        errors.add(path, message, kind=TypeError)
    elif is_array(x):
        if x.is_deleted():
            errors.add(path, f"is deleted (or was donated); expected a live array of shape {x.shape}, dtype {x.dtype}")
            return None
        return _located(x, x.sharding, wanted, path, errors)
    elif isinstance(x, jax.ShapeDtypeStruct):
        if structs or lies_elsewhere(x.sharding or wanted):
            return _located(x, x.sharding or wanted, wanted, path, errors)
        errors.add(path, f"is the placeholder {x}; expected an array, there is nothing to move", kind=TypeError)
    elif isinstance(x, HOST_TYPES):
        return _of_host(x, path, errors)
    else:
        errors.add(path, f"is a {type(x).__name__}; expected a jax.Array, a NumPy array or a number", kind=TypeError)
    return None


def check_whole_numbers(x: Any, dtype: Any, path: Path, errors: LeafErrors) -> None:
    """Notes where whole numbers of the host do not fit their dtype on devices: JAX would keep their low bits only.

    Args:
        x: a value of the host.
        dtype: what it becomes.
        path: its key path.
        errors: where it is noted.
    """
    array = np.asarray(x)
    if not array.size or array.dtype == dtype or not jnp.issubdtype(dtype, jnp.integer):
        return
    limits, least, most = jnp.iinfo(dtype), int(array.min()), int(array.max())
    if least < limits.min or most > limits.max:
        found = f"is {least}" if least == most else f"has values from {least} to {most}"
        narrow = jax.dtypes.canonicalize_dtype(np.int64) != np.int64
        more = "; jax_enable_x64 has wider ones" if narrow else ""
        errors.add(path, f"{found}; expected {limits.min} to {limits.max}, which {dtype} holds{more}")


def lies_elsewhere(sharding: Sharding | None) -> bool:
    """Whether all the devices are of other processes, so that this one needs no arrays to say what is there."""
    if sharding is None or not isinstance(getattr(sharding, "mesh", None), Mesh):
        return False
    return not sharding.addressable_devices


def _of_host(x: Any, path: Path, errors: LeafErrors) -> Source | None:
    array = np.asarray(x)
    if isinstance(x, int) and not isinstance(x, bool):
        array = np.zeros((), np.int64)  # as JAX sees it, whatever its size
    try:
        dtype = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(array.dtype))).dtype
    except TypeError:
        dtype = None
    if dtype is None or dtype.name in UNUSABLE or not array.dtype.isnative:
        errors.add(path, f"is of dtype {array.dtype}; expected one that JAX arrays have", kind=TypeError)
        return None
    check_whole_numbers(x, dtype, path, errors)
    return Source(array.shape, dtype, None)


def _located(
    x: Any, sharding: Sharding | None, wanted: Sharding | None, path: Path, errors: LeafErrors
) -> Source | None:
    if any(size < 0 for size in x.shape):
        errors.add(path, f"is of shape {tuple(x.shape)}; expected sizes that are not negative")
        return None
    if x.dtype.name in UNUSABLE:
        errors.add(path, f"is of dtype {x.dtype}, which XLA cannot compute with; expected another", kind=TypeError)
        return None
    if sharding is None:
        errors.add(path, f"is {x} without a sharding; give one, or src_sharding")
        return None
    if isinstance(wanted, SingleDeviceSharding):
        wanted = named_sharding(wanted)
    if wanted is not None and not isinstance(wanted, NamedSharding):
        errors.add(path, f"src_sharding is {wanted}; expected a NamedSharding", kind=TypeError)
        return None
    if wanted is not None and not _lies(x, sharding, wanted):
        where = f"lies on {describe(sharding)}; expected {describe(wanted)}, as src_sharding says"
        errors.add(path, f"{where} (src_sharding=None takes arrays wherever they lie)")
        return None
    if is_array(x) and not row_major(x):
        errors.add(path, f"has the device-local layout {x.format.layout}; expected the default, row-major one")
        return None
    named = wanted or named_sharding(sharding)
    if named is None:
        errors.add(path, f"lies on {sharding}; expected a NamedSharding: give src_sharding", kind=TypeError)
        return None
    return Source(tuple(x.shape), x.dtype, named)


def _lies(x: Any, sharding: Sharding, wanted: NamedSharding) -> bool:
    if sharding == wanted:
        return True
    try:
        return sharding.is_equivalent_to(wanted, len(x.shape))
    except (ValueError, IndexError):  # a spec that does not fit the array; JAX has no gentler way to ask
        return False


def named_sharding(sharding: Sharding) -> NamedSharding | None:
    """The same placement as a `NamedSharding`, where it is one or lies on one device."""
    if isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, SingleDeviceSharding):
        mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
        return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return None
