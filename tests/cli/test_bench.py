"""`python -m jreshard bench` on small cases, and requests that it refuses."""

import json
import sys
from pathlib import Path

import pytest

from jreshard.bench import crew
from jreshard.cli import main

SMALL = ["--scale", "1e-5", "--rounds", "2", "--timeout", "30"]


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the measuring processes, on machines with GPUs too."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--cases", "one,one-rows-to-columns", "--transports", "host", "--json", str(path)]
    assert main(["bench", *SMALL, *arguments]) == 0
    found = json.loads(path.read_text())
    assert set(found["cases"]) == {"one", "one-rows-to-columns"}
    assert found["ceilings"]["memory copy"]["rounds"] == 2
    for case in found["cases"].values():
        assert list(case["contenders"]) == ["device_put", "host", "host into"]
        for contender in case["contenders"].values():
            assert contender["rounds"] == 2
            assert 0 < contender["min_s"] <= contender["median_s"] <= contender["max_s"]
        assert case["contenders"]["host into"]["extra_bytes"] is not None
    # Each device has half of what it needs, and gets the rest from the other.
    columns = found["cases"]["one-rows-to-columns"]
    assert columns["bytes"] == 2 * columns["bytes_crossing"] == 4 * columns["bytes_busiest_direction"]
    assert {"python", "jax", "jaxlib", "jreshard"} <= set(found["versions"])
    assert "/" not in json.dumps(found["host"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "one array of" in capsys.readouterr().out


def test_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--cases", "one", "--transports", "host", "--processes", "2", "--json", str(path)]
    assert main(["bench", *SMALL, *arguments]) == 0
    found = json.loads(path.read_text())
    assert found["cases"]["one"]["contenders"]["host"]["rounds"] == 2
    across = found["two_processes"]["cases"]["one"]
    assert across["bytes_crossing"] == found["cases"]["one"]["bytes_crossing"]
    assert across["contenders"]["device_put"]["refused"]  # without flags that nobody has set
    assert across["contenders"]["host"]["rounds"] == across["contenders"]["host into"]["rounds"] == 2
    assert across["contenders"]["host"]["of_one_process"] > 0


def test_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cases", "list"]) == 0
    assert "llama-8b-fsdp-to-tp         Llama-3.1-8B shapes (16.1 GB), fsdp=2 -> tp=2" in capsys.readouterr().out


def test_processes_that_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such device')"))
    path = tmp_path / "out.json"
    assert main(["bench", "--cases", "one", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["losses"] == ["the measuring process ended with status 1"]
    assert "no such device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "one,seventeen"], "--cases: no seventeen; there are one, "),
        (["--transports", "pigeon"], "--transports: no pigeon; there are nccl, p2p, host"),
        (["--json", "/no/such/folder/out.json"], "no such directory: /no/such/folder"),
    ],
)
def test_a_bad_request_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--scale", "2"], ["--timeout", "0"], ["--processes", "3"]])
def test_a_bad_number_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
