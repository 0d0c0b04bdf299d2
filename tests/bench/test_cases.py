"""What the cases move."""

import math

import jax
import pytest

from jreshard.bench.cases import CASES, SETS, select
from jreshard.bench.shapes import amount, nbytes

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
    case, devices = CASES[name], jax.devices("cpu")[: CASES[name].num_devices]
    shapes = case.scaled(scale)
    for side in (case.src, case.dst, *((case.base.src, case.base.dst) if case.base else ())):
        for leaf, sharding in side.shardings(devices, shapes).items():
            assert sharding.shard_shape(shapes[leaf])
            assert len(sharding.device_set) == len(side.devices)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.base])
def test_a_base_reads_shards_that_the_source_has(name: str) -> None:
    case, devices = CASES[name], jax.devices("cpu")[: CASES[name].num_devices]
    assert case.base is not None
    shapes = case.scaled(1)
    src, base = (side.shardings(devices, shapes) for side in (case.src, case.base.src))
    for leaf, shape in shapes.items():
        whole = src[leaf].devices_indices_map(shape)
        assert base[leaf].devices_indices_map(shape).items() <= whole.items()


def test_a_case_for_each_number_of_devices() -> None:
    for count, names in SETS.items():
        assert all(CASES[name].num_devices <= count for name in names)
        assert any(CASES[name].num_devices == count for name in names)
        assert len(set(names)) == len(names)


def test_selection() -> None:
    assert select(None, 2) == list(SETS[2])
    assert select(None, 7) == list(SETS[4])
    assert select(None, 16) == list(SETS[8])
    assert select([], 4) == []
    assert select(["small", "llama-8b-1-to-3-replicas", "one"], 4) == ["one", "llama-8b-1-to-3-replicas", "small"]
    with pytest.raises(ValueError, match=r"2 devices are not enough for llama-8b-2-to-2 \(4\)"):
        select(["one", "llama-8b-2-to-2"], 2)


def test_experts_are_split_like_single_matrices() -> None:
    case = CASES["qwen3-30b-a3b-2-to-2"]
    shapes = case.scaled(1)
    src, dst = (side.shardings(jax.devices("cpu")[:4], shapes) for side in (case.src, case.dst))
    up, down = (name for name in shapes if name.startswith("0.") and name.endswith(("up", "down")))
    up, down = sorted((up, down), key=lambda name: name.endswith("down"))
    experts, embed, width = shapes[up]
    assert src[up].shard_shape(shapes[up]) == (experts // 2, embed, width)
    assert dst[up].shard_shape(shapes[up]) == (experts, embed, width // 2)
    assert dst[down].shard_shape(shapes[down]) == (experts, width // 2, embed)


def test_amounts() -> None:
    assert [amount(n) for n in (0, 12, 20 << 20, 8 << 30, 16_060_522_496, 1_500)] == [
        "0 B", "12 B", "20 MiB", "8 GiB", "16.1 GB", "1.5 kB",
    ]  # fmt: skip
