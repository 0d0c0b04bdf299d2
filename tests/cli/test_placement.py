"""The rule that places a checkpoint's tensors."""

import pytest
from jax.sharding import PartitionSpec as P

from jreshard.cli.placement import partition_spec

TRAIN = {"fsdp": 4, "tp": 2}
SERVE = {"tp": 4}


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((1536, 384), TRAIN, P("fsdp", "tp")),
        ((1536, 384), SERVE, P(None, "tp")),
        ((30522, 384), TRAIN, P(None, ("fsdp", "tp"))),  # 4 does not divide 30522
        ((384,), TRAIN, P(("fsdp", "tp"))),
        ((8, 7), SERVE, P("tp", None)),
        ((4, 3), {"data": 2, "fsdp": 4}, P("data", None)),  # 4 divides the dimension, but not what data leaves of it
        ((3, 5), TRAIN, P(None, None)),
        ((), TRAIN, P()),
        ((2, 8), {"model": 2, "replica": 2}, P("replica", "model")),
    ],
)
def test_axes_split_the_dimensions_that_they_divide(shape: tuple[int, ...], axes: dict[str, int], spec: P) -> None:
    assert partition_spec(shape, axes) == spec
