"""What all measurements of a process share."""

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np

from jreshard._runtime import nccl
from jreshard.bench import memory
from jreshard.bench.cases import Case
from jreshard.bench.gpu import Gpu
from jreshard.bench.peers import Peers
from jreshard.bench.send_recv import SendRecv, open_nccl
from jreshard.bench.shapes import DTYPE, Shapes, amount
from jreshard.bench.spent import WAIT, Spent

T = TypeVar("T")

_USABLE = 0.9  # of the memory; the rest is for what fragments, and for programs
_ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class Context:
    """What all measurements of a process share.

    Attributes:
        devices: all devices, those of other processes too.
        gpus: those of this process by the driver, by their place in `devices`; none on CPU devices.
        peers: the line to the command.
        rounds: how often everything is timed, where there is time.
        transports: those of jreshard to try.
        timeout: seconds until a transfer, or a message, fails.
        until: when all should be done, in seconds of `time.time`; `None` for no haste.
        spent: where the time goes.
    """

    devices: Sequence[Any]
    gpus: Mapping[int, Gpu]
    peers: Peers
    rounds: int
    transports: Sequence[str]
    timeout: float
    until: float | None = None
    spent: Spent = field(default_factory=Spent)

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @cached_property
    def send_recv(self) -> SendRecv:
        """NCCL by itself between the first two devices; all processes ask for it at the same point."""
        gpus = {rank: gpu for rank, gpu in self.gpus.items() if rank < 2}
        return SendRecv(open_nccl(nccl.find().path), gpus, self.peers, self.timeout)

    def gather(self, value: T) -> list[T]:
        """What every process says here, by process; waits for all of them."""
        with self.spent.on(WAIT):
            return self.peers.gather(value)

    def time_left(self) -> float:
        """Seconds until all should be done, the same for all processes."""
        mine = float("inf") if self.until is None else self.until - time.time()
        return self.gather(mine)[0]

    def too_large(self, case: Case, shapes: Shapes) -> str:
        """Why a case does not fit into memory, or empty text."""
        available = int(_USABLE * min(self.gather(min(map(memory.limit, self.local_devices)))))
        shared = self.devices[0].platform == "cpu"  # one memory for all
        needed = (sum if shared else max)(self._bytes_on_devices(case, shapes))
        if needed <= available:
            return ""
        where = "in all" if shared else "on a device"
        return f"it needs {amount(needed)} {where}; {amount(available)} can be used"

    def _bytes_on_devices(self, case: Case, shapes: Shapes) -> list[int]:
        sizes = dict.fromkeys(self.devices, 0)
        for side in (case.src, case.dst):
            for name, sharding in side.shardings(self.devices, shapes).items():
                for device in sharding.device_set:
                    sizes[device] += int(np.prod(sharding.shard_shape(shapes[name]))) * DTYPE.itemsize
        return list(sizes.values())

    def in_turns(self, unit: str, calls: Mapping[str, tuple[int, Callable[[], T]]]) -> Iterator[tuple[str, T]]:
        """Runs each of the calls so many times, by turns, and says which is next; yields its name and result."""
        for turn in range(max((rounds for rounds, _ in calls.values()), default=0)):
            for name, (rounds, call) in calls.items():
                if turn < rounds:
                    self.peers.tell("begin", unit=unit, contender=name)
                    yield name, call()


def failure(error: Exception) -> dict[str, Any]:
    """What is recorded of a contender that raised; one that refuses raises before anything has moved."""
    text = textwrap.shorten(f"{type(error).__name__}: {error}", _ERROR_CHARACTERS, placeholder=" …")
    return {"error": text, "refused": isinstance(error, ValueError | TypeError | NotImplementedError)}


def agree(said: Sequence[dict[str, Any]], seconds: str) -> dict[str, Any]:
    """What holds for all processes: a failure of any of them, or else what took longest.

    Args:
        said: what each of them found.
        seconds: the key of the time.
    """
    failures = [found for found in said if "error" in found]
    return failures[0] if failures else max(said, key=lambda found: found[seconds])
