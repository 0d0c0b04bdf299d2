"""Routes that are launched in parts, as those between GPUs are."""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from relays import relayed
from small_parts import launch_in_parts

import jreshard
from jreshard._planning import tables, turns
from jreshard._planning.route import Route
from jreshard._runtime import parts, programs

LEAVES = 20


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4, 8 and 8 leaves: eight are launched while the first four are copied, and eight while those after them."""
    monkeypatch.setattr(parts, "_FEWEST_LEAVES", LEAVES)
    launch_in_parts(monkeypatch, 140)


def rows_to_columns(first: int) -> tuple[NamedSharding, NamedSharding]:
    """From devices 0 and 1 to two others, from `first` on."""
    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices[:2], ("x",)), PartitionSpec("x"))
    return rows, NamedSharding(Mesh(devices[first : first + 2], ("x",)), PartitionSpec(None, "x"))


def shardings() -> tuple[NamedSharding, NamedSharding]:
    return rows_to_columns(2)


def tree() -> dict[str, np.ndarray]:
    """Leaves of many sizes, in no order of them."""
    sizes = np.random.default_rng(0).permutation(LEAVES) + 1
    return {f"w{i:02}": oracle.values((2 * n, 4), np.float32, i) for i, n in enumerate(sizes.tolist())}


@pytest.mark.usefixtures("three_parts")
def test_the_largest_leaves_go_first() -> None:
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    arranged = parts.arranged(route, "p2p")
    assert arranged.part_ends == [4, 12, 20]
    sizes = [np.prod(leaf.shape) for leaf in arranged.leaves]
    assert min(sizes[:4]) >= max(sizes[4:])
    assert min(sizes[4:12]) >= max(sizes[12:])
    assert sorted(leaf.index for leaf in arranged.leaves) == list(range(LEAVES))
    for i, leaf in enumerate(arranged.leaves):
        assert arranged.moves_of(i) is route.moves_of(route.leaves.index(leaf))


@pytest.mark.usefixtures("three_parts")
def test_where_nothing_crosses_there_is_one_part() -> None:
    src, _ = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, src).routes
    assert parts.arranged(route, "p2p") is route


@pytest.mark.usefixtures("three_parts")
def test_parts_have_chunks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_CHUNK", 3)
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    chunks = parts.arranged(route, "p2p").chunks_by_part
    assert [[(chunk.start, chunk.stop) for chunk in part] for part in chunks] == [
        [(0, 3), (3, 4)],
        [(4, 7), (7, 10), (10, 12)],
        [(12, 15), (15, 18), (18, 20)],
    ]


def test_parts_are_launched_while_the_one_before_is_copied() -> None:
    def copied(leaves: int, nbytes: int) -> np.ndarray:
        return np.full(leaves, nbytes / parts._COPY_RATE)

    launching = parts._LEAF_SECONDS["p2p"]
    assert parts._cuts(copied(400, 20 << 20), launching) == [21, 63, 184]
    assert parts._cuts(copied(2000, 16 << 10), launching) == []  # launching takes longer in any case
    for seconds in (copied(400, 20 << 20), copied(291, 55 << 20), copied(3000, 24 << 20)):
        cuts = parts._cuts(seconds, launching)
        assert parts._FIRST_PART <= cuts[0] < 50
        for one, after in itertools.pairwise(np.split(seconds, cuts)):
            assert parts._PART_SECONDS + len(after) * launching <= one.sum()


def test_what_stays_on_its_device_is_spread_among_what_crosses() -> None:
    """In every part about as much of the one as of the other, the longest first."""
    rows, columns = rows_to_columns(0)
    params = jax.device_put(tree(), rows)
    crosses = {name: i % 2 == 0 for i, name in enumerate(params)}
    dst = {name: columns if crosses[name] else rows for name in params}
    (route,) = jreshard.plan(params, rows, dst).routes
    crossing, staying = parts._seconds(route)
    order = parts._order(crossing, staying, staying > crossing)
    names = list(params)
    for which in (True, False):
        sizes = [params[names[i]].size for i in order.tolist() if crosses[names[i]] is which]
        assert sizes == sorted(sizes, reverse=True)
    shares, largest = [], 0.0
    for which in (True, False):
        sizes = np.array([params[names[i]].size * (crosses[names[i]] is which) for i in order.tolist()])
        shares.append(np.cumsum(sizes) / sizes.sum())
        largest += sizes.max() / sizes.sum()
    assert np.abs(shares[0] - shares[1]).max() < largest
    assert crosses[names[order[0]]]


@pytest.mark.parametrize("rows", [1, 20])
def test_what_stays_does_not_keep_links_waiting(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves that are copied in no time, or are so many that the host is busy, come last: parts are those of the rest.

    Spread, they would leave too little on the links of each part to launch the next meanwhile.
    """
    monkeypatch.setattr(parts, "_COPY_RATE", 4e6)  # as if all were 100,000 times as large
    monkeypatch.setattr(parts, "_LOCAL_RATE", 4e6)
    src, dst = rows_to_columns(0)
    crossing = {f"w{i:03}": jax.ShapeDtypeStruct((16, 12), np.float32, sharding=src) for i in range(100)}
    staying = {f"x{i:03}": jax.ShapeDtypeStruct((2, rows), np.float32, sharding=src) for i in range(100)}

    def ends(*trees: dict[str, Any]) -> list[int]:
        params = {name: leaf for tree in trees for name, leaf in tree.items()}
        where = {name: dst if name in crossing else src for name in params}
        (route,) = jreshard.plan(params, src, where).routes
        return parts.arranged(route, "p2p").part_ends

    alone, beside = ends(crossing), ends(crossing, staying)
    assert len(alone) > 2
    assert beside[: len(alone) - 1] == alone[:-1]


