"""Processes that hang, die, refuse and disagree, played by a script that measures nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench import crew, session
from jreshard.bench.config import Config
from jreshard.bench.crew import Crew, CrewLost
from jreshard.bench.session import Outcome, Refused, Request, measure

#: Measures the units "a" and "b" with the contenders "x" and "y", as PLAY says: what to do in the turn UNIT CONTENDER.
SCRIPT = """
import json, os, sys, time
config, out = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")
plays = json.loads(%r)

def tell(kind, **fields):
    out.write(json.dumps({"kind": kind, **fields}) + "\\n")
    out.flush()

def gather(value):
    tell("gather", value=value)
    return json.loads(sys.stdin.readline())

def play(what):
    do = plays.get(what)
    if do == "hang":
        time.sleep(600)
    if do == "die":
        print("Traceback: /home/someone/lib.py\\nMemoryError: /usr/lib/libbig.so is too big", file=sys.stderr)
        sys.exit(3)
    if do == "crash":
        os.abort()

play("start")
if plays.get("start") == "refuse":
    tell("refuse", text="2 devices are needed")
    sys.exit()
tell("hello", host={"cores": 2}, versions={"jax": "1"}, turns=4)
for unit in config["units"]:
    tell("begin", unit=unit, contender=None)
    play(unit)
    found = {}
    for name in ("x", "y"):
        if name in config["skipped"].get(unit, []):
            continue
        tell("begin", unit=unit, contender=name)
        play(f"{unit} {name}")
        if config["processes"] > 1:
            said = gather([config["process"], name])
            assert said["values"] == [[0, name], [1, name]], said
            assert abs(said["start"] - time.perf_counter()) < 60, said  # a moment on this clock
        found[name] = {"ready_s": [1.0 + config["process"], 3.0 - config["process"]]}
    tell("result", unit=unit, contenders=found)
tell("done")
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the script in the place of the measuring process."""

    def set_up(plays: dict[str, str] | None = None) -> None:
        script = tmp_path / "worker.py"
        script.write_text(SCRIPT % json.dumps(plays or {}))
        monkeypatch.setattr(crew, "_COMMAND", (sys.executable, str(script)))

    return set_up


def run(processes: int = 1, timeout: float = 30) -> tuple[Outcome, list[str]]:
    watched: list[str] = []
    turns: list[tuple[int, int, str]] = []
    request = Request(["a", "b"], [], 1, None, timeout, processes)
    outcome = measure(request, lambda *args: turns.append(args), lambda _, unit: watched.append(unit))
    assert [done for done, *_ in turns] == sorted(done for done, *_ in turns)
    return outcome, watched


def test_one_process(play: Any) -> None:
    play()
    outcome, watched = run()
    assert watched == ["a", "b"]
    assert outcome.host == {"cores": 2}
    assert outcome.versions == {"jax": "1"}
    assert outcome.losses == []
    assert outcome.units["b"]["contenders"] == {"x": {"ready_s": [1, 3]}, "y": {"ready_s": [1, 3]}}


def test_two_processes_meet_and_the_slower_counts(play: Any) -> None:
    play()
    outcome, watched = run(processes=2)
    assert watched == ["a", "b"]
    assert outcome.units["a"]["contenders"]["x"] == {"ready_s": [2, 3]}


@pytest.mark.parametrize("processes", [1, 2])
def test_what_hangs_is_left_out(play: Any, processes: int) -> None:
    play({"a y": "hang"})
    outcome, watched = run(processes, timeout=1.5)
    assert watched == ["a", "b"]
    assert "ready_s" in outcome.units["a"]["contenders"]["x"]
    assert "has said nothing for 3 s" in outcome.units["a"]["contenders"]["y"]["error"]
    assert "ready_s" in outcome.units["b"]["contenders"]["y"]
    [loss] = outcome.losses
    assert loss.endswith("at y of a")


def test_what_dies_is_left_out(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play({"b x": "die", "a y": "crash"})
    outcome, watched = run()
    assert watched == ["a", "b"]
    # Recorded without folders, printed as it is.
    assert outcome.units["b"]["contenders"]["x"] == {
        "error": "the measuring process ended with status 3: MemoryError: libbig.so is too big",
        "refused": False,
    }
    assert "/home/someone/lib.py" in capsys.readouterr().err
    assert "ended by signal 6" in outcome.units["a"]["contenders"]["y"]["error"]
    assert len(outcome.losses) == 2


def test_a_case_that_cannot_be_prepared_is_left_out(play: Any) -> None:
    play({"a": "die"})
    outcome, watched = run()
    assert watched == ["a", "b"]
    assert "ended with status 3" in outcome.units["a"]["error"]
    assert outcome.units["a"]["contenders"] == {}
    assert set(outcome.units["b"]["contenders"]) == {"x", "y"}


def test_a_process_that_does_not_start_ends_the_run(play: Any) -> None:
    play({"start": "die"})
    outcome, watched = run()
    assert watched == []
    assert outcome.losses == ["the measuring process ended with status 3"]


def test_too_few_devices_are_refused(play: Any) -> None:
    play({"start": "refuse"})
    with pytest.raises(Refused, match="2 devices are needed"):
        run()


def test_nothing_is_left_running(play: Any) -> None:
    play({"a x": "hang"})
    config = Config(["a"], {}, [], 1, None, 5, 0, 1, 0, False)
    with Crew([config], patience=1) as members:
        [process] = [member.process for member in members._members]
        with pytest.raises(CrewLost):
            list(members.messages())
        assert process.poll() is None
    assert process.poll() is not None


def test_isolated_processes_see_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    of = [Config([], {}, [], 1, None, 5, process, 2, 0, isolated=True) for process in range(2)]
    assert [crew._environment(config)["CUDA_VISIBLE_DEVICES"] for config in of] == ["4", "6"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [crew._environment(config)["CUDA_VISIBLE_DEVICES"] for config in of] == ["0", "1"]


def test_paths_lose_their_folders() -> None:
    text = "cannot open /opt/some-where/lib/libx.so.2: no such file, 3/4 of a/b done"
    assert session._without_paths(text) == "cannot open libx.so.2: no such file, 3/4 of a/b done"
