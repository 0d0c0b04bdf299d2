"""`python -m jreshard bench` on small cases, and requests that it refuses."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench import crew
from jreshard.bench.cases import CASES
from jreshard.cli import main

SMALL = ["--scale", "1e-5", "--rounds", "2", "--timeout", "30"]


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the measuring processes, on machines with GPUs too."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--cases", "one,one-rows-to-columns,memory", "--transports", "host", "--json", str(path)]
    assert main(["bench", *SMALL, *arguments]) == 0
    found = read(path)
    [run] = found["runs"]
    assert run["ceilings"]["one process"]["memory copy"]["rounds"] == 2
    alone = found["one process"]
    assert set(alone["cases"]) == set(alone["memory"]) == {"one", "one-rows-to-columns"}
    for case in alone["cases"].values():
        assert case["run"] == 1
        assert case["spent"]["total"] > 0
        assert [*case["contenders"]][:3] == ["host into", "host", "device_put"]
        for contender in case["contenders"].values():
            assert contender["rounds"] == 2
            assert 0 < contender["min_s"] <= contender["median_s"] <= contender["max_s"]
    for case in alone["memory"].values():
        assert case["contenders"]["host into"]["extra_bytes"] is not None
    # Each device has half of what it needs, and gets the rest from the other.
    columns = alone["cases"]["one-rows-to-columns"]
    assert columns["bytes"] == 2 * columns["bytes_crossing"] == 4 * columns["bytes_busiest_link"]
    assert "jit" in columns["contenders"]
    assert {"python", "jax", "jaxlib", "jreshard"} <= set(found["versions"])
    assert "/" not in json.dumps(found["host"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "one array of" in capsys.readouterr().out


def test_two_processes_and_going_on(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--transports", "host", "--json", str(path), "--resume"]
    assert main(["bench", *SMALL, *arguments, "--cases", "one", "--processes", "1,2"]) == 0
    found = read(path)
    assert found["one process"]["cases"]["one"]["contenders"]["host"]["rounds"] == 2
    across = found["2 processes"]["cases"]["one"]
    assert across["bytes_crossing"] == found["one process"]["cases"]["one"]["bytes_crossing"]
    assert across["contenders"]["device_put"]["refused"]  # without flags that nobody has set
    assert across["contenders"]["host"]["rounds"] == across["contenders"]["host into"]["rounds"] == 2
    assert across["contenders"]["host"]["of_one_process"] > 0
    assert main(["bench", *SMALL, *arguments, "--cases", "one,one-rows-to-1"]) == 0
    more = read(path)
    assert [run["number"] for run in more["runs"]] == [1, 2]
    assert more["one process"]["cases"]["one"] == found["one process"]["cases"]["one"]
    assert more["one process"]["cases"]["one-rows-to-1"]["run"] == 2
    assert more["2 processes"] == found["2 processes"]


def test_four_devices(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--cases", "one-3-to-4", "--devices", "4", "--processes", "1,4", "--json", str(path)]
    assert main(["bench", *SMALL, *arguments]) == 0
    found = read(path)
    assert found["host"]["devices"].startswith("4 x ")
    for part in ("one process", "4 processes"):
        assert found[part]["cases"]["one-3-to-4"]["contenders"]["host into"]["rounds"] == 2


def test_results_of_another_host_are_not_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    text = json.dumps({"host": {"cores": 1000}, "versions": {}, "runs": [{"number": 1}]})
    path.write_text(text)
    assert main(["bench", *SMALL, "--cases", "one", "--json", str(path), "--resume"]) == 2
    assert "cores was 1000 and is" in capsys.readouterr().err
    assert path.read_text() == text


def test_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is no time for is left to the next run."""
    path = tmp_path / "out.json"
    begin = time.monotonic()
    assert main(["bench", "--scale", "1e-5", "--rounds", "1000", "--seconds", "12", "--json", str(path)]) == 0
    assert time.monotonic() - begin < 60, "some seconds for the picture; 1000 rounds of all cases take minutes"
    found = read(path)
    measured = found.get("one process", {"cases": {}})["cases"]
    assert len(measured) < len(CASES)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "no time was left for" in line][:1]
    assert not any(f" {case}," in line for case in measured if "cut_off" not in measured[case])


#: Measures the ceilings and one round of a case, and then has the command ended.
STOPS_THE_COMMAND = """
import json, os, signal, sys, time
out = os.fdopen(int(sys.argv[2]), "w")

def tell(kind, **fields):
    out.write(json.dumps({"kind": kind, **fields}) + "\\n")
    out.flush()

host = {"devices": "2 x cpu", "link": ""}
tell("hello", host=host, versions={}, units=["ceilings", "one"], cases=["one"], transports=["host"])
tell("begin", unit="ceilings", contender=None)
tell("result", unit="ceilings", bytes=1000, devices=2, contenders={"memory copy": {"ready_s": [[1e-3]]}})
tell("begin", unit="one", contender=None)
timed = {"host into": {"ready_s": [1.0], "returned_s": [0.5], "first_s": 2.0}}
tell("partial", unit="one", scale=1e-5, contenders=timed)
time.sleep(2)
os.kill(os.getppid(), getattr(signal, sys.argv[3]))
time.sleep(600)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_leaves_what_there_is(tmp_path: Path, name: str) -> None:
    path, worker = tmp_path / "out.json", tmp_path / "worker.py"
    worker.write_text(STOPS_THE_COMMAND.replace("sys.argv[3]", repr(name)))
    command = (
        "import sys; from jreshard.bench import crew; from jreshard.cli import main; "
        f"crew._COMMAND = {(sys.executable, str(worker))!r}; "
        f"sys.exit(main(['bench', '--cases', 'one', '--json', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    assert f"ended by {name}" in done.stderr
    found = read(path)
    assert found["runs"][0]["ceilings"]["one process"]["memory copy"]["rounds"] == 1
    case = found["one process"]["cases"]["one"]
    assert case["cut_off"]
    assert case["contenders"]["host into"]["median_s"] == 1.0


def test_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cases", "list"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "llama-8b-fsdp-to-tp Llama-3.1-8B shapes (16.1 GB), fsdp=2 -> tp=2" in said
    assert "of 8 devices: one one array of 8 GiB, 0 -> 1 llama-70b-4-to-4 Llama-3.1-70B shapes (141.1 GB)" in said


def test_processes_that_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such device')"))
    path = tmp_path / "out.json"
    assert main(["bench", "--cases", "one", "--json", str(path)]) == 1
    assert read(path)["runs"][0]["losses"] == ["the measuring process ended with status 1"]
    assert "no such device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "one,seventeen"], "--cases: no seventeen; there are one, "),
        (["--transports", "pigeon"], "--transports: no pigeon; there are nccl, p2p, host"),
        (["--json", "/no/such/folder/out.json"], "no such directory: /no/such/folder"),
        (["--resume"], "--resume: needs --json"),
        (["--cases", "one-3-to-4"], "2 devices are not enough for one-3-to-4 (4)"),
    ],
)
def test_a_bad_request_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--scale", "2"], ["--timeout", "0"], ["--processes", "0"], ["--devices", "1"]]
)
def test_a_bad_number_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
