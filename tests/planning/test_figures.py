"""Figures of small plans, worked out by hand."""

import dataclasses
import json
import re
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from oracle import named

import jreshard
from jreshard import HostCosts, PaperDevice, Topology

FREE = HostCosts(call=0, publish=0, receive=0, copy=0, message=0, collective=0)
LINKS = Topology(domain_size=4, nvlink=8e9, nic=1e9, memory=100e9, smallest_piece=1, costs=FREE)


def paper(first: int, count: int, **axes: int) -> Mesh:
    devices = np.array([PaperDevice(i) for i in range(first, first + count)])
    axes = axes or {"x": count}
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def plan_of(nbytes: int, src, dst, leaves: int = 1, **changes) -> jreshard.Plan:
    shapes = {str(i): jax.ShapeDtypeStruct((nbytes // leaves,), jnp.uint8) for i in range(leaves)}
    return jreshard.plan(shapes, src, dst, topology=dataclasses.replace(LINKS, **changes))


def test_one_to_one_across_the_network():
    figures = plan_of(1000, named(paper(0, 1)), named(paper(4, 1))).figures
    assert figures.bytes_by_link == {"local": 0, "nvlink": 0, "network": 1000}
    assert figures.boxes_by_link == {"local": 0, "nvlink": 0, "network": 1}
    assert (figures.busiest.kind, figures.busiest.nbytes) == ("network", 1000)
    assert figures.predicted.total == figures.bound.seconds == figures.one_sender.total == pytest.approx(1e-6)
    assert figures.gather_and_broadcast == pytest.approx(1e-6)
    assert (figures.phases, figures.staging, figures.over_bound) == (1, 0, 1)


def test_sharded_to_replicated():
    """Each of four cards of the domain takes a quarter in; three quarters reach each rank over NVLink."""
    figures = plan_of(4000, named(paper(0, 4), "x"), named(paper(4, 4))).figures
    assert figures.bytes_by_link == {"local": 0, "nvlink": 12_000, "network": 4000}
    assert figures.busiest.seconds == figures.bound.seconds == pytest.approx(1e-6)
    assert figures.bound.network_in == figures.bound.network_out == 1000
    assert figures.phases == 2
    assert figures.predicted.fill == pytest.approx(3000 / 8e9)
    assert figures.one_sender.total == pytest.approx(4e-6)
    # gathering: each rank lacks 3000 bytes of its fellows; broadcasting: 4000 bytes through one card
    assert figures.gather_and_broadcast == pytest.approx(3000 / 8e9 + 4000 / 1e9)


def test_more_leaves_fill_sooner():
    one, many = (plan_of(4000, named(paper(0, 4), "x"), named(paper(4, 4)), n).figures for n in (1, 10))
    assert many.predicted.fill == pytest.approx(one.predicted.fill / 10)


def test_a_card_for_each_host():
    figures = plan_of(4000, named(paper(0, 4), "x"), named(paper(4, 4)), ranks_per_nic=4).figures
    assert figures.busiest.seconds == figures.bound.seconds == pytest.approx(4e-6)
    assert len(figures.loads.port_sent[0]) == 2


def test_within_a_domain():
    figures = plan_of(4000, named(paper(0, 2), "x"), named(paper(2, 2)), domains=[0] * 4).figures
    assert figures.bytes_by_link == {"local": 0, "nvlink": 8000, "network": 0}
    assert figures.bound.reason.startswith("what no other domain has must reach each rank")
    assert figures.busiest.seconds == figures.bound.seconds == pytest.approx(4000 / 8e9)


def test_what_is_there_stays():
    sharding = named(paper(0, 4), "x")
    figures = plan_of(4000, sharding, sharding).figures
    assert figures.bytes_by_link == {"local": 4000, "nvlink": 0, "network": 0}
    assert figures.over_bound == 1
    assert figures.predicted.total == pytest.approx(1000 / 100e9)


def test_strided_boxes_are_staged_on_the_network():
    shapes = {"w": jax.ShapeDtypeStruct((8, 8), jnp.uint8)}
    src, rows, columns = named(paper(0, 2), "x"), named(paper(4, 2), "x"), named(paper(4, 2), None, "x")
    assert jreshard.plan(shapes, src, rows, topology=LINKS).figures.staging == 0
    assert jreshard.plan(shapes, src, columns, topology=LINKS).figures.staging == 64


def test_costs_of_the_host():
    costs = HostCosts(call=1.0, publish=0.1, receive=0.01, copy=0.001, message=0.0001, launch=2.0)
    figures = plan_of(1000, named(paper(0, 1)), named(paper(4, 1)), 10, costs=costs).figures
    assert figures.predicted.host == pytest.approx(10 * (0.1 + 0.0001))
    assert figures.predicted.total == pytest.approx(1.0 + 2 * figures.predicted.host)


def test_figures_need_a_topology():
    plan = jreshard.plan({"w": jax.ShapeDtypeStruct((8,), jnp.uint8)}, named(paper(0, 1)), named(paper(1, 1)))
    with pytest.raises(ValueError, match="make it with topology="):
        _ = plan.figures
    assert plan.topology is plan.domains is None


def test_a_plan_of_nothing():
    figures = jreshard.plan({"n": np.ones(3)}, None, named(paper(0, 2)), topology=LINKS).figures
    assert figures.busiest.nbytes == figures.phases == 0
    assert figures.predicted.total == 0


# --- shown -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan() -> jreshard.Plan:
    shapes = {"w": jax.ShapeDtypeStruct((8, 64), jnp.float32), "n": np.float32(1)}
    rollout = paper(4, 8, dp=4, tp=2)
    dst = {"w": named(rollout, None, "tp"), "n": named(rollout)}
    return jreshard.plan(shapes, named(paper(0, 4), "x"), dst, topology=LINKS)


def test_as_json(plan):
    data = json.loads(plan.to_json())
    assert data["topology"]["name"] == "custom"
    assert data["domains"] == plan.domains.tolist()
    assert data["bytes_by_link"] == plan.figures.bytes_by_link
    assert data["bound"]["seconds"] == plan.figures.bound.seconds
    assert sum(data["links"]["network in"]) == data["bytes_by_link"]["network"]
    assert np.array(data["traffic"]).sum() == plan.nbytes


def test_as_text_and_html(plan):
    text = repr(plan)
    for word in ("topology          custom", "busiest link", "least possible", "predicted", "gather+broadcast"):
        assert word in text
    table = ET.fromstring(f"<div>{plan._repr_html_()}</div>")
    assert "least possible" in [cell.text for cell in table.iter("th")]


def test_explained(plan):
    text = plan.explain("['w']")
    assert text.startswith("['w']: float32[8, 64]\n  from P('x',) on mesh x=4: shards of [2, 64]")
    assert "no rank of the domain holds it: once over the network, from the one rank that holds it" in text
    assert "passed on within the domain by the rank that took it in" in text
    index = [target.path for target in plan.targets].index("['w']")
    assert plan.explain(index) == text
    assert "a value of the host" in plan.explain("['n']")
    with pytest.raises(KeyError, match=r"no leaf .*v.* in this plan"):
        plan.explain("v")


def test_explanations_say_how_many_boxes_they_leave_out():
    plan = plan_of(6400, named(paper(0, 64), "x"), named(paper(64, 8, dp=4, tp=2), "tp"))
    text = plan.explain(0)
    assert len(text.splitlines()) < 40
    assert text.endswith("… and 6 more ranks get theirs")
    (of_rank,) = re.findall(r"  rank 64 .*\n((?:    .*\n)+)", text)
    counts = [int(count) for count in re.findall(r"^    (\d+) boxes, ", of_rank, re.MULTILINE)]
    listed = len(re.findall(r"^      \[", of_rank, re.MULTILINE))
    left_out = [int(count) for count in re.findall(r"… and (\d+) more from \d+ rank", of_rank)]
    assert sum(counts) == sum(move.dst_rank == 64 for move in plan.moves(0))
    assert sum(counts) == listed + sum(left_out)


def test_explained_without_a_topology():
    shapes = {"w": jax.ShapeDtypeStruct((8,), jnp.uint8)}
    plan = jreshard.plan(shapes, named(paper(0, 2)), named(paper(0, 4), "x"))
    assert "the device holds it already" in plan.explain(0)
    assert "which take turns" in plan.explain(0)


@pytest.mark.parametrize("topology", [LINKS, None])
def test_drawn(tmp_path, topology):
    shapes = {"w": jax.ShapeDtypeStruct((8, 64), jnp.float32)}
    plan = jreshard.plan(shapes, named(paper(0, 4), "x"), named(paper(4, 4)), topology=topology)
    figure = plan.plot()
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == (1 if topology is None else 2)
    figure.savefig(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_drawn_with_nothing_to_show():
    sharding = named(paper(0, 2), "x")
    assert jreshard.plan({"w": jax.ShapeDtypeStruct((8,), jnp.uint8)}, sharding, sharding, topology=LINKS).plot()


def test_shown_in_a_notebook_that_has_not_imported_pyplot(plan):
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(plan.plot())
    assert shown["image/png"].startswith(b"\x89PNG")


def test_without_matplotlib(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "jreshard._shown_figure", raising=False)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plan.plot()
