"""Safetensors files as NumPy arrays over the mapped file, in every format that JAX can hold."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jreshard.cli.errors import UsageError, require_extra

#: Fewer bytes than this pass too quickly for a progress bar to help.
_PROGRESS_BYTES = 1 << 30

_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(scalar)
    for name, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}


def open_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Map the safetensors file at `path` and return its tensors as read-only arrays over the mapping.

    Raises:
        UsageError: the file cannot be read, is no safetensors file, or holds no tensors or some that JAX cannot hold.
    """
    _validate(path)
    data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)

    tensors, refused = {}, []
    for name, entry in header.items():
        layout = _array_layout(entry["dtype"], entry["shape"])
        if layout is None:
            refused.append(f"{name} ({entry['dtype']})")
            continue
        dtype, shape = layout
        first, last = entry["data_offsets"]
        tensors[name] = data[start + first : start + last].view(dtype).reshape(shape)
    if refused:
        raise UsageError(f"{path}: JAX has no arrays of the format of {', '.join(refused)}")
    if not tensors:
        raise UsageError(f"{path}: holds no tensors")
    return tensors


def with_progress(tensors: Mapping[str, np.ndarray], title: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the items of `tensors`, with a progress bar on a terminal if they are large."""
    from tqdm import tqdm

    total = sum(tensor.nbytes for tensor in tensors.values())
    with tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=total < _PROGRESS_BYTES or None) as bar:
        for name, tensor in tensors.items():
            yield name, tensor
            bar.update(tensor.nbytes)


def _validate(path: Path) -> None:
    """Have the library that defines the format check the header and that the tensors tile the rest of the file.

    It hands out the formats that plain NumPy lacks in no way that all its versions share, so the arrays are made here.
    """
    require_extra("demo", "safetensors")
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        with safe_open(path, framework="numpy"):
            pass
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path}: not a safetensors file: {error}") from error


def _array_layout(format_name: str, shape: list[int]) -> tuple[np.dtype[Any], list[int]] | None:
    """Return the dtype and shape of the array that holds a tensor, or None if JAX can have no such array."""
    if format_name == "F4" and shape[-1] % 2 == 0:
        # Two values a byte, which not every backend can address one by one: hold the bytes, as PyTorch does.
        return np.dtype(np.uint8), [*shape[:-1], shape[-1] // 2]
    dtype = _DTYPES.get(format_name)
    return None if dtype is None else (dtype, shape)
