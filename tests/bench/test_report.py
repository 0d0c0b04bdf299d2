"""The file of results, in one run and in the next."""

import json
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench import results
from jreshard.bench.config import CEILINGS, SLOWDOWN
from jreshard.bench.report import ONE_PROCESS, OtherHost, Report, label
from jreshard.bench.session import Greeting

TWO = label(2, False)
GREETING = Greeting({"cores": 2, "devices": "2 x cpu"}, {"jax": "1"}, ["one"], ["host"], 1.5)
MEASURED = {"bytes": 1000, "devices": 2, "contenders": {"memory copy": {"ready_s": [[1e-6], [2e-6]]}}}


def case(seconds: float = 0.1, **more: Any) -> dict[str, Any]:
    found = {"host into": {"ready_s": [seconds], "returned_s": [seconds], "tried_s": seconds, "first_s": 1.0}}
    return {"scale": 1e-5, "contenders": found, **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


def begin(path: Path, earlier: Any = None) -> Report:
    report = Report(path, earlier)
    report.greet(ONE_PROCESS, GREETING)
    report.add(ONE_PROCESS, 1, CEILINGS, MEASURED)
    return report


def read(path: Path) -> dict[str, Any]:
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_it_is_written_with_every_result(path: Path) -> None:
    report = begin(path)
    assert read(path)["runs"][0]["ceilings"][ONE_PROCESS]["memory copy"]["bytes_per_s"] > 0
    assert report.add(ONE_PROCESS, 1, "one", case()) == []
    written = read(path)
    assert written["host"] == GREETING.host
    assert written[ONE_PROCESS]["cases"]["one"]["run"] == 1
    assert written["runs"][0]["start_s"] == {ONE_PROCESS: 1.5}
    report.lose("a process died")
    assert read(path)["runs"][0]["losses"] == ["a process died"]


def test_the_next_run_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = begin(path)
    report.add(ONE_PROCESS, 1, "one", case())
    report.add(ONE_PROCESS, 1, "small", case(cut_off=True))
    late = {"host": {"skipped": "no time was left"}}
    report.add(ONE_PROCESS, 1, "medium", {"scale": 1e-5, "contenders": late})
    report.add(ONE_PROCESS, 1, "llama-8b", {"scale": 1e-5, "skipped": "it does not fit", "contenders": {}})
    report.add(ONE_PROCESS, 1, SLOWDOWN, {"contenders": {}})
    assert set(report.finished(ONE_PROCESS)) == {"one", "llama-8b", SLOWDOWN}
    again = begin(path, read(path))
    assert again.finished(ONE_PROCESS) == report.finished(ONE_PROCESS)
    again.add(ONE_PROCESS, 1, "small", case())
    written = read(path)
    assert [run["number"] for run in written["runs"]] == [1, 2]
    assert [written[ONE_PROCESS]["cases"][name]["run"] for name in ("one", "small")] == [1, 2]


def test_shares_are_of_the_ceilings_of_the_same_run(path: Path) -> None:
    begin(path).add(ONE_PROCESS, 1, "one", case())
    report = Report(path, read(path))
    report.greet(ONE_PROCESS, GREETING)
    assert report.ceilings(ONE_PROCESS) == {}, "not those of the run before"
    half = {"memory copy": {"ready_s": [[2e-6], [4e-6]]}}
    report.add(ONE_PROCESS, 1, CEILINGS, MEASURED | {"contenders": half})
    report.add(ONE_PROCESS, 1, "small", case())
    rate = results.rates(report.ceilings(ONE_PROCESS))["memory copy"]
    small = report.part(ONE_PROCESS)["cases"]["small"]
    assert small["ideal_s"]["memory copy"] == pytest.approx(small["bytes_busiest_link"] / rate)


def test_processes_are_compared_with_one_of_the_same_run(path: Path) -> None:
    report = begin(path)
    report.add(ONE_PROCESS, 1, "one", case(0.1))
    report.add(TWO, 2, "one", case(0.2))
    assert report.part(TWO)["cases"]["one"]["contenders"]["host into"]["of_one_process"] == pytest.approx(0.5)
    again = begin(path, read(path))
    again.add(TWO, 2, "one", case(0.2))
    assert "of_one_process" not in again.part(TWO)["cases"]["one"]["contenders"]["host into"]
    assert set(again.parts()) == {ONE_PROCESS, TWO}


def test_another_host_is_refused(path: Path) -> None:
    begin(path)
    report = Report(path, read(path))
    other = Greeting(GREETING.host | {"cores": 64}, GREETING.versions, [], [], 1.0)
    with pytest.raises(OtherHost, match="are of another host, or of other options: cores was 2 and is 64"):
        report.greet(ONE_PROCESS, other)
    newer = Greeting(GREETING.host, {"jax": "2"}, [], [], 1.0)
    with pytest.raises(OtherHost, match="are of another version: jax was 1 and is 2"):
        report.greet(ONE_PROCESS, newer)
    assert len(read(path)["runs"]) == 1


def test_memory(path: Path) -> None:
    report = begin(path)
    report.add_memory(ONE_PROCESS, "one", {"scale": 1e-5, "contenders": {"p2p into": {"extra_bytes": 5}}})
    report.add_memory(ONE_PROCESS, "one", {"scale": 1e-5, "contenders": {"nccl into": {"extra_bytes": 7}}})
    assert set(read(path)[ONE_PROCESS]["memory"]["one"]["contenders"]) == {"p2p into", "nccl into"}
    assert report.has_memory(ONE_PROCESS, "one", "nccl")
    assert not report.has_memory(ONE_PROCESS, "one", "host")
    assert not report.has_memory(ONE_PROCESS, "small", "nccl")
    failed = {"contenders": {"host into": {"error": "RuntimeError: full", "refused": False}}}
    assert report.add_memory(ONE_PROCESS, "small", failed) == ["memory of small: host into: RuntimeError: full"]
