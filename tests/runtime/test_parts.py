"""Routes that are launched in parts, as those between GPUs of one process are."""

import itertools
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jreshard
from jreshard._runtime import execution

LEAVES = 20


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, 8 and 8 leaves: eight are launched while the first four are copied, and eight while those after them."""
    monkeypatch.setattr(execution, "_FEWEST_LEAVES", LEAVES)
    monkeypatch.setattr(execution, "_PART_SECONDS", 0.0)
    monkeypatch.setattr(execution, "_LEAF_SECONDS", 140 / execution._COPY_RATE)


def shardings() -> tuple[NamedSharding, NamedSharding]:
    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices[:2], ("x",)), PartitionSpec("x"))
    return rows, NamedSharding(Mesh(devices[2:4], ("x",)), PartitionSpec(None, "x"))


def tree() -> dict[str, np.ndarray]:
    """Leaves of many sizes, in no order of them."""
    sizes = np.random.default_rng(0).permutation(LEAVES) + 1
    return {f"w{i:02}": oracle.values((2 * n, 4), np.float32, i) for i, n in enumerate(sizes.tolist())}


@pytest.mark.usefixtures("three_parts")
def test_the_largest_leaves_go_first() -> None:
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    parts = execution._parts(route, "p2p")
    assert [len(part.leaves) for part in parts] == [4, 8, 8]
    sizes = [np.prod(leaf.shape) for part in parts for leaf in part.leaves]
    assert min(sizes[:4]) >= max(sizes[4:])
    assert min(sizes[4:12]) >= max(sizes[12:])
    assert sorted(leaf.index for part in parts for leaf in part.leaves) == list(range(LEAVES))
    for part in parts:
        for i, leaf in enumerate(part.leaves):
            assert part.moves_of(i) is route.moves_of(route.leaves.index(leaf))


def test_parts_are_launched_while_the_one_before_is_copied() -> None:
    def copied(leaves: int, nbytes: int) -> np.ndarray:
        return np.full(leaves, nbytes / execution._COPY_RATE)

    assert execution._cuts(copied(400, 20 << 20)) == [21, 63, 184]
    assert execution._cuts(copied(2000, 16 << 10)) == []  # launching takes longer in any case
    for seconds in (copied(400, 20 << 20), copied(291, 55 << 20), copied(3000, 24 << 20)):
        cuts = execution._cuts(seconds)
        assert execution._FIRST_PART <= cuts[0] < 50
        parts = np.split(seconds, cuts)
        for one, after in itertools.pairwise(parts):
            assert execution._PART_SECONDS + len(after) * execution._LEAF_SECONDS <= one.sum()


@pytest.mark.usefixtures("three_parts")
@pytest.mark.parametrize("transport", ["host", "nccl"])
def test_other_transports_take_the_whole_route(transport: str) -> None:
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    assert execution._parts(route, transport) == [route]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, three_parts: None) -> list[Any]:
    """Has transfers between CPU devices made in parts, which are then in the list."""
    parts_of, made = execution._parts, []

    def parts(route: Any, transport: str) -> Any:
        made.append(parts_of(route, "p2p"))
        return made[-1]

    monkeypatch.setattr(execution, "_parts", parts)
    return made


def test_a_layout_that_does_not_fit_is_found_before_any_part_moves(made: list[Any]) -> None:
    src, dst = shardings()
    params = jax.device_put(tree(), src)
    plan = jreshard.plan(params, src, dst)
    old = plan.execute(params)
    last = min(old, key=lambda name: old[name].size)
    bad = {**old, last: jax.device_put(np.asarray(old[last]), Format(Layout((1, 0)), dst))}
    with pytest.raises(ValueError, match=rf"into\['{last}'\]: has another device-local layout"):
        plan.execute(params, into=bad)
    assert len(made[0]) == 3
    assert not any(array.is_deleted() for array in bad.values())


def test_parts_make_up_the_whole(made: list[Any]) -> None:
    src, dst = shardings()
    host = tree()
    params = jax.device_put(host, src)
    plan = jreshard.plan(params, src, dst)
    old = None
    for _ in range(2):
        old = plan.execute(params, into=old, verify=True)
        oracle.assert_tree_holds(old, host, dst)
    assert [len(some) for some in made] == [3]
