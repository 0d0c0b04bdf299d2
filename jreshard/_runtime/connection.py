"""What a launcher needs before a transfer: that all processes are there, and an exchange that reaches them."""

import hashlib
import os
from typing import Any

from jreshard._deadline import Deadline
from jreshard._planning.route import Route
from jreshard._runtime import links, nccl
from jreshard._runtime.communicator import Communicator, communicator_over, join, unique_id
from jreshard._runtime.driver import open_driver
from jreshard._runtime.native import Exchange
from jreshard._runtime.party import Party

_STAGING_VARIABLE = "JRESHARD_STAGING_MIB"
_STAGING_MIB, _MOST_STAGING_MIB = 128, 64 << 10


class PullConnection:
    """For the transports by which destinations read the sources, `host` and `p2p`.

    Args:
        route: what moves.
        party: whose devices they are.
    """

    def __init__(self, route: Route, party: Party) -> None:
        self._route, self._party = route, party
        self.key = route.fingerprint
        self._exchange = self._open()

    def _open(self) -> Exchange:
        return Exchange(self.key, self._route.table, self._route.devices)

    def meet(self, what: str, deadline: Deadline) -> tuple[Exchange, int]:
        """The exchange and the number of the next call, when all processes are about to do `what`."""
        if self._exchange.broken:
            self._exchange.close()
            self._exchange = self._open()
        if self._party.alone:
            return self._exchange, Exchange.next_call()
        answers = self._party.agree(what, {"call": Exchange.next_call(), **links.facts()}, deadline)
        links.mend(self._party, answers, deadline)
        return self._exchange, Exchange.agree_on_call(answer["call"] for answer in answers.values())

    def close(self) -> None:
        """Forgets the exchange."""
        self._exchange.close()


class NcclConnection:
    """For the transport `nccl`: a communicator over the route's devices, shared with other routes over the same.

    Args:
        route: what moves.
        party: whose devices they are.
    """

    def __init__(self, route: Route, party: Party) -> None:
        self._route, self._party = route, party
        self._nccl = nccl.find()
        self._staging = _staging_bytes()
        digest = hashlib.blake2b(f"{route.fingerprint} nccl {self._staging}".encode(), digest_size=8)
        self.key = int.from_bytes(digest.digest(), "little") >> 1
        self._communicator: Communicator | None = None
        self._exchange: Exchange | None = None

    def meet(self, what: str, deadline: Deadline) -> tuple[Exchange, int]:
        """As `PullConnection.meet`; makes the communicator anew where a process has none that is of use."""
        found = communicator_over(self._route.devices)
        opened = self._exchange is not None and not self._exchange.broken
        ready = opened and found is not None and found is self._communicator
        facts = {
            "call": Exchange.next_call(),
            "NCCL": ".".join(map(str, self._nccl.version)),
            _STAGING_VARIABLE: self._staging >> 20,
            "communicator": found and found.name,
            "ready": ready,
        }
        answers = self._party.agree(f"{what}, over NCCL", facts, deadline)
        for fact in ("NCCL", _STAGING_VARIABLE):
            _check_same(fact, {process: answer[fact] for process, answer in answers.items()})
        if not all(answer["ready"] for answer in answers.values()):
            shared = found is not None and all(answer["communicator"] == found.name for answer in answers.values())
            if not shared:
                self._check_apart(deadline)
            self._prepare(found if shared else None, deadline)
        return self._opened, Exchange.agree_on_call(answer["call"] for answer in answers.values())

    def _prepare(self, found: Communicator | None, deadline: Deadline) -> None:
        """Joins a new communicator where none is given, connects it, and opens the exchange: in all processes, or none.

        Nothing is left to allocate when the transfer starts.
        """
        unique = b""
        if found is None:
            leads = self._party.leads
            ids = self._party.all_or_none("find NCCL", lambda: unique_id().hex() if leads else None, deadline)
            unique = bytes.fromhex(ids[self._party.processes[0]])

        def prepare() -> None:
            joined = found or join(self._route.devices, unique, deadline.left)
            joined.connect(self._route.pairs, deadline.left)
            self.close()
            path = joined.handle, self._staging
            self._exchange = Exchange(self.key, self._route.table, self._route.devices, path)
            self._communicator = joined

        self._party.all_or_none("connect over NCCL", prepare, deadline)

    def _check_apart(self, deadline: Deadline) -> None:
        """Refuses GPUs that several processes have: a communicator takes each once."""
        mine = [device for device in self._route.devices if device.process_index == self._party.process]

        def uuids() -> list[str]:
            driver = open_driver()
            return [driver.uuid(device.local_hardware_id) for device in mine]

        owners: dict[str, int] = {}
        for process, found in self._party.all_or_none("name the GPUs", uuids, deadline).items():
            for uuid in found:
                if (owner := owners.setdefault(uuid, process)) != process:
                    raise RuntimeError(
                        f"jreshard: process {owner} and process {process} share a GPU, which NCCL does not take twice; "
                        "use transport='p2p'"
                    )

    @property
    def _opened(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("jreshard: the exchange over NCCL is not open")
        return self._exchange

    def close(self) -> None:
        """Forgets the exchange; the communicator stays while other routes use it."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


Connection = PullConnection | NcclConnection


def _check_same(what: str, by_process: dict[int, Any]) -> None:
    if len(set(by_process.values())) > 1:
        found = ", ".join(f"process {process} has {value}" for process, value in by_process.items())
        raise RuntimeError(f"jreshard: all processes need the same {what}; {found}")


def _staging_bytes() -> int:
    """Bytes of one staging slot; a device has at most four, as many as its plans need."""
    text = os.environ.get(_STAGING_VARIABLE, str(_STAGING_MIB))
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= _MOST_STAGING_MIB:
        raise ValueError(f"{_STAGING_VARIABLE} is {text!r}; expected MiB of a slot, 1 to {_MOST_STAGING_MIB}")
    return int(text) << 20
