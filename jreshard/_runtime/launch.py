"""Runs one route: launches its programs in an order in which nobody can wait in a circle."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import jax
from jax import Array

from jreshard._compat import deleted_among, is_ready, launching
from jreshard._control import MismatchError
from jreshard._deadline import Deadline
from jreshard._leaves import describe
from jreshard._planning.route import Leaf, Route
from jreshard._runtime.connection import Connection, NcclConnection, PullConnection
from jreshard._runtime.differences import name_differences
from jreshard._runtime.digest import digest
from jreshard._runtime.native import Exchange, TransferError
from jreshard._runtime.party import News, Party
from jreshard._runtime.programs import Program, Programs
from jreshard._runtime.watcher import watcher

# On GPUs launches belong to calls by their order, and all devices must see calls in one order. Several
# processes have to meet for one transfer after the other.
_launch_order = threading.RLock()
_release_thread = ThreadPoolExecutor(1, thread_name_prefix="jreshard-release")
_CORE = "jreshard: "  # how errors of the native core begin
_WHAT = "transfer of"  # what processes are about to do, and how much
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 5e-3


@contextmanager
def _in_order(deadline: Deadline) -> Iterator[None]:
    if not _launch_order.acquire(timeout=deadline.left):
        raise TimeoutError(
            f"jreshard: another thread's transfer did not end within {deadline.timeout} s; those between several "
            "processes or GPUs go one after the other"
        )
    try:
        yield
    finally:
        _launch_order.release()


class Launcher:
    """One route, ready to run as often as wanted.

    Args:
        route: what moves.
        src_dtypes: the dtype of each leaf's source array.
        transport: `"host"`, `"p2p"` or `"nccl"`.

    Attributes:
        party: the processes whose devices take part.
        parts: how many are launched, one after the other: before all but the first something may have moved.
    """

    def __init__(self, route: Route, src_dtypes: Sequence[Any], transport: str) -> None:
        self.party = Party(route.devices)
        self._waits = transport == "nccl"
        self._connection: Connection = (NcclConnection if self._waits else PullConnection)(route, self.party)
        self._programs = Programs(route, src_dtypes, self._connection.key, in_order=self._waits)
        self.parts = len(route.part_ends)
        self._leaves, self._src_dtypes = route.leaves, src_dtypes
        self._what = f"{len(route.leaves)} leaves {_digest(route, src_dtypes)}"
        self._ordered = not self.party.alone or route.devices[0].platform == "gpu"
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if connection := self.__dict__.get("_connection"):
            connection.close()

    @cached_property
    def _prepare(self) -> Program:
        return self._programs.compile_prepare()

    @cached_property
    def _releases(self) -> list[Program]:
        return self._programs.compile_releases()

    # By part, as many as there are.

    @cached_property
    def _publish(self) -> list[Program]:
        return list(map(self._programs.compile_publish, range(self.parts)))

    @cached_property
    def _receive_new(self) -> list[Program]:
        return [self._programs.compile_receive(part, into=False) for part in range(self.parts)]

    @cached_property
    def _receive_into(self) -> list[Program]:
        return [self._programs.compile_receive(part, into=True) for part in range(self.parts)]

    @cached_property
    def _exchange_new(self) -> list[Program]:
        return [self._programs.compile_exchange(part, into=False) for part in range(self.parts)]

    @cached_property
    def _exchange_into(self) -> list[Program]:
        return [self._programs.compile_exchange(part, into=True) for part in range(self.parts)]

    def compile(self, *, into: bool) -> None:
        """Compiles whatever a run needs, so that a later run launches at once."""
        with self._lock:
            if self._programs.sends and self._programs.prepared:
                _ = self._prepare
            if self._programs.sends and self._programs.releases_apart:
                _ = self._releases
            if self._programs.at_once:
                _ = self._exchange_into if into else self._exchange_new
                return
            if self._programs.sends:
                _ = self._publish
            if self._programs.receives:
                _ = self._receive_into if into else self._receive_new

    def prepare(self, arrays: list[Array]) -> list[Array]:
        """The arrays to publish: the user's own, or what casts and conversions make of them."""
        chosen = self._programs.prepared
        if not chosen or not self._programs.sends:
            return arrays
        arrays = list(arrays)
        with launching():
            made = self._prepare(*(arrays[i] for i in chosen))
        for i, x in zip(chosen, made, strict=True):
            arrays[i] = x
        return arrays

    def run(
        self, published: Sequence[Array], into: Sequence[Array] | None, deadline: Deadline, *, verify: bool
    ) -> list[Array]:
        """Moves the published arrays; returns with arrays that become ready, or fail, by the deadline.

        Args:
            published: what `prepare` gave.
            into: the old arrays, if any.
            deadline: when a transfer that has not ended fails.
            verify: what all processes have to agree on doing afterwards.
        """
        if not self.party.takes_part:
            return self._elsewhere()
        with _in_order(deadline) if self._ordered else nullcontext(), self.party.news(deadline) as news:
            exchange, number = self._meet(f"into={into is not None}, verify={verify}", deadline)
            call = _Call(exchange, number, news)
            try:
                exchange.begin(number, deadline.left)
                news.forward(number, exchange.abort)
                with launching():
                    new = self._launch(call, published, into, deadline)
                exchange.wait(number)
            except BaseException as error:
                call.fail(error)
                if isinstance(error, ValueError | jax.errors.JaxRuntimeError) and _CORE in str(error):
                    # A handler's error, as XLA passes it on where a program runs in the thread that launches it.
                    raise TransferError(str(error)[str(error).index(_CORE) :]) from error
                raise
            return new

    def _meet(self, options: str, deadline: Deadline) -> tuple[Exchange, int]:
        """The exchange and the number of the call, when all processes are about to do the same."""
        try:
            return self._connection.meet(f"{_WHAT} {self._what}, {options}", deadline)
        except MismatchError as error:
            if not all(said.startswith(_WHAT) for said in error.said.values()):
                raise
            in_order = sorted(zip(self._leaves, self._src_dtypes, strict=True), key=lambda pair: pair[0].index)
            lines = [_described(leaf, dtype) for leaf, dtype in in_order]
            raise name_differences(error, lines, self.party, deadline) from None

    def _launch(
        self, call: "_Call", published: Sequence[Array], into: Sequence[Array] | None, deadline: Deadline
    ) -> list[Array]:
        programs, exchange = self._programs, call.exchange
        calls = programs.call_operands(call.number)
        steps = 0

        def keep_watch(token: Array, more_steps: int) -> None:
            nonlocal steps
            steps += more_steps
            if exchange.steps_run(call.number) < steps:
                watcher.watch(token, exchange, call.number)
            if programs.one_by_one and programs.releases_apart:  # or there is no other program
                _let_run(token, deadline)

        new: list[Array] = []
        with _launched_beside(call.fail) if self._waits else nullcontext() as beside:
            for part in range(self.parts):
                new += self._launch_part(part, calls, published, into, keep_watch, beside)
        # A release holds up its device, where the same device's receives must go first. It refuses arrays that another
        # thread has deleted or donated meanwhile.
        last = programs.sends and programs.releases_apart and not self._waits
        if last and (not exchange.release_now(call.number) or any(deleted_among(published))):
            self._releases[0](calls[0], *published)
        return new if programs.receives else self._elsewhere()

    def _launch_part(
        self,
        part: int,
        calls: tuple[Any, Any],
        published: Sequence[Array],
        into: Sequence[Array] | None,
        keep_watch: Callable[[Array, int], None],
        beside: Callable[[Program], None] | None,
    ) -> list[Array]:
        """Publishes and receives some leaves; the new arrays, none in a process that has none of their devices.

        Args:
            part: which leaves.
            calls: what the source's and the destination's programs take as their call.
            published: all arrays to publish.
            into: all old arrays, if any.
            keep_watch: to be told of each program's token, and how many steps of the call it has.
            beside: launches the release meanwhile, if it is not to come last.
        """
        programs, leaves = self._programs, self._programs.leaves_of(part)
        publishing, receiving = programs.steps_of(part)
        operands = [calls[0], *published[leaves]]
        old = () if into is None else into[leaves]
        if programs.at_once:
            exchange = (self._exchange_new if into is None else self._exchange_into)[part]
            new, token = exchange(*operands, *old)
            keep_watch(token, publishing + receiving)
            return list(new)
        if programs.sends:
            keep_watch(self._publish[part](*operands), publishing)
            if beside is not None:
                beside(partial(self._releases[part], *operands))
        if not programs.receives:
            return []
        new, token = (self._receive_new if into is None else self._receive_into)[part](calls[1], *old)
        keep_watch(token, receiving)
        return list(new)

    def _elsewhere(self) -> list[Array]:
        """The new arrays as a process sees them that has none of their shards."""
        return [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.dst, [], dtype=leaf.dtype)
            for leaf in self._leaves
        ]


