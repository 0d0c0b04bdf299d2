"""From made-up samples to figures, text and picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench import results, table
from jreshard.bench.plot import save_plot

GB = 10**9

CASE = {
    "scale": 1.0,
    "contenders": {
        "p2p into": {"ready_s": [0.025, 0.02, 0.03], "returned_s": [0.001] * 3, "first_s": 2.0, "tried_s": 0.03},
        "p2p into, plain": {"ready_s": [0.05], "returned_s": [0.001], "first_s": 2.0},
        "p2p into, 1 -> 1": {"ready_s": [0.02], "returned_s": [0.001], "first_s": 2.0},
        "device_put": {"ready_s": [0.2, 0.4, 0.3], "returned_s": [0.1, 0.1, 0.1], "first_s": 1.0},
        "nccl": {"error": "ValueError: not here", "refused": True},
        "nccl into": {"skipped": "no time was left"},
    },
    "spent": {"total": 3.0},
}
EXPECTED = {
    "title": "8 GB, 0 -> 3 replicas",
    "base": "1 -> 1",
    "leaves": 1,
    "bytes": 24 * GB,
    "bytes_crossing": 24 * GB,
    "bytes_busiest_link": 8 * GB,
    "ceiling": "copy engine",
    "predicted": {"total": 0.03, "links": 0.02, "fill": 0.005, "host": 0.001},
}
CEILINGS = {
    "bytes": 8 * GB,
    "devices": 4,
    "contenders": {
        "copy engine": {"ready_s": [[0.02] * 11 + [0.01], [0.02] * 11 + [0.01]]},
        "copy engine, disjoint pairs at once": {"ready_s": [[0.025]]},
        "copy engine, both ways at once": {"ready_s": [[0.021]]},
        "send/recv": {"error": "NcclUnavailable: none", "refused": False},
    },
}
RATES = {"copy engine": 400 * GB}


def make(**contenders: Any) -> dict[str, Any]:
    return results.case(CASE | {"contenders": CASE["contenders"] | contenders}, EXPECTED, RATES)


def test_spread() -> None:
    assert results.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median_s": 3, "min_s": 1, "max_s": 5, "q1_s": 2, "q3_s": 4, "rounds": 5,
    }  # fmt: skip
    assert results.spread([7.0]) == {"median_s": 7, "min_s": 7, "max_s": 7, "q1_s": 7, "q3_s": 7, "rounds": 1}


def test_ceilings() -> None:
    found = results.ceilings(CEILINGS)
    assert found["copy engine"]["bytes_per_s"] == pytest.approx(8 * GB * 12 / (0.02 * 11 + 0.01))
    pairs = found["copy engine"]["pairs_bytes_per_s"]
    assert len(pairs) == 12
    assert pairs["0 -> 1"] == pytest.approx(400 * GB)
    assert pairs["3 -> 2"] == pytest.approx(800 * GB)
    assert found["copy engine, disjoint pairs at once"]["sum_bytes_per_s"] == pytest.approx(640 * GB)
    assert found["send/recv"] == {"error": "NcclUnavailable: none"}
    assert set(results.rates(found)) == set(found) - {"send/recv"}
    text = table.ceilings(found)
    assert "12 pairs from 400.0 to 800.0" in text
    assert "320.0 GB/s, 8.0 GB a link, 640.0 in all" in text


def test_figures() -> None:
    case = make()
    assert case["ideal_s"] == {"copy engine": pytest.approx(0.02)}
    p2p = case["contenders"]["p2p into"]
    assert p2p["median_s"] == 0.025
    assert p2p["bytes_per_s"] == pytest.approx(320 * GB)
    assert p2p["of"]["copy engine"] == pytest.approx(0.8)
    assert p2p["times_device_put"] == pytest.approx(12)
    assert p2p["time_of_base"] == pytest.approx(1.25)
    assert p2p["prediction_error"] == pytest.approx(0.2)
    assert case["contenders"]["p2p into, plain"]["time_of_base"] == pytest.approx(2.5)
    assert "prediction_error" not in case["contenders"]["p2p into, plain"]
    assert "of" not in case["contenders"]["p2p into, 1 -> 1"], "it moves other bytes"
    assert "times_device_put" not in case["contenders"]["device_put"]
    assert case["contenders"]["nccl"] == {"error": "ValueError: not here", "refused": True}
    json.dumps(case)


def test_products() -> None:
    found = {"alone": {"ready_s": [0.1], "moves": [5]}, "p2p into": {"ready_s": [0.102], "moves": [3]}}
    figures = results.slowdown({"contenders": found})
    assert figures["p2p into"]["slowed_by"] == pytest.approx(0.02)
    assert "+2.0 %  3 moves" in table.slowdown(figures)


def test_across_processes() -> None:
    slower = make(**{"p2p into": {"ready_s": [0.05], "returned_s": [0.05]}})
    results.compare(slower, make())
    assert slower["contenders"]["p2p into"]["of_one_process"] == pytest.approx(0.5)


def test_faults() -> None:
    failed = {"error": "RuntimeError: timeout", "refused": False}
    assert list(results.faults(make())) == []
    assert list(results.faults(make(host=failed))) == ["8 GB, 0 -> 3 replicas: host: RuntimeError: timeout"]
    assert list(results.faults(make(device_put=failed))) == []


def test_text() -> None:
    text = table.case(make())
    assert "8 GB, 0 -> 3 replicas: 8.0 GB on the busiest link, 20.00 ms at copy engine" in text
    headings, *rows = text.splitlines()[1:]
    columns = "ms +- rounds GB/s ceiling device_put time/base base/time predicted"
    assert " ".join(headings.split()) == f"{columns}; base: 1 -> 1"
    assert " ".join(rows[0].split()) == "p2p into 25.00 2.50 3 320.0 0.800 12.0 x 1.25 0.80 +20 %"
    assert "ValueError: not here" in text
    assert "no time was left" in text
    died = results.case({"error": "it died", "contenders": {}}, EXPECTED, RATES)
    assert table.case(died) == "8 GB, 0 -> 3 replicas: given up: it died"
    large = results.case({"skipped": "it needs 9 GB", "contenders": {}}, EXPECTED, RATES)
    assert table.case(large) == "8 GB, 0 -> 3 replicas: left out: it needs 9 GB"


def test_text_of_memory() -> None:
    found = {"extra_bytes": 4096, "unseen_bytes": 512, "outside_jax_bytes": 1 << 20}
    text = table.memory("one", {"contenders": {"p2p into": found}})
    assert text == "memory, one: p2p into: 4 KiB extra (less than 512 B would not show), 1 MiB outside JAX's pool"


def test_picture(tmp_path: Path) -> None:
    part = {"cases": {"one": make(), "two": results.case({"error": "it died", "contenders": {}}, EXPECTED, RATES)}}
    path = tmp_path / "chart.png"
    save_plot({"one process": part, "2 processes": part}, results.ceilings(CEILINGS), "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    save_plot({"one process": {"cases": {}}}, {}, "nothing", path)
