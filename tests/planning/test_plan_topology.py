"""Plans for a topology: what arrives, over which links, and how near to the bound."""

import copy
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from oracle import P, assert_tree_holds, mesh, named, put, replay, values

import jreshard
from jreshard import PaperDevice, Topology, paper_devices
from jreshard._paper_plans import PaperPlans
from jreshard._planning.loads import FAR, LOCAL, NEAR

H100 = Topology.preset("h100-8")
SMALL = Topology(domain_size=4, nvlink=400e9, nic=50e9, smallest_piece=1)


def paper(ids: Any, **axes: int) -> Mesh:
    """The mesh of these paper devices; one axis `x` over all where no axes are named."""
    devices = np.array([PaperDevice(i) for i in ids])
    axes = axes or {"x": len(devices)}
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- any layouts -----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    shapes: dict[str, jax.ShapeDtypeStruct]
    src: dict[str, NamedSharding]
    dst: dict[str, NamedSharding]
    topology: Topology

    def plan(self) -> jreshard.Plan:
        return jreshard.plan(self.shapes, self.src, self.dst, topology=self.topology)


def parts(sharding: NamedSharding, dim: int) -> int:
    entry = sharding.spec[dim] or ()
    return math.prod(sharding.mesh.shape[axis] for axis in entry)


