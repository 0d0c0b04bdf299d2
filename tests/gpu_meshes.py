"""Layouts over the GPUs of this process."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLS, WHOLE = P("x"), P(None, "x"), P()


def on(ids: list[int], spec: P, **axes: int) -> NamedSharding:
    """Over these GPUs; skips the test where there are fewer."""
    gpus = jax.devices("cuda")
    if max(ids) >= len(gpus):
        pytest.skip(f"needs {max(ids) + 1} GPUs")
    axes = axes or {"x": len(ids)}
    devices = np.array([gpus[i] for i in ids]).reshape(tuple(axes.values()))
    return NamedSharding(Mesh(devices, tuple(axes)), spec)
