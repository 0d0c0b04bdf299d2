"""Which ranks share a domain, and what is refused."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from oracle import P, cpus, mesh, named

import jreshard
from jreshard import Topology, paper_devices


def test_presets_say_where_their_figures_come_from():
    assert {"h100-8", "h200-8", "gb200-72"} <= set(Topology.presets())
    for name in Topology.presets():
        preset = Topology.preset(name)
        assert preset.name == name
        assert {"nvlink", "nic", "memory"} <= set(preset.origins)
        assert preset.nvlink > preset.nic


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match="no topology named 'h100'; there are h100-8, "):
        Topology.preset("h100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domain_size": 0}, "domain_size is 0; expected a whole number of at least 1"),
        ({"ranks_per_nic": 1.5}, "ranks_per_nic is 1.5"),
        ({"nic": 0}, "nic is 0; expected bytes a second, above 0"),
        ({"nvlink": float("nan")}, "nvlink is nan"),
        ({"nvlink": float("inf")}, "nvlink is inf; expected bytes a second, above 0 and finite"),
        ({"domain_size": True}, "domain_size is True; expected a whole number"),
    ],
)
def test_figures_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(Topology.preset("h100-8"), **change)


@pytest.mark.parametrize("rate", ["50e9", None, True])
def test_rates_that_are_no_numbers_are_refused(rate):
    with pytest.raises(TypeError, match=re.escape(f"topology: nic is {rate!r}; expected bytes a second, as a number")):
        Topology(domain_size=8, nvlink=395e9, nic=rate)


def test_ranks_fill_domains_and_the_destination_begins_in_a_fresh_one():
    place = Topology(domain_size=4, nvlink=4e9, nic=1e9, ranks_per_nic=2).place(range(12), 6)
    assert place.domain.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert place.port.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert place.num_ports == 6


def test_domains_by_rank_by_device_and_by_process():
    topology = Topology(domain_size=8, nvlink=4e9, nic=1e9)
    by_rank = dataclasses.replace(topology, domains=["a", "b", "a", "b"])
    assert by_rank.place(range(4), 2).domain.tolist() == [0, 1, 0, 1]
    by_device = dataclasses.replace(topology, domains=lambda device: device.id // 2)
    assert by_device.place(paper_devices(5), 1).domain.tolist() == [0, 0, 1, 1, 2]
    assert topology.by_process().place(cpus(), 4).domain.tolist() == [0] * 8
    assert topology.by_process() == topology.by_process()


def test_ranks_without_a_domain_are_refused():
    topology = dataclasses.replace(Topology.preset("h100-8"), domains=[0, 0, 1])
    shapes = {"w": jax.ShapeDtypeStruct((8,), np.float32)}
    with pytest.raises(ValueError, match="domains names 3 ranks; the plan has 4"):
        jreshard.plan(shapes, named(mesh([0, 1])), named(mesh([2, 3])), topology=topology)


def test_paper_devices_are_the_same_where_their_numbers_are():
    trainer = Mesh(np.array(paper_devices(4)).reshape(2, 2), ("x", "y"))
    again = Mesh(np.array(paper_devices(4)), ("x",))
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), np.float32)}
    plan = jreshard.plan(shapes, NamedSharding(trainer, P("x", "y")), NamedSharding(again, P("x")))
    assert len(plan.devices) == 4
    assert plan.bytes_local > 0
    assert [str(device) for device in plan.devices] == ["paper 0", "paper 1", "paper 2", "paper 3"]


def test_arrays_without_elements_are_planned_on_paper():
    sharding = NamedSharding(Mesh(np.array(paper_devices(2)), ("x",)), P(None, "x"))
    plan = jreshard.plan({"e": jax.ShapeDtypeStruct((0, 4), np.float32)}, sharding, sharding)
    assert (plan.num_leaves, plan.nbytes) == (1, 0)
    assert sharding.is_fully_addressable


def test_nothing_moves_on_paper():
    sharding = NamedSharding(Mesh(np.array(paper_devices(2)), ("x",)), P("x"))
    array = jax.device_put(np.zeros(8, np.float32), cpus()[0])
    with pytest.raises(ValueError, match="exist only on paper"):
        jreshard.transfer({"w": array}, None, sharding)
    shapes = {"w": jax.ShapeDtypeStruct((8,), np.float32)}
    plan = jreshard.plan(shapes, sharding, sharding)
    with pytest.raises(ValueError, match="exist only on paper"):
        plan.execute_leaves([array], None, donate=False, into=None, verify=False, timeout=1.0, transport="auto")


def test_numbers_of_numpy_will_do():
    given = Topology(domain_size=np.int32(8), nvlink=np.float32(4e9), nic=np.int64(10**9))
    assert given == Topology(domain_size=8, nvlink=4e9, nic=1e9)
    assert json.dumps([given.domain_size, given.nvlink, given.nic]) == "[8, 4000000000.0, 1000000000.0]"