@st.composite
def meshes(draw, ids: list[int], names: str) -> Mesh:
    first = draw(st.sampled_from([n for n in range(1, len(ids) + 1) if len(ids) % n == 0]))
    rest = len(ids) // first
    second = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return paper(ids, **dict(zip(names, (first, second, rest // second), strict=True)))


@st.composite
def shardings(draw, on: Mesh, rank: int) -> NamedSharding:
    dims = [draw(st.integers(-1, rank - 1)) for _ in on.axis_names]
    spec = [tuple(axis for axis, dim in zip(on.axis_names, dims, strict=True) if dim == d) for d in range(rank)]
    return NamedSharding(on, P(*(entry or None for entry in spec)))


@st.composite
def cases(draw) -> Case:
    sources, targets = draw(st.integers(1, 12)), draw(st.integers(1, 16))
    first = draw(st.sampled_from([0, sources // 2, 100]))
    order = draw(st.permutations(range(first, first + targets)))
    src_mesh, dst_mesh = draw(meshes(list(range(sources)), "xyz")), draw(meshes(order, "abc"))
    shapes, src, dst = {}, {}, {}
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, 3))
        one, other = draw(shardings(src_mesh, rank)), draw(shardings(dst_mesh, rank))
        shape = [
            math.lcm(parts(one, dim), parts(other, dim)) * draw(st.sampled_from([1, 2, 3, 8])) for dim in range(rank)
        ]
        dtype = draw(st.sampled_from(["float32", "int8", "int4"]))
        for _ in range(draw(st.integers(1, 3)) if math.prod(shape) <= 20_000 else 0):
            name = f"{len(shapes):02}"
            shapes[name], src[name], dst[name] = struct(*shape, dtype=dtype), one, other
    topology = Topology(
        domain_size=draw(st.sampled_from([1, 2, 3, 4, 8, 72])),
        nvlink=draw(st.sampled_from([50e9, 400e9])),
        nic=50e9,
        ranks_per_nic=draw(st.sampled_from([1, 1, 2, 8])),
        smallest_piece=draw(st.sampled_from([1, 8, 1 << 18])),
    )
    return Case(shapes, src, dst, topology)


@settings(max_examples=2 * settings.default.max_examples)
@given(cases())
def test_every_element_is_written_once_from_where_it_is(case):
    plan = case.plan()
    for i, name in enumerate(case.shapes):
        replay(plan, i, case.shapes[name].shape, case.src[name], case.dst[name])


@given(cases())
def test_figures_are_those_of_the_moves(case):
    plan = case.plan()
    moves = [move for i in range(plan.num_leaves) for move in plan.moves(i)]
    ranks = range(len(plan.devices))
    assert plan.num_moves == len(moves)
    assert plan.nbytes == sum(move.nbytes for move in moves)
    assert plan.traffic.sum() == plan.nbytes
    for rank in ranks:
        assert plan.sent[rank] == sum(m.nbytes for m in moves if m.src_rank == rank != m.dst_rank)
        assert plan.received[rank] == sum(m.nbytes for m in moves if m.dst_rank == rank != m.src_rank)
    loads = copy.deepcopy(plan.figures.loads)
    for move in moves:
        near = plan.domains[move.src_rank] == plan.domains[move.dst_rank]
        link = LOCAL if move.src_rank == move.dst_rank else NEAR if near else FAR
        loads.received[move.phase, link, move.dst_rank] -= move.nbytes
        loads.sent[move.phase, link, move.src_rank] -= move.nbytes
        loads.boxes_sent[move.phase, link, move.src_rank] -= 1
        loads.boxes_received[move.phase, link, move.dst_rank] -= 1
    assert not any(table.any() for table in (loads.sent, loads.received, loads.boxes_sent, loads.boxes_received))


@given(cases(), st.integers(0, 100))
def test_the_part_of_a_rank_is_its_part_of_the_whole(case, choice):
    plan = case.plan()
    rank = choice % max(1, len(plan.devices))
    if not plan.num_leaves:
        return
    part = plan.part(rank)
    for i in range(plan.num_leaves):
        expected = [move for move in plan.moves(i) if rank in (move.src_rank, move.dst_rank)]
        moves, nbytes = part.moves[part.leaf[i]], part.nbytes[part.leaf[i]]
        columns = moves.src, moves.dst, moves.start, moves.stop, nbytes, moves.phase
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found = [jreshard.Move(s, d, tuple(a), tuple(b), n, phase) for s, d, a, b, n, phase in rows]
        assert sorted(map(repr, found)) == sorted(map(repr, expected))


@given(cases())
def test_bytes_that_are_near_do_not_cross_the_network(case):
    """What a domain holds is not fetched; what it lacks enters once, and nothing that is not wanted does."""
    plan = case.plan()
    for i, name in enumerate(case.shapes):
        positions = np.arange(math.prod(case.shapes[name].shape)).reshape(case.shapes[name].shape)
        held, wanted = ({plan.domains[rank]: set() for rank in range(len(plan.devices))} for _ in range(2))
        for sharding, sets in ((case.src[name], held), (case.dst[name], wanted)):
            for device, index in sharding.devices_indices_map(positions.shape).items():
                sets[plan.domains[plan.devices.index(device)]] |= set(positions[index].reshape(-1).tolist())
        entering = {domain: 0 for domain in held}
        for move in plan.moves(i):
            if plan.domains[move.src_rank] != plan.domains[move.dst_rank]:
                box = tuple(map(slice, move.start, move.stop))
                entering[plan.domains[move.dst_rank]] += positions[box].size
        assert entering == {domain: len(wanted[domain] - held[domain]) for domain in held}


@given(cases())
def test_no_plan_is_below_the_bound(case):
    plan = case.plan()
    figures = plan.figures
    assert figures.busiest.seconds >= figures.bound.seconds * (1 - 1e-9)
    assert figures.predicted.total >= figures.bound.seconds
    assert figures.phases <= 3


@given(cases())
def test_plans_are_the_same_every_time(case):
    one = case.plan()
    other = jreshard.plan({**case.shapes}, {**case.src}, {**case.dst}, topology=dataclasses.replace(case.topology))
    assert one.to_json() == other.to_json()
    shifted = dataclasses.replace(case.topology, smallest_piece=case.topology.smallest_piece + 1)
    third = jreshard.plan(case.shapes, case.src, case.dst, topology=shifted)
    assert third.fingerprint != one.fingerprint


@pytest.mark.parametrize("ranks_per_nic", [1, 2])
def test_the_largest_arrays_are_counted_exactly(ranks_per_nic):
    """Three holders, shares that are not even, and the most elements that a plan takes."""
    size = 3 << 43
    src, dst = named(paper(range(6), a=2, b=3), "a"), named(paper(range(6, 14), dp=4, tp=2), "tp")
    topology = dataclasses.replace(SMALL, domain_size=3, ranks_per_nic=ranks_per_nic)
    plan = jreshard.plan({"w": struct(size), "v": struct(6, size // 6)}, src, dst, topology=topology)
    for leaf in range(2):
        moves = plan.moves(leaf)
        assert all(a < b for move in moves for a, b in zip(move.start, move.stop, strict=True))
        assert sum(move.nbytes for move in moves) == 4 * 2 * size
        assert sum(math.prod(b - a for a, b in zip(m.start, m.stop, strict=True)) for m in moves) == 4 * size
    assert plan.nbytes == plan.traffic.sum() == plan.lower_bound == 2 * 4 * 2 * size
    assert 1 <= plan.figures.over_bound < 1.2


# --- balance ---------------------------------------------------------------------------------------------------------


def plan_on_h100(shapes: dict[str, Any], src: Any, dst: Any, **changes: Any) -> jreshard.Plan:
    return jreshard.plan(shapes, src, dst, topology=dataclasses.replace(H100, **changes))


@pytest.mark.parametrize("form", [{"w": (4096, 8192)}, {str(i): (512, 1024) for i in range(64)}])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (named(paper(range(64)), "x"), named(paper(range(64, 128), dp=8, tp=8), "tp")),
        (named(paper(range(64)), "x"), named(paper(range(64, 192), dp=16, tp=8), None, "tp")),
        (named(paper(range(64)), "x"), named(paper(range(64, 96), dp=8, tp=4), None, "tp")),
        (named(paper(range(64)), "x"), named(paper(range(64, 80)))),
        (named(paper(range(64), dp=8, tp=8), "tp"), named(paper(range(64, 128), dp=8, tp=8), None, "tp")),
        (named(paper(range(64))), named(paper(range(64, 128)))),
        (named(paper(range(1))), named(paper(range(8, 72)))),
        (named(paper(range(8)), "x"), named(paper(range(8, 136), dp=16, tp=8), "tp")),
        (named(paper(range(64)), "x"), named(paper(range(64), dp=8, tp=8), None, "tp")),
        (named(paper(range(1))), named(paper(range(8)))),
    ],
)
def test_the_busiest_link_carries_hardly_more_than_it_must(form, src, dst):
    shapes = {name: struct(*shape, dtype=jnp.float32) for name, shape in form.items()}
    figures = plan_on_h100(shapes, src, dst, smallest_piece=1 << 10).figures
    assert figures.over_bound <= 1.05


@pytest.mark.parametrize(
    ("domain_size", "ranks_per_nic", "src", "dst"),
    [
        # one rank of five has a card to itself
        (8, 4, named(paper(range(8), x=8), "x"), named(paper(range(8, 13)))),
        # holders of one half share a card, each of the other half has another
        (
            4,
            2,
            named(paper([3, 1, 0, 5, 4, 2], x=2, r=3), "x"),
            named(paper([2, 4, 3, 7, 9, 1, 8, 10, 0, 6, 11, 5]), "x"),
        ),
        # ranks in threes, cards for two
        (3, 2, named(paper(range(12), x=3, r=4), "x"), named(paper(range(12, 24), dp=6, tp=2), "tp")),
        # all that is wanted is wanted by the holders' domains as well, whose cards are busy sending
        (1, 4, named(paper([0, 1]), "x"), named(paper([3, 1, 2, 0, 4, 5], a=2, b=3), "a")),
        (1, 1, named(paper(range(6)), None, "x"), named(paper([4, 6, 7, 8, 9, 10, 11, 0, 12, 2]))),
    ],
)
def test_shared_cards_and_shared_devices(domain_size, ranks_per_nic, src, dst):
    shapes = {"w": struct(1152, 4608, dtype=jnp.float32)}
    changes = {"domain_size": domain_size, "ranks_per_nic": ranks_per_nic, "smallest_piece": 1 << 10}
    assert plan_on_h100(shapes, src, dst, **changes).figures.over_bound <= 1.05


def test_a_rank_with_a_card_of_its_own_takes_in_no_more_than_it_can_pass_on():
    """Where links within the domain are as slow as cards, what enters is taken in evenly over ranks, not over cards."""
    shapes, src, dst = {"w": struct(1 << 21)}, named(paper(range(8)), "x"), named(paper(range(8, 13)))
    plan = plan_on_h100(shapes, src, dst, ranks_per_nic=4, nvlink=50e9, smallest_piece=1 << 10)
    assert plan.figures.busiest.nbytes <= 1.02 * (2 << 21) * 4 / 5


@pytest.mark.parametrize("ranks_per_nic", [1, 2, 8])
def test_bytes_cross_the_network_once_for_each_domain_and_leave_a_lone_source_once(ranks_per_nic):
    size = 1 << 22
    src, dst = named(paper([0])), named(paper(range(8, 72)))
    plan = plan_on_h100({"w": struct(size // 2)}, src, dst, ranks_per_nic=ranks_per_nic, smallest_piece=1)
    loads = plan.figures.loads
    assert loads.total(FAR) == 8 * size
    assert loads.sent[:, FAR, 0].sum() == size
    assert plan.figures.phases == 3
    assert loads.total(NEAR) == 56 * size


def test_a_lone_source_sends_once_within_its_domain():
    plan = plan_on_h100(
        {"w": struct(1 << 20)}, named(paper([0])), named(paper(range(8))), smallest_piece=1, domains=[0] * 8
    )
    assert plan.sent[0] <= 1.05 * (2 << 20)
    assert plan.figures.bytes_by_link == {"local": 2 << 20, "nvlink": 7 * (2 << 20), "network": 0}


def test_nothing_is_passed_on_where_the_holders_send_soon_enough():
    src, dst = named(paper(range(64)), "x"), named(paper(range(64, 128), dp=8, tp=8), "tp")
    assert plan_on_h100({"w": struct(4096, 4096)}, src, dst).figures.phases == 1


def test_the_loads_of_different_leaves_even_each_other_out():
    """Half of the ranks hold one leaf alone; of what all hold they need send nothing."""
    everywhere, half = paper(range(16)), paper(range(8))
    src = {"everywhere": named(everywhere), "half": named(half, "x")}
    shapes = {"everywhere": struct(1 << 22), "half": struct(1 << 22)}
    plan = plan_on_h100(shapes, src, named(paper(range(16, 24), dp=1, tp=8), "tp"), smallest_piece=1)
    assert plan.sent[:16].max() <= 1.02 * (2 << 22) * 2 / 16
    assert plan.figures.over_bound <= 1.02


# --- execution -------------------------------------------------------------------------------------------------------


def test_a_plan_without_relays_is_executed():
    src, dst = named(mesh([0, 1, 2, 3], x=2, y=2), "x"), named(mesh([4, 5, 6, 7], a=2, b=2), None, "a")
    host = {str(i): values((16, 8), seed=i) for i in range(3)}
    params = jax.tree.map(lambda value: put(value, src), host)
    plan = jreshard.plan(params, None, dst, topology=dataclasses.replace(SMALL, domain_size=1))
    assert plan.figures.phases == 1
    assert_tree_holds(plan.execute(params), host, dst)


@pytest.mark.parametrize("dtype", [np.float32, "int4"])
@pytest.mark.parametrize("dst_ids", [[1, 2, 3, 4], [0, 1, 2, 3]])
def test_plans_with_relays_are_executed(dtype, dst_ids):
    src, dst = named(mesh([0])), named(mesh(dst_ids, a=2, b=2), "b")
    host = {str(i): values((64, 6), jax.numpy.dtype(dtype), seed=i) for i in range(3)}
    params = jax.tree.map(lambda value: put(value, src), host)
    plan = jreshard.plan(params, None, dst, topology=SMALL)
    assert plan.figures.phases > 1
    old = None
    for _ in range(3):
        old = plan.execute(params, into=old, verify=True)
        assert_tree_holds(old, host, dst)


# --- asking again ----------------------------------------------------------------------------------------------------


def test_the_same_shapes_get_the_same_plan_until_something_changes():
    src, dst = named(paper(range(4)), "x"), named(paper(range(4, 8)))
    shapes, targets = {"w": struct(8, 8), "b": [struct(8)]}, {"w": dst, "b": [dst]}
    one = jreshard.plan(shapes, src, targets, topology=SMALL)
    assert jreshard.plan({"b": [struct(8)], "w": struct(8, 8)}, src, targets, topology=SMALL) is one
    targets["b"] = [named(paper(range(4, 8)), "x")]
    assert jreshard.plan(shapes, src, targets, topology=SMALL) is not one
    assert jreshard.plan(shapes, src, dst) is not one
    assert jreshard.plan({**shapes, "w": struct(8, 16)}, src, dst, topology=SMALL).nbytes > one.nbytes


def test_requests_that_take_turns_keep_their_plans():
    one, other = named(paper(range(4)), "x"), named(paper(range(4)), None, "x")
    to, shapes = named(paper(range(4, 8))), [{"w": struct(8, 8)}, {"w": struct(16, 8)}]
    requests = [(leaf, src, to) for leaf in shapes for src in (one, other)]
    plans = [jreshard.plan(*request, topology=SMALL) for request in requests]
    assert all(jreshard.plan(*request, topology=SMALL) is plan for request, plan in zip(requests, plans, strict=True))


def test_the_plans_used_last_are_kept():
    plans, to = PaperPlans(2), named(paper(range(4, 8)))
    shardings = [named(paper(range(4)), *spec) for spec in ((), ("x",), (None, "x"))]
    made = []

    def ask(i):
        def build():
            made.append(i)
            return jreshard.plan({"w": struct(8, 8)}, shardings[i], to)

        return plans.get({"w": struct(8, 8)}, (shardings[i], to), None, build)

    for i in (0, 1, 0, 2, 0, 1):
        ask(i)
    assert made == [0, 1, 2, 1]


def test_paper_devices_take_any_number():
    assert paper_devices(2, first=7) == [PaperDevice(7), PaperDevice(8)]
