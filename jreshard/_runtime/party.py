"""The processes that take part in the transfers of one route, and what they have to agree on."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jreshard._control import Group, connect
from jreshard._deadline import Deadline

_TAG = "transfer #"


class Party:
    """The processes of some devices, as this one sees them.

    Args:
        devices: all devices that take part.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.processes = tuple(sorted({device.process_index for device in devices}))
        self.process = int(jax.process_index())
        self._group: Group | None = None

    @property
    def alone(self) -> bool:
        """Whether all devices are of this process."""
        return self.processes == (self.process,)

    @property
    def takes_part(self) -> bool:
        """Whether this process has any of the devices."""
        return self.process in self.processes

    @property
    def leads(self) -> bool:
        """Whether this process decides where one has to."""
        return bool(self.process == self.processes[0])

    def agree(self, what: str, facts: Any, deadline: Deadline) -> dict[int, Any]:
        """Returns, when all processes say `what`, the facts that each adds, by process.

        Args:
            what: what this process is about to do.
            facts: anything that JSON can express.
            deadline: when this process gives up.

        Raises:
            MismatchError: some process says another thing; every process gets this error.
            PeerTimeout: some process has not come, which the message names.
            PeerLost: some process is gone.
        """
        if self.alone:
            return {self.process: facts}
        return self._joined(deadline).gather(what, facts, deadline.left)

    def all_or_none(self, what: str, action: Callable[[], Any], deadline: Deadline) -> dict[int, Any]:
        """What `action` returns in each process, if it succeeds in all; else all raise, and know why.

        Args:
            what: what the action does, in words.
            action: returns what JSON can express.
            deadline: when this process gives up waiting for the others.

        Raises:
            RuntimeError: the action failed in another process.
        """
        try:
            done = action()
        except Exception as error:
            try:
                self.agree(what, {"failed": str(error)}, deadline)
            finally:
                raise error
        answers = self.agree(what, {"done": done}, deadline)
        failed = [f"process {process}: {answer['failed']}" for process, answer in answers.items() if "failed" in answer]
        if failed:
            raise RuntimeError(f"jreshard: {what} failed; {'; '.join(failed)}")
        return {process: answer["done"] for process, answer in answers.items()}

    @contextmanager
    def news(self, deadline: Deadline) -> Iterator["News"]:
        """What the other processes say of failures while the context is open. To be entered before they agree.

        The others count on this process until the context ends without an error, or the failure is told.
        """
        if self.alone:
            yield News(None)
            return
        group = self._joined(deadline)
        news = News(group)
        stop = group.on_failure(news.hear)
        try:
            with group.in_call():
                yield news
        finally:
            stop()

    def _joined(self, deadline: Deadline) -> Group:
        if self._group is not None and self._group.broken:
            # Told at once and once; whoever tries again waits for the one that is gone to come back.
            broken, self._group = self._group, None
            broken.check_usable("transfer")
        if self._group is None:
            self._group = connect(self.processes, deadline.left)
        return self._group


class News:
    """Failures of one transfer, heard from and told to the other processes.

    A process may tell of one transfer when another is in the next already: the number of the call tells them apart.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._heard: list[str] = []
        self._call = 0
        self._abort: Callable[[int, str], None] | None = None

    def hear(self, reason: str) -> None:
        """Takes a failure in, from whatever thread."""
        with self._lock:
            self._heard.append(reason)
        self._pass_on()

    def forward(self, call: int, abort: Callable[[int, str], None]) -> None:
        """From now on calls `abort(call, reason)` when the call has failed elsewhere, or a process is gone."""
        with self._lock:
            self._call, self._abort = call, abort
        self._pass_on()

    def tell(self, call: int, reason: str) -> None:
        """Tells the other processes that the call has failed here."""
        if self._group is not None and not self._group.broken:
            self._group.fail(f"{_TAG}{call}: {reason}")

    def _pass_on(self) -> None:
        with self._lock:
            if self._abort is None:
                return
            call, abort, heard = self._call, self._abort, self._heard
            self._heard = []
        for reason in heard:
            tag = reason.find(_TAG)  # the first one is of who told; more may stand in what was told
            if tag < 0 or reason.startswith(f"{_TAG}{call}: ", tag):
                # Aborting may take seconds, which the thread that hears has not.
                threading.Thread(target=abort, args=(call, f"jreshard: {reason}"), daemon=True).start()
