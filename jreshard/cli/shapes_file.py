"""Shapes of a model of one's own: from the header of a safetensors file, or written down as JSON."""

import json
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
from jreshard.models import Weight


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
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(data, dict) or not data:
        raise UsageError(f'{path}: expected an object like {{"name": {{"shape": [64, 32]}}}}')
    return data


def _from_json(data: Mapping[str, Any], path: Path) -> Shapes:
    structs, weights = {}, {}
    for name, entry in data.items():
        where = f"{path}: {name}"
        if not isinstance(entry, dict) or not entry.keys() <= {"shape", "dtype", "axes"}:
            raise UsageError(f"{where}: expected an object with shape, dtype and axes, found {json.dumps(entry)}")
        shape = _shape(entry.get("shape"), where)
        structs[name] = jax.ShapeDtypeStruct(shape, _dtype(entry.get("dtype", "bfloat16"), where))
        if "axes" in entry:
            weights[name] = Weight(shape, _axes(entry["axes"], len(shape), where))
    return Shapes(structs, weights)


def _shape(given: Any, where: str) -> tuple[int, ...]:
    # bool is an int to Python
    if isinstance(given, list) and all(type(size) is int and size >= 0 for size in given):
        return tuple(given)
    raise UsageError(f"{where}: shape is {json.dumps(given)}; expected a list of sizes")


def _dtype(given: Any, where: str) -> np.dtype[Any]:
    expected = "expected one that JAX arrays have, such as bfloat16 or float32"
    try:
        dtype: np.dtype[Any] = jnp.dtype(given)
    except TypeError:
        raise UsageError(f"{where}: dtype is {json.dumps(given)}; {expected}") from None
    if dtype.name in UNUSABLE or not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise UsageError(f"{where}: dtype is {json.dumps(given)}; {expected}")
    return dtype


def _axes(given: Any, ndim: int, where: str) -> tuple[str | None, ...]:
    named = isinstance(given, list) and all(axis is None or isinstance(axis, str) for axis in given)
    if named and len(given) == ndim:
        return tuple(given)
    raise UsageError(f"{where}: axes is {json.dumps(given)}; expected a list of {ndim} names or null")
