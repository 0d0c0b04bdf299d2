"""The ways to move a tree that are compared."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import NamedSharding

import jreshard
from jreshard.bench.cases import Case
from jreshard.bench.pattern import Shardings, Tree, part_of
from jreshard.bench.shapes import DTYPE, Shapes
from jreshard.bench.sides import Side

DEVICE_PUT, JIT = "device_put", "jit"
#: What the time of all others is counted as.
TRANSPORTS = "transports"
#: What transports that write into the memory of an old result are called after the transport's name.
INTO = " into"
#: Added to these where replicas do not pass on what they get, nor share what they send.
PLAIN = ", plain"

_NIC = 50e9  # bytes a second of a network card, which no move here uses


@dataclass(frozen=True, eq=False)
class Contender:
    """One way.

    Attributes:
        name: what it is called.
        move: moves the tree; takes an old result where `reuses`, or `None`.
        dst: where the leaves arrive.
        reuses: whether it can write into the memory of an old result.
    """

    name: str
    move: Callable[[Any], Any]
    dst: Shardings
    reuses: bool = False

    @property
    def kind(self) -> str:
        """What its time is counted as."""
        return self.name if self.name in (DEVICE_PUT, JIT) else TRANSPORTS


class Ways:
    """All ways to carry out a case.

    Args:
        case: the case.
        shapes: its leaves.
        devices: all devices.
        timeout: seconds until a transfer of jreshard fails.

    Attributes:
        src: where the leaves lie.
        dst: where they go.
    """

    def __init__(self, case: Case, shapes: Shapes, devices: Sequence[Any], timeout: float) -> None:
        self._case, self._shapes, self._devices, self._timeout = case, shapes, devices, timeout
        self.src, self.dst = self._shardings(case.src), self._shardings(case.dst)

    def _shardings(self, side: Side) -> dict[str, NamedSharding]:
        return side.shardings(self._devices, self._shapes)

    def contenders(self, transports: Sequence[str], params: Tree) -> list[Contender]:
        """Them, those of the most interest first.

        Args:
            transports: those of jreshard to try.
            params: what is moved.
        """
        found = [contender for transport in transports for contender in self._by(transport, params)]
        found.append(Contender(DEVICE_PUT, lambda old: jax.device_put(params, self.dst), self.dst))
        if self._case.src.devices == self._case.dst.devices:
            identity = jax.jit(lambda tree: tree, out_shardings=self.dst)
            found.append(Contender(JIT, lambda old: identity(params), self.dst))
        return found

    def refit(self, transport: str, params: Tree) -> Contender:
        """The way of a transport that writes into the memory of an old result."""
        return Contender(transport + INTO, partial(self._main, transport, params), self.dst, reuses=True)

    def _by(self, transport: str, params: Tree) -> Iterator[Contender]:
        yield self.refit(transport, params)
        if base := self._case.base:
            src, dst = self._shardings(base.src), self._shardings(base.dst)
            part = params if base.src == self._case.src else part_of(params, src)
            move = partial(self._transfer, transport, part, src, dst)
            yield Contender(f"{transport}{INTO}, {base.name}", move, dst, reuses=True)
            move = partial(self._transfer, transport, params, self.src, self.dst)
            yield Contender(transport + INTO + PLAIN, move, self.dst, reuses=True)
        yield Contender(transport, partial(self._main, transport, params), self.dst)

    def _main(self, transport: str, params: Tree, old: Tree | None) -> Any:
        if not self._case.base:
            return self._transfer(transport, params, self.src, self.dst, old)
        return self._plan.execute(params, into=old, transport=transport, timeout=self._timeout)

    @cached_property
    def _plan(self) -> jreshard.Plan:
        """One that makes use of replicas."""
        structs = {name: jax.ShapeDtypeStruct(shape, DTYPE) for name, shape in self._shapes.items()}
        return jreshard.plan(structs, self.src, self.dst, topology=one_domain(len(self._devices)))

    def _transfer(self, transport: str, params: Tree, src: Shardings, dst: Shardings, old: Tree | None) -> Any:
        return jreshard.transfer(params, src, dst, into=old, transport=transport, timeout=self._timeout)


def one_domain(devices: int, nvlink: float = 400e9, ranks_per_process: int = 1) -> jreshard.Topology:
    """Devices that all reach one another alike.

    Args:
        devices: how many.
        nvlink: bytes a second of a link, one way; plans depend on it only where there are other links as well.
        ranks_per_process: how many devices a process drives.
    """
    return jreshard.Topology(
        domain_size=devices, nvlink=nvlink, nic=_NIC, ranks_per_process=ranks_per_process, domains=(0,) * devices
    )
