"""The measuring processes, seen from the command: started, listened to, and ended whatever happens to them."""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any

from jreshard.bench.config import Config

_COMMAND = (sys.executable, "-m", "jreshard.bench.worker")
_START_DELAY = 0.003  # from the last process's arrival to the moment that all share
_END_SECONDS = 30
_TAIL_CHARACTERS = 2000
_CHUNK = 1 << 16


class CrewLost(RuntimeError):
    """A measuring process died, or has said nothing for too long.

    Attributes:
        tail: the end of what it printed.
    """

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


class OutOfTime(RuntimeError):
    """The time for measuring is over."""


@dataclass
class _Member:
    process: subprocess.Popen[str]
    pipe: int
    log: IO[bytes]
    pending: bytes = b""
    ended: bool = False


class Crew:
    """Measuring processes at work.

    Args:
        configs: what each of them is to do.
        patience: seconds of silence after which they are given up.
        end: when they are, whatever they say, in seconds of `time.time`; `None` for never.
    """

    def __init__(self, configs: Sequence[Config], patience: float, end: float | None = None) -> None:
        self._patience = patience
        self._end = float("inf") if end is None else time.monotonic() + end - time.time()
        self._members: list[_Member] = []
        self._said: dict[int, Any] = {}
        self._selector = selectors.DefaultSelector()
        try:
            for config in configs:
                self._start(config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, config: Config) -> None:
        ours, theirs = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the crew
        try:
            process = subprocess.Popen(
                [*_COMMAND, json.dumps(asdict(config)), str(theirs)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[theirs], env=_environment(config), text=True,
            )  # fmt: skip
        except BaseException:
            os.close(ours)
            log.close()
            raise
        finally:
            os.close(theirs)
        self._selector.register(ours, selectors.EVENT_READ, len(self._members))
        self._members.append(_Member(process, ours, log))

    def messages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What the processes say, with who says it, until all are done.

        Raises:
            CrewLost: one of them died or fell silent.
            OutOfTime: the time is over.
        """
        deadline = time.monotonic() + self._patience
        while not all(member.ended for member in self._members):
            ready = self._selector.select(max(0, min(deadline, self._end) - time.monotonic()))
            if time.monotonic() >= self._end:
                raise OutOfTime
            if not ready:
                silent = [i for i, member in enumerate(self._members) if not member.ended]
                raise self._lost(silent[0], f"has said nothing for {self._patience:.0f} s and was ended")
            deadline = time.monotonic() + self._patience
            for key, _ in ready:
                for message in self._read(key.data):
                    yield key.data, message

    def _read(self, who: int) -> list[dict[str, Any]]:
        """Whole messages that have arrived; those meant for the other processes are passed on."""
        member = self._members[who]
        data = os.read(member.pipe, _CHUNK)
        if not data:
            raise self._lost(who, f"ended {self._exit_of(member)}")
        *lines, member.pending = (member.pending + data).split(b"\n")
        messages = []
        for line in lines:
            message = json.loads(line)
            if message["kind"] == "gather":
                self._pass_on(who, message["value"])
            elif message["kind"] in ("done", "refuse"):
                member.ended = True
                self._selector.unregister(member.pipe)
                messages.append(message)
            else:
                messages.append(message)
        return messages

    def _pass_on(self, who: int, value: Any) -> None:
        self._said[who] = value
        if len(self._said) < len(self._members):
            return
        values = [self._said[i] for i in range(len(self._members))]
        self._said = {}
        answer = json.dumps({"values": values, "start": time.perf_counter() + _START_DELAY})
        for i, member in enumerate(self._members):
            assert member.process.stdin is not None
            try:
                member.process.stdin.write(answer + "\n")
                member.process.stdin.flush()
            except BrokenPipeError as error:
                raise self._lost(i, f"ended {self._exit_of(member)}") from error

    def _lost(self, who: int, what: str) -> CrewLost:
        log = self._members[who].log
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_CHARACTERS))
        name = "the measuring process" if len(self._members) == 1 else f"measuring process {who}"
        return CrewLost(f"{name} {what}", log.read().decode(errors="replace"))

    @staticmethod
    def _exit_of(member: _Member) -> str:
        try:
            status = member.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "its reports, but not itself"
        return f"by signal {-status}" if status < 0 else f"with status {status}"

    def close(self) -> None:
        """Ends what still runs."""
        for member in self._members:
            if member.ended:
                _wait(member.process)
        for member in self._members:
            member.process.kill()
        for member in self._members:
            _wait(member.process)
            if member.process.stdin:
                with contextlib.suppress(BrokenPipeError):  # an answer that it did not live to read
                    member.process.stdin.close()
            os.close(member.pipe)
            member.log.close()
        self._members = []
        self._selector.close()


def _wait(process: subprocess.Popen[str]) -> None:
    """Gives a process time to end; one that a driver holds on to is left."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return


def _environment(config: Config) -> Mapping[str, str]:
    if not config.isolated:
        return os.environ
    all_gpus = ",".join(map(str, range(config.processes)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible[config.process]}


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
