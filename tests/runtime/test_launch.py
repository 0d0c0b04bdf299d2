"""What another thread launches for a transfer, and what becomes of it when something goes wrong."""

import threading

import pytest

from jreshard._runtime.launch import _launched_beside

SECONDS = 30


class Told:
    """Who is told of failures, with what a program waits for that only a failure ends."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.let_go = threading.Event()

    def __call__(self, error: BaseException) -> None:
        self.errors.append(error)
        self.let_go.set()

    def wait(self) -> None:
        assert self.let_go.wait(SECONDS)
        raise RuntimeError("let go")


def test_all_is_launched_in_order_when_the_context_ends() -> None:
    told, launched = Told(), []
    first = threading.Event()

    def slow() -> None:
        assert first.wait(SECONDS)
        launched.append(0)

    with _launched_beside(told) as beside:
        beside(slow)
        for i in (1, 2):
            beside(lambda i=i: launched.append(i))
        assert not launched
        first.set()
    assert launched == [0, 1, 2]
    assert not told.errors


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("of the body")])
def test_an_error_beside_which_others_wait_is_the_one_that_is_raised(error: BaseException) -> None:
    told, late = Told(), []

    def fails() -> None:
        with _launched_beside(told) as beside:
            beside(told.wait)
            beside(lambda: late.append("launched after the failure"))
            raise error

    with pytest.raises(type(error)) as raised:
        fails()
    assert raised.value is error
    assert told.errors[0] is error
    assert not late


def test_a_failure_is_told_at_once() -> None:
    """Who launches meanwhile may be waiting for what has failed."""
    told = Told()

    def fails() -> None:
        raise ValueError("no such program")

    def waits() -> None:
        with _launched_beside(told) as beside:
            beside(fails)
            assert told.let_go.wait(SECONDS)

    with pytest.raises(ValueError, match="no such program"):
        waits()
    assert str(told.errors[0]) == "no such program"


def test_an_interrupt_while_all_is_launched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, waits = Told(), 0

    def interrupted(pending: object) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("jreshard._runtime.launch.wait", interrupted)
    late: list[str] = []

    def is_interrupted() -> None:
        with _launched_beside(told) as beside:
            beside(told.wait)
            beside(lambda: late.append("launched after the failure"))

    with pytest.raises(KeyboardInterrupt):
        is_interrupted()
    assert isinstance(told.errors[0], KeyboardInterrupt)
    assert waits == 2
    assert not late
