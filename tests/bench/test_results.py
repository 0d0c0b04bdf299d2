"""From made-up samples to figures, text and picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench.plot import save_plot
from jreshard.bench.results import conclude, faults, spread
from jreshard.bench.session import Outcome
from jreshard.bench.table import as_text

GB = 10**9

CASE = {
    "title": "8 GB, 0 -> 1",
    "scale": 1.0,
    "leaves": 1,
    "bytes": 8 * GB,
    "bytes_crossing": 8 * GB,
    "bytes_busiest_direction": 8 * GB,
    "contenders": {
        "device_put": {"ready_s": [0.2, 0.4, 0.3], "returned_s": [0.1, 0.1, 0.1], "first_s": 1.0},
        "p2p into": {"ready_s": [0.025, 0.02, 0.03], "returned_s": [0.001] * 3, "first_s": 2.0, "extra_bytes": 4096},
        "nccl": {"error": "ValueError: not here", "refused": True},
    },
}


def outcome(**cases: Any) -> Outcome:
    ceilings = {
        "bytes": 8 * GB,
        "contenders": {
            "copy engine": {"ready_s": [0.02, 0.02, 0.02]},
            "copy engine, both ways at once": {"ready_s": [0.021]},
            "send/recv": {"error": "NcclUnavailable: none", "refused": False},
        },
    }
    slowdown = {
        "contenders": {"alone": {"ready_s": [0.1], "moves": [5]}, "p2p into": {"ready_s": [0.102], "moves": [3]}}
    }
    return Outcome({"devices": "2 x X", "link": ""}, {}, {"ceilings": ceilings, **cases, "slowdown": slowdown})


def test_spread() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {
        "median_s": 3, "min_s": 1, "max_s": 5, "q1_s": 2, "q3_s": 4, "rounds": 5,
    }  # fmt: skip
    assert spread([7.0]) == {"median_s": 7, "min_s": 7, "max_s": 7, "q1_s": 7, "q3_s": 7, "rounds": 1}


def test_figures() -> None:
    figures = conclude(outcome(one=CASE))
    assert figures["ceilings"]["copy engine"]["bytes_per_s"] == pytest.approx(400 * GB)
    assert figures["ceilings"]["send/recv"] == {"error": "NcclUnavailable: none"}
    case = figures["cases"]["one"]
    assert case["ideal_s"] == {"copy engine": pytest.approx(0.02)}
    p2p = case["contenders"]["p2p into"]
    assert p2p["median_s"] == 0.025
    assert p2p["bytes_per_s"] == pytest.approx(320 * GB)
    assert p2p["of"]["copy engine"] == pytest.approx(0.8)
    assert p2p["times_device_put"] == pytest.approx(12)
    assert p2p["extra_bytes"] == 4096
    assert "times_device_put" not in case["contenders"]["device_put"]
    assert case["contenders"]["nccl"] == {"error": "ValueError: not here", "refused": True}
    assert figures["slowdown"]["p2p into"]["slowed_by"] == pytest.approx(0.02)
    json.dumps(figures)


def test_a_run_without_ceilings_is_held_against_those_of_another() -> None:
    alone = conclude(outcome(one=CASE))
    slower = CASE | {"contenders": {"p2p into": {"ready_s": [0.05], "returned_s": [0.05]}}}
    across = conclude(Outcome(units={"one": slower}), alone)
    p2p = across["cases"]["one"]["contenders"]["p2p into"]
    assert p2p["of"] == {"copy engine": pytest.approx(0.4)}
    assert p2p["of_one_process"] == pytest.approx(0.5)


def test_faults() -> None:
    refused, failed = CASE["contenders"], {"host": {"error": "RuntimeError: timeout", "refused": False}}
    assert faults(conclude(outcome(one=CASE | {"contenders": refused}))) == []
    assert faults(conclude(outcome(one=CASE | {"contenders": failed}))) == ["8 GB, 0 -> 1: host: RuntimeError: timeout"]
    of_jax = {"device_put": failed["host"]}
    assert faults(conclude(outcome(one=CASE | {"contenders": of_jax}))) == []
    lost = Outcome(losses=["the measuring process died"])
    assert faults(conclude(lost)) == ["the measuring process died"]


def test_text() -> None:
    figures = conclude(outcome(one=CASE, two={"error": "it died", "contenders": {}}))
    text = as_text(figures, "one")
    assert "8 GB, 0 -> 1: 8.0 GB in the busiest direction, 20.00 ms at copy engine" in text
    assert "0.800 of copy engine  12.0 x device_put  extra memory 4 KiB" in text
    assert "ValueError: not here" in text
    assert "400.0 GB/s, 8.0 GB" in as_text(figures, "ceilings")
    assert "+2.0 %" in as_text(figures, "slowdown")
    assert as_text(figures, "two") == "given up: it died"


def test_picture(tmp_path: Path) -> None:
    alone = conclude(outcome(one=CASE, two={"error": "it died", "contenders": {}}))
    path = tmp_path / "chart.png"
    save_plot({"one process": alone, "two processes": conclude(Outcome(units={"one": CASE}))}, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    save_plot({"one process": conclude(Outcome())}, "nothing", path)