class _Call:
    """A call that is under way: its exchange and number, and the other processes, which have to hear if it fails."""

    def __init__(self, exchange: Exchange, number: int, news: News) -> None:
        self.exchange, self.number = exchange, number
        self._news, self._told = news, False

    def fail(self, error: BaseException) -> None:
        """Ends it everywhere, because of what went wrong here."""
        reason = str(error) or type(error).__name__
        if not self._told:  # first, for an abort may take seconds, and be interrupted itself
            self._told = True
            self._news.tell(self.number, reason)
        self.exchange.abort(self.number, f"jreshard: launching the transfer failed: {reason}")


@contextmanager
def _launched_beside(fail: Callable[[BaseException], None]) -> Iterator[Callable[[Program], None]]:
    """Has another thread launch what is handed over, for a device's queue may be full until the other side gets on.

    All of it is launched when the context ends, or will not be. Who waits for whom, `fail` lets go.
    """
    pending: list[Future[None]] = []

    def launch(program: Program) -> None:
        try:
            with launching():
                program()
        except BaseException as error:
            fail(error)
            raise

    try:
        yield lambda program: pending.append(_release_thread.submit(launch, program))
        wait(pending)  # what they wait for has the call's deadline
    except BaseException as error:
        for future in pending:
            future.cancel()
        fail(error)
        wait(pending)
        raise
    for future in pending:
        future.result()


def _let_run(result: Array, deadline: Deadline) -> None:
    """Waits until a program has run, at most until the deadline: what is launched then gets the call's error."""
    pause = _SHORTEST_PAUSE
    while not is_ready(result) and time.monotonic() < deadline.at:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _described(leaf: Leaf, src_dtype: Any) -> str:
    """A leaf in a line that is the same wherever the same is to move."""
    dtypes = str(leaf.dtype) if leaf.dtype == src_dtype else f"{src_dtype} as {leaf.dtype}"
    return f"params{leaf.path}: {dtypes}{list(leaf.shape)} from {describe(leaf.src)} to {describe(leaf.dst)}"


def _digest(route: Route, src_dtypes: Sequence[Any]) -> str:
    """Text that is equal where the same leaves go the same ways."""
    leaves = [
        (leaf.path, leaf.shape, str(leaf.dtype), str(dtype))
        for leaf, dtype in zip(route.leaves, src_dtypes, strict=True)
    ]
    return digest(repr((route.fingerprint, leaves)))
