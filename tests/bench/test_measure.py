"""What a measuring process does with a case, in this process."""

import io
import json
import time
import weakref
from dataclasses import replace
from typing import Any

import jax
import pytest

import jreshard
from jreshard.bench import measure, memory
from jreshard.bench.cases import CASES
from jreshard.bench.contenders import Contender
from jreshard.bench.context import Context
from jreshard.bench.measure import run_case, run_memory
from jreshard.bench.peers import Peers
from jreshard.bench.shapes import many

SCALE = 1e-5


def make_context(devices: int = 2, **options: Any) -> tuple[Context, io.StringIO]:
    said = io.StringIO()
    peers = Peers(1, io.StringIO(), said)
    return Context(jax.devices("cpu")[:devices], {}, peers, 4, ["host"], 30, **options), said


def test_every_contender_is_timed_and_the_time_accounted_for() -> None:
    context, said = make_context()
    result = run_case(context, "one-rows-to-columns", CASES["one-rows-to-columns"], SCALE, [])
    assert list(result["contenders"]) == ["host into", "host", "device_put", "jit"]
    for name, found in result["contenders"].items():
        assert len(found["ready_s"]) == len(found["returned_s"]) == 4, name
    spent = context.spent.take()
    assert {"make inputs", "first calls", "verify", "transports", "device_put", "jit"} <= set(spent)
    parts = sum(seconds for what, seconds in spent.items() if what not in ("total", "of these compiling"))
    assert parts <= spent["total"]
    told = [json.loads(line) for line in said.getvalue().splitlines()]
    partial = [message for message in told if message["kind"] == "partial"]
    assert len(partial) == 4
    assert len(partial[-1]["contenders"]["jit"]["ready_s"]) == 3


def test_replicas_pass_on_what_they_get_beside_the_plain_plan_and_the_base() -> None:
    context, _ = make_context(devices=4)
    for name in ("llama-8b-2-replicas-to-2", "llama-8b-1-to-3-replicas"):
        case = replace(CASES[name], shapes=many(3, (64, 128)))
        assert case.base is not None
        result = run_case(context, name, case, 1, ["device_put"])
        assert list(result["contenders"]) == ["host into", f"host into, {case.base.name}", "host into, plain", "host"]
        assert all(len(found["ready_s"]) == 4 for found in result["contenders"].values())


def test_wrong_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Contender.__init__

    def swapped(self: Contender, name: str, way: Any, dst: Any, reuses: bool = False) -> None:
        move(self, name, (lambda old: jax.tree.map(lambda x: x * 2, way(old))) if name == "host" else way, dst, reuses)

    monkeypatch.setattr(Contender, "__init__", swapped)
    context, _ = make_context()
    result = run_case(context, "one", CASES["one"], SCALE, [])
    assert result["contenders"]["host"] == {"error": "wrong bytes in 1 of 1 leaves, such as w", "refused": False}
    assert "ready_s" in result["contenders"]["host into"]


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "limit", lambda device: 1000)
    context, _ = make_context()
    for result in (run_case(context, "one", CASES["one"], SCALE, []), run_memory(context, CASES["one"], SCALE)):
        assert result["contenders"] == {}
        assert result["skipped"] == "it needs 207 KiB in all; 900 B can be used"


def test_there_need_be_room_for_one_result_only(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer, results, alive = jreshard.transfer, [], 0

    def counted(*args: Any, into: Any, **options: Any) -> Any:
        nonlocal alive
        if into is None:
            alive += sum(x is not None and not x.is_deleted() for x in (result() for result in results))
        moved = transfer(*args, into=into, **options)
        results.extend(map(weakref.ref, jax.tree.leaves(moved)))
        return moved

    monkeypatch.setattr(jreshard, "transfer", counted)
    context, _ = make_context()
    run_case(context, "one", CASES["one"], SCALE, ["device_put"])
    assert len(results) > 4
    assert alive == 0


def test_without_time_nothing_more_is_tried() -> None:
    context, _ = make_context(until=time.time())
    result = run_case(context, "one", CASES["one"], SCALE, [])
    assert result["contenders"] == {
        name: {"skipped": "no time was left"} for name in ("host into", "host", "device_put")
    }


@pytest.mark.parametrize(
    ("seconds", "tried", "rounds"),
    [
        (1e9, {"host into": 0.1, "device_put": 0.1}, {"host into": 4, "device_put": 4}),
        (1e9, {"host into": 0.6, "device_put": 0.6}, {"host into": 3, "device_put": 1}),
        (1e9, {"host into": 0.1, "device_put": 20.0}, {"host into": 4, "device_put": 1}),
        (0.65, {"host into": 0.1, "device_put": 0.1}, {"host into": 2, "device_put": 2}),
        (-5, {"host into": 0.1, "device_put": 0.1}, {"host into": 1, "device_put": 1}),
        (1.0, {"host into": 0.1, "device_put": 0.6}, {"host into": 2, "device_put": 1}),
    ],
)
def test_rounds(seconds: float, tried: dict[str, float], rounds: dict[str, int]) -> None:
    context, _ = make_context()
    ways = {name: Contender(name, lambda old: None, {}, reuses=name.endswith("into")) for name in tried}
    found = measure._rounds(context, {ways[name]: once for name, once in tried.items()}, seconds)
    assert {way.name: count for way, count in found.items()} == rounds


def test_a_device_put_that_takes_very_long_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_ENOUGH_SECONDS", 0)
    context, _ = make_context()
    found = run_case(context, "one", CASES["one"], SCALE, [])["contenders"]["device_put"]
    assert found["ready_s"] == [found["first_s"]]


def test_memory() -> None:
    context, _ = make_context()
    found = run_memory(context, CASES["one"], SCALE)["contenders"]
    assert list(found) == ["host into"]
    assert found["host into"]["extra_bytes"] >= 0
