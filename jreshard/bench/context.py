"""What all measurements of a process share."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np

from jreshard import _nccl
from jreshard.bench import memory
from jreshard.bench.cases import DTYPE, Case, Shapes
from jreshard.bench.gpu import Gpu
from jreshard.bench.peers import Peers
from jreshard.bench.send_recv import SendRecv, open_nccl

T = TypeVar("T")

_USABLE = 0.9  # of the memory; the rest is for what fragments, and for programs
_SLOW_SECONDS = 0.5  # what takes longer than this gets fewer rounds
_SLOW_ROUNDS = 3
_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class Context:
    """What all measurements of a process share.

    Attributes:
        devices: the two devices, that of another process too.
        gpus: those of this process by the driver, by their place in `devices`; none on CPU devices.
        peers: the line to the command.
        rounds: how often everything is timed.
        transports: those of jreshard to try.
        timeout: seconds until a transfer, or a message, fails.
    """

    devices: Sequence[Any]
    gpus: Mapping[int, Gpu]
    peers: Peers
    rounds: int
    transports: Sequence[str]
    timeout: float

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @cached_property
    def send_recv(self) -> SendRecv:
        """NCCL by itself between the two devices; all processes ask for it at the same point."""
        return SendRecv(open_nccl(_nccl.find().path), self.gpus, self.peers, self.timeout)

    def fitting(self, case: Case, scale: float, copies: int = 1) -> tuple[float, Shapes]:
        """The largest of `scale`, its half, its quarter, … with which so many copies of a case fit into memory."""
        available = _USABLE * min(self.peers.gather(min(map(memory.limit, self.local_devices))))
        shared = self.devices[0].platform == "cpu"  # one memory for all
        while True:
            shapes = case.scaled(scale)
            sizes = self._bytes_on_devices(case, shapes)
            if copies * (sum if shared else max)(sizes) <= available:
                return scale, shapes
            scale /= 2

    def _bytes_on_devices(self, case: Case, shapes: Shapes) -> list[int]:
        sizes = dict.fromkeys(self.devices, 0)
        for side in (case.src, case.dst):
            for name, sharding in side.shardings(self.devices, shapes).items():
                for device in sharding.device_set:
                    sizes[device] += int(np.prod(sharding.shard_shape(shapes[name]))) * DTYPE.itemsize
        return list(sizes.values())

    def rounds_for(self, seconds: float) -> int:
        """How often to time what took so long at first."""
        return self.rounds if seconds < _SLOW_SECONDS else min(self.rounds, _SLOW_ROUNDS)

    def in_turns(self, unit: str, calls: Mapping[str, tuple[int, Callable[[], T]]]) -> Iterator[tuple[str, T]]:
        """Runs each of the calls so many times, by turns, and says which is next; yields its name and result."""
        for turn in range(self.rounds):
            for name, (rounds, call) in calls.items():
                if turn < rounds:
                    self.peers.tell("begin", unit=unit, contender=name)
                    yield name, call()


def failure(error: Exception) -> dict[str, Any]:
    """What is recorded of a contender that raised; one that refuses raises before anything has moved."""
    text = textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_CHARACTERS, placeholder=" …")
    return {"error": text, "refused": isinstance(error, ValueError | TypeError | NotImplementedError)}


def agree(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What holds for all processes: a failure of any of them, or else what took longest."""
    failures = [found for found in said if "error" in found]
    return failures[0] if failures else max(said, key=lambda found: found["tried_s"])
