"""Processes that hang, die, refuse and disagree, played by a script that measures nothing."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jreshard.bench import crew, session
from jreshard.bench.config import Config
from jreshard.bench.crew import Crew, CrewLost, OutOfTime
from jreshard.bench.session import Greeting, Refused, Request, measure

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

play("start again" if config["skipped"] else "start")
if plays.get("start") == "refuse":
    tell("refuse", text="2 devices are needed")
    sys.exit()
units = [unit for unit in config["cases"] if unit not in config["done"]]
tell("hello", host={"cores": 2}, versions={"jax": "1"}, units=units, cases=config["cases"], transports=["p2p"])
for unit in units:
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
        tell("partial", unit=unit, contenders=found)
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


class Log:
    """Keeps what a session says."""

    def __init__(self) -> None:
        self.greetings: list[Greeting] = []
        self.units: dict[str, dict[str, Any]] = {}
        self.losses: list[str] = []
        self.turns: list[tuple[int, int, str]] = []
        self.left: list[str] = []

    def greet(self, greeting: Greeting) -> None:
        self.greetings.append(greeting)

    def progress(self, *turn: Any) -> None:
        self.turns.append(turn)

    def take(self, unit: str, result: dict[str, Any]) -> None:
        self.units[unit] = result

    def lose(self, what: str) -> None:
        self.losses.append(what)


def run(processes: int = 1, timeout: float = 30, **options: Any) -> Log:
    log = Log()
    log.left = measure(Request(["a", "b"], timeout=timeout, processes=processes, **options), log)
    assert log.turns == sorted(log.turns, key=lambda turn: turn[0])
    return log


def test_one_process(play: Any) -> None:
    play()
    log = run()
    assert list(log.units) == ["a", "b"]
    [greeting] = log.greetings
    assert (greeting.host, greeting.versions, greeting.cases) == ({"cores": 2}, {"jax": "1"}, ["a", "b"])
    assert greeting.start_s > 0
    assert log.losses == log.left == []
    assert log.turns[-1] == (1, 2, "b y")
    assert log.units["b"]["contenders"] == {"x": {"ready_s": [1, 3]}, "y": {"ready_s": [1, 3]}}


def test_what_is_done_is_not_measured_again(play: Any) -> None:
    play()
    log = run(done=["a"])
    assert list(log.units) == ["b"]
    assert log.greetings[0].cases == ["a", "b"]


def test_two_processes_meet_and_the_slower_counts(play: Any) -> None:
    play()
    log = run(processes=2)
    assert list(log.units) == ["a", "b"]
    assert log.units["a"]["contenders"]["x"] == {"ready_s": [2, 3]}


@pytest.mark.parametrize("processes", [1, 2])
def test_out_of_time(play: Any, processes: int) -> None:
    play({"b y": "hang"})
    log = run(processes, end=time.time() + 4)
    assert "cut_off" not in log.units["a"]
    assert log.units["b"] == {"contenders": {"x": {"ready_s": [processes, 3]}}, "cut_off": True}
    assert log.losses == []
    assert log.left == ["b"]


def test_what_there_is_outlives_a_listener_that_fails(play: Any) -> None:
    play({"b y": "hang"})

    class Impatient(Log):
        def progress(self, *turn: Any) -> None:
            if turn[-1] == "b y":
                raise KeyboardInterrupt

    log = Impatient()
    with pytest.raises(KeyboardInterrupt):
        measure(Request(["a", "b"]), log)
    assert set(log.units) == {"a", "b"}
    assert log.units["b"]["cut_off"]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_hangs_is_left_out(play: Any, processes: int) -> None:
    play({"a y": "hang"})
    log = run(processes, timeout=1.5)
    assert list(log.units) == ["a", "b"]
    assert "ready_s" in log.units["a"]["contenders"]["x"]
    assert "has said nothing for 3 s" in log.units["a"]["contenders"]["y"]["error"]
    assert "ready_s" in log.units["b"]["contenders"]["y"]
    [loss] = log.losses
    assert loss.endswith("at y of a")


def test_what_dies_is_left_out(play: Any, capsys: pytest.CaptureFixture[str]) -> None:
    play({"b x": "die", "a y": "crash"})
    log = run()
    assert list(log.units) == ["a", "b"]
    # Recorded without folders, printed as it is.
    assert log.units["b"]["contenders"]["x"] == {
        "error": "the measuring process ended with status 3: MemoryError: libbig.so is too big",
        "refused": False,
    }
    assert "/home/someone/lib.py" in capsys.readouterr().err
    assert "ended by signal 6" in log.units["a"]["contenders"]["y"]["error"]
    assert len(log.losses) == 2


def test_a_case_that_cannot_be_prepared_is_left_out(play: Any) -> None:
    play({"a": "die"})
    log = run()
    assert list(log.units) == ["a", "b"]
    assert "ended with status 3" in log.units["a"]["error"]
    assert log.units["a"]["contenders"] == {}
    assert set(log.units["b"]["contenders"]) == {"x", "y"}


def test_one_that_does_not_start_again_is_no_lack_of_time(play: Any) -> None:
    play({"a y": "die", "start again": "die"})
    log = run()
    assert len(log.losses) == 2
    assert log.left == []


def test_a_process_that_does_not_start_ends_the_run(play: Any) -> None:
    play({"start": "die"})
    log = run()
    assert log.units == {}
    assert log.losses == ["the measuring process ended with status 3"]


def test_too_few_devices_are_refused(play: Any) -> None:
    play({"start": "refuse"})
    with pytest.raises(Refused, match="2 devices are needed"):
        run()


def make_config(cases: list[str], process: int = 0, processes: int = 1, isolated: bool = False) -> Config:
    return Config(
        cases, beside=[], done=[], skipped={}, transports=[], rounds=1, scale=None, timeout=5, until=None, memory=False,
        devices=None, process=process, processes=processes, port=0, isolated=isolated,
    )  # fmt: skip


def test_the_end_comes_while_something_is_said(play: Any) -> None:
    play()
    with Crew([make_config(["a", "b"])], patience=60, end=time.time()) as members, pytest.raises(OutOfTime):
        list(members.messages())


def test_nothing_is_left_running(play: Any) -> None:
    play({"a x": "hang"})
    config = make_config(["a"])
    with Crew([config], patience=1) as members:
        [process] = [member.process for member in members._members]
        with pytest.raises(CrewLost):
            list(members.messages())
        assert process.poll() is None
    assert process.poll() is not None


def test_isolated_processes_see_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    of = [make_config([], process=process, processes=2, isolated=True) for process in range(2)]
    assert [crew._environment(config)["CUDA_VISIBLE_DEVICES"] for config in of] == ["4", "6"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [crew._environment(config)["CUDA_VISIBLE_DEVICES"] for config in of] == ["0", "1"]


def test_paths_lose_their_folders() -> None:
    text = "cannot open /opt/some-where/lib/libx.so.2: no such file, 3/4 of a/b done"
    assert session._without_paths(text) == "cannot open libx.so.2: no such file, 3/4 of a/b done"
