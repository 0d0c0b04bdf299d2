"""What the cases move."""

import math

import jax
import pytest

from jreshard.bench.cases import CASES, amount, nbytes

GIB = 1 << 30


def total(name: str, scale: float = 1) -> int:
    return sum(map(nbytes, CASES[name].scaled(scale).values()))


def test_sizes() -> None:
    assert total("one") == 8 * GIB
    assert total("one-rows-to-columns") == 2 * GIB
    assert total("medium") == 400 * 20 << 20
    assert total("small") == 2000 * 16 << 10
    assert CASES["small"].title(CASES["small"].scaled(1)) == "2,000 x 16 KiB, 0 -> 1"


def test_models() -> None:
    llama, qwen = (CASES[name].scaled(1) for name in ("llama-8b", "qwen3-30b-a3b"))
    assert len(llama) == 291
    assert sum(map(math.prod, llama.values())) == 8_030_261_248  # as published
    assert len(qwen) == 579
    assert sum(map(math.prod, qwen.values())) == 30_532_122_624  # as published


@pytest.mark.parametrize("name", CASES)
def test_scaled(name: str) -> None:
    full, small = total(name), total(name, 1 / 64)
    assert len(CASES[name].scaled(1 / 64)) == len(CASES[name].scaled(1))
    assert small == pytest.approx(full / 64, rel=0.05)


@pytest.mark.parametrize("scale", [1, 1 / 64, 1e-6])
@pytest.mark.parametrize("name", CASES)
def test_every_leaf_can_be_sharded(name: str, scale: float) -> None:
    case, devices = CASES[name], jax.devices("cpu")[:2]
    shapes = case.scaled(scale)
    for side in (case.src, case.dst):
        for leaf, sharding in side.shardings(devices, shapes).items():
            assert sharding.shard_shape(shapes[leaf])
            assert len(sharding.device_set) == len(side.devices)


def test_amounts() -> None:
    assert [amount(n) for n in (0, 12, 20 << 20, 8 << 30, 16_060_522_496, 1_500)] == [
        "0 B", "12 B", "20 MiB", "8 GiB", "16.1 GB", "1.5 kB",
    ]  # fmt: skip