@pytest.mark.usefixtures("three_parts")
def test_transfers_over_nccl_go_in_parts() -> None:
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    assert parts.arranged(route, "nccl").part_ends == [4, 12, 20]


@pytest.mark.usefixtures("three_parts")
def test_between_cpu_devices_the_route_goes_whole() -> None:
    src, dst = shardings()
    (route,) = jreshard.plan(jax.device_put(tree(), src), src, dst).routes
    assert parts.arranged(route, "host") is route


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, three_parts: None) -> list[Route]:
    """Has transfers between CPU devices made in parts, in routes which are then in the list."""
    arrange, made = parts.arranged, []

    def arranged(route: Route, transport: str) -> Route:
        made.append(arrange(route, "p2p"))
        return made[-1]

    monkeypatch.setattr(parts, "arranged", arranged)
    launch_in_parts(monkeypatch, 60)
    monkeypatch.setattr(tables, "_CHUNK", 3)
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
    assert len(made[0].part_ends) > 1
    assert not any(array.is_deleted() for array in bad.values())


def overlapping() -> tuple[NamedSharding, NamedSharding]:
    return rows_to_columns(1)


def on_the_same() -> tuple[NamedSharding, NamedSharding]:
    return rows_to_columns(0)


def from_one() -> tuple[NamedSharding, NamedSharding]:
    one, other = (NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec()) for device in jax.devices()[:2])
    return one, other


@pytest.mark.parametrize("layouts", [shardings, overlapping, on_the_same, from_one])
def test_parts_make_up_the_whole(layouts: Any, made: list[Route]) -> None:
    src, dst = layouts()
    narrow = {name: oracle.numbers(value.shape).astype(jnp.bfloat16) for name, value in tree().items()}
    for host, dtype in ((tree(), None), (narrow, np.float32)):  # where a program goes before
        params = jax.device_put(host, src)
        plan = jreshard.plan(params, src, dst, dtype=dtype)
        old = None
        for _ in range(2):
            old = plan.execute(params, into=old, verify=True, timeout=60)
            oracle.assert_tree_holds(
                old, {name: value.astype(dtype or value.dtype) for name, value in host.items()}, dst
            )
    assert len(made) == 2
    assert all(len(route.part_ends) > 1 for route in made)


@pytest.mark.usefixtures("made")
def test_replicas_pass_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "plan_moves", relayed)
    src, _ = shardings()
    dst = NamedSharding(Mesh(np.array(jax.devices())[1:4], ("y",)), PartitionSpec())
    host = tree()
    params = jax.device_put(host, src)
    plan = jreshard.plan(params, src, dst)
    old = None
    for _ in range(3):
        old = plan.execute(params, into=old, verify=True, timeout=60)
        oracle.assert_tree_holds(old, host, dst)


@pytest.mark.parametrize("layouts", [shardings, overlapping, on_the_same])
def test_a_part_that_fails_to_launch(layouts: Any, made: list[Route]) -> None:
    """The call fails at once; the weights are there, and the next call works."""
    src, dst = layouts()
    host = {name: oracle.numbers(value.shape) for name, value in tree().items()}
    params = jax.device_put(host, src)
    plan = jreshard.plan(params, src, dst)
    old = plan.execute(params, into=plan.execute(params))
    (ready,) = plan._execution._ready["host"]
    receiving = vars(ready.launcher)["_exchange_into" if layouts is on_the_same else "_receive_into"]
    second = receiving[1]

    def fails(*_: Any) -> None:
        raise MemoryError("there is no more")

    receiving[1] = fails
    begin = time.monotonic()
    with pytest.raises(MemoryError, match="there is no more"):
        plan.execute(params, into=old, timeout=60)
    assert time.monotonic() - begin < 30
    assert all(array.is_deleted() for array in old.values())  # rather than some
    receiving[1] = second
    oracle.assert_tree_holds(plan.execute(params, timeout=60), host, dst)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    oracle.assert_tree_holds(step(params), {name: value + 1 for name, value in host.items()}, src)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("layouts", [shardings, on_the_same])
def test_everything_is_compiled_before_a_call(layouts: Any, into: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = layouts()
    params = jax.device_put(tree(), src)
    plan = jreshard.plan(params, src, dst)
    old = plan.execute(params)
    for transport in plan._execution._ready.values():
        for ready in transport:
            ready.launcher.compile(into=into)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a program is compiled while others may wait")

    monkeypatch.setattr(programs, "_compile", refuse)
    oracle.assert_tree_holds(plan.execute(params, into=old if into else None), tree(), dst)
