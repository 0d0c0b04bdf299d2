"""What the planner says of the cases beforehand."""

import pytest

from jreshard.bench.ceilings import AT_ONCE, BOTH_WAYS, COPY_ENGINE
from jreshard.bench.expected import expected

GIB = 1 << 30
LINK = 400e9


@pytest.mark.parametrize(
    ("key", "busiest", "ceiling"),
    [
        ("one", 8, COPY_ENGINE),
        ("one-rows-to-1", 1, COPY_ENGINE),
        ("one-rows-to-columns", 0.5, BOTH_WAYS),
        ("one-2-to-2-columns", 4, AT_ONCE),
        ("one-4-to-4-same", 2, AT_ONCE),
        ("one-3-to-4", 1.5, BOTH_WAYS),
    ],
)
def test_the_busiest_link(key: str, busiest: float, ceiling: str) -> None:
    found = expected(key, 1.0, 1, LINK)
    assert found["bytes_busiest_link"] == pytest.approx(busiest * GIB, rel=1e-6)
    assert found["ceiling"] == ceiling
    assert found["base"] is None
    assert found["predicted"]["total"] > busiest * GIB / LINK


def test_replicas_do_not_slow_the_source() -> None:
    """To 7 replicas the source sends once, and 2 sources halve what each sends."""
    fan_out, two = (expected(key, 1.0, 1, LINK) for key in ("llama-8b-1-to-7-replicas", "llama-8b-2-replicas-to-2"))
    assert fan_out["bytes_busiest_link"] == pytest.approx(16.06e9, rel=1e-3)
    assert fan_out["base"] == "1 -> 1"
    assert two["bytes_busiest_link"] == pytest.approx(8.03e9, rel=1e-2)
    assert two["base"] == "one source"


def test_processes_that_launch_side_by_side() -> None:
    alone, many = (expected("llama-8b-4-to-4", 1.0, processes, LINK)["predicted"] for processes in (1, 4))
    assert many["host"] < alone["host"] / 2
    assert many["links"] == alone["links"]
