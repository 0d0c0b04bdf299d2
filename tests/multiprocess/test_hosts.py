"""Transfers between CPU devices of several processes."""

import processes
import pytest

SCENARIOS = [
    "every_layout",
    "options",
    "many_leaves_between_collectives",
    "many_leaves",
    "many_parts",
    "plans_in_turn",
    "a_step_right_after",
    "transforms",
    "mismatches",
    "links_that_broke",
    "linking_fails_on_one_side",
    "a_process_is_late",
    "many_refits",
    "connects_again_and_again",
]


def test_two_processes() -> None:
    processes.check(processes.run(*SCENARIOS))


@pytest.mark.parametrize("devices", [(2, 2), (2, 1, 1)], ids=str)
def test_several_devices_each(devices: tuple[int, ...]) -> None:
    processes.check(processes.run("every_layout", "options", devices=devices))


def test_four_processes() -> None:
    processes.check(processes.run("every_layout_of_many", devices=(1, 1, 1, 1)))


def test_a_process_leaves_early() -> None:
    processes.check(processes.run("a_process_leaves_early", devices=(1, 1, 1)))
    processes.check(processes.run("a_process_is_interrupted"))


def test_survivors_go_on() -> None:
    processes.check(processes.run("survivors_go_on", devices=(1, 1, 1)), dies=[1])


def test_a_process_dies() -> None:
    processes.check(processes.run("a_process_dies_while_others_wait"), dies=[1])
    processes.check(processes.run("a_process_dies_between_calls"), dies=[1])
