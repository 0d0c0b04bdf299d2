import threading
from collections.abc import Iterator
from typing import Any

import pytest
from control.helpers import TIMEOUT, Child, Join, Start

from jreshard._control import Group, Hub, join


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("jreshard-hub") or thread.name.startswith("jreshard-group"):
            thread.join(timeout=TIMEOUT)
            assert not thread.is_alive(), thread.name


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(handshake_timeout=TIMEOUT)
    yield hub
    hub.close()


@pytest.fixture
def hasty_hub() -> Iterator[Hub]:
    """A hub that soon drops who does not say who it is."""
    hub = Hub(handshake_timeout=0.3)
    yield hub
    hub.close()


@pytest.fixture
def member(hub: Hub) -> Iterator[Join]:
    """Joins a group at the hub, as one of its processes."""
    groups: list[Group] = []

    def connect(processes: tuple[int, ...], process: int, silence: float = TIMEOUT) -> Group:
        group = join(hub.address, hub.token, processes, process, timeout=TIMEOUT, silence=silence)
        groups.append(group)
        return group

    yield connect
    for group in groups:
        group.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that runs some code."""
    children: list[Child] = []

    def begin(code: str, *arguments: Any) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield begin
    for child in children:
        child.close()
