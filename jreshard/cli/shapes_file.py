"""Shapes of a model of one's own: from the header of a safetensors file, or written down as JSON."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jreshard._wire import UNUSABLE
from jreshard.cli.checkpoint import open_checkpoint
from jreshard.cli.errors import UsageError
from jreshard.cli.json_file import read_json
from jreshard.models import Weight

#: Sizes and figures are kept in 64 bits.
MOST_BYTES = (1 << 63) - 1
#: NumPy's `longdouble` and `clongdouble`, numbers that JAX has no arrays of.
_LONG_DOUBLES = "gG"
#: Well below what NumPy's arrays can have.
_MOST_DIMS = 32
_SHOWN = 80


@dataclass(frozen=True)
class Shapes:
    """The arrays of a model.

    Attributes:
        structs: shape and dtype of each, by name.
        weights: those whose logical axes are known.
    """

    structs: dict[str, jax.ShapeDtypeStruct]
    weights: dict[str, Weight]


def read_shapes(path: Path) -> Shapes:
    """Read the shapes in `path`, a `.safetensors` file or a JSON file.

    JSON is an object with an entry an array, `{"name": {"shape": [64, 32], "dtype": "bfloat16", "axes": ["embed",
    null]}}`. `dtype`, bfloat16 by default, and `axes`, the logical axis of every dim, may be left out.

    Raises:
        UsageError: the file cannot be read, or is neither.
    """
    if path.suffix == ".safetensors":
        tensors = open_checkpoint(path)
        return Shapes({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}, {})
    if path.suffix != ".json":
        raise UsageError(f"{path}: expected a file that ends in .safetensors or .json")
    return _from_json(_load(path), path)


def _load(path: Path) -> Mapping[str, Any]:
    data = read_json(path, str(path), object_pairs_hook=_without_repeats)
    if not isinstance(data, dict) or not data:
        raise UsageError(f'{path}: expected an object like {{"name": {{"shape": [64, 32]}}}}')
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these members; JSON itself would let the last of several with one name win."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{name!r} is there twice in one object")
        out[name] = value
    return out


def _from_json(data: Mapping[str, Any], path: Path) -> Shapes:
    structs, weights = {}, {}
    for name, entry in data.items():
        where = f"{path}: {name}"
        if not isinstance(entry, dict) or not entry.keys() <= {"shape", "dtype", "axes"}:
            raise UsageError(f"{where}: expected an object with shape, dtype and axes, found {_shown(entry)}")
        shape, dtype = _shape(entry.get("shape"), where), _dtype(entry.get("dtype", "bfloat16"), where)
        # even an array without elements may have no dims that do not fit
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > MOST_BYTES:
            raise UsageError(f"{where}: shape is {_shown(list(shape))}; expected at most {MOST_BYTES:,} bytes")
        structs[name] = jax.ShapeDtypeStruct(shape, dtype)
        if "axes" in entry:
            weights[name] = Weight(shape, _axes(entry["axes"], len(shape), where))
    return Shapes(structs, weights)


def _shape(given: Any, where: str) -> tuple[int, ...]:
    # bool is an int to Python
    sizes = isinstance(given, list) and all(type(size) is int and size >= 0 for size in given)
    if sizes and len(given) <= _MOST_DIMS:
        return tuple(given)
    raise UsageError(f"{where}: shape is {_shown(given)}; expected a list of sizes, at most {_MOST_DIMS}")


def _dtype(given: Any, where: str) -> np.dtype[Any]:
    expected = "expected one that JAX arrays have, such as bfloat16 or float32"
    # to NumPy `None` is float64, and text may be an expression that does not parse
    try:
        dtype: np.dtype[Any] | None = jnp.dtype(given) if isinstance(given, str) else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.name in UNUSABLE or dtype.char in _LONG_DOUBLES or not dtype.isnative:
        raise UsageError(f"{where}: dtype is {_shown(given)}; {expected}")
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise UsageError(f"{where}: dtype is {_shown(given)}; {expected}")
    return dtype


def _axes(given: Any, ndim: int, where: str) -> tuple[str | None, ...]:
    named = isinstance(given, list) and all(axis is None or isinstance(axis, str) for axis in given)
    if named and len(given) == ndim:
        return tuple(given)
    raise UsageError(f"{where}: axes is {_shown(given)}; expected a list of {ndim} names or null")


def _shown(value: Any) -> str:
    """The start of a value as JSON."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
