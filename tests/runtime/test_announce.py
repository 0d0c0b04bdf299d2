"""Shardings come back from JSON as they were."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jreshard._runtime.announce import shardings_as_json, shardings_from_json


def test_there_and_back() -> None:
    devices = np.array(jax.devices())
    square = Mesh(devices[[5, 2, 7, 0]].reshape(2, 2), ("x", "y"))
    explicit = Mesh(devices[:4].reshape(2, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    shardings = [
        NamedSharding(square, P("x", None, "y")),
        NamedSharding(explicit, P(("x", "y"))),
        None,
        NamedSharding(Mesh(devices[:1], ("device",)), P()),
        NamedSharding(square, P("x", None, "y"), memory_kind="unpinned_host"),
        NamedSharding(square, P("x", None, "y")),
    ]
    told = json.loads(json.dumps(shardings_as_json(shardings)))
    assert shardings_from_json(told) == shardings
    assert len(told["kinds"]) == 5


def test_axis_names_that_are_no_text() -> None:
    odd = NamedSharding(Mesh(np.array(jax.devices()[:2]), (3,)), P(3))
    with pytest.raises(ValueError, match="mesh axis 3 cannot be told"):
        shardings_as_json([odd])
