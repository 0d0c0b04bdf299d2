"""Runs one route: launches its programs in an order in which nobody can wait in a circle."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from jax import Array

from jreshard._compat import launching
from jreshard._native import Exchange
from jreshard._programs import Program, Programs
from jreshard._route import Route
from jreshard._watcher import watcher

# On GPUs the n-th launch of a step belongs to the n-th call, and all devices must see calls in one order.
_launch_order = threading.RLock()


class Launcher:
    """One route, ready to run as often as wanted.

    Args:
        route: what moves.
        src_dtypes: the dtype of each leaf's source array.
    """

    def __init__(self, route: Route, src_dtypes: Sequence[Any]) -> None:
        self._programs = Programs(route, src_dtypes)
        self._exchange = Exchange(route.fingerprint, route.table, route.devices)
        self._on_streams = route.devices[0].platform == "gpu"
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if exchange := self.__dict__.get("_exchange"):
            exchange.close()

    @cached_property
    def _prepare(self) -> Program:
        return self._programs.compile_prepare()

    @cached_property
    def _publish(self) -> Program:
        return self._programs.compile_publish()

    @cached_property
    def _release(self) -> Program:
        return self._programs.compile_release()

    @cached_property
    def _receive_new(self) -> Program:
        return self._programs.compile_receive(into=False)

    @cached_property
    def _receive_into(self) -> Program:
        return self._programs.compile_receive(into=True)

    def compile(self, *, into: bool) -> None:
        """Compiles whatever a run needs, so that a later run launches at once."""
        with self._lock:
            _ = self._publish, self._release, self._receive_into if into else self._receive_new
            if self._programs.prepared:
                _ = self._prepare

    def prepare(self, arrays: list[Array]) -> list[Array]:
        """The arrays to publish: the user's own, or what casts and conversions make of them."""
        chosen = self._programs.prepared
        if not chosen:
            return arrays
        arrays = list(arrays)
        with launching():
            made = self._prepare(*(arrays[i] for i in chosen))
        for i, x in zip(chosen, made, strict=True):
            arrays[i] = x
        return arrays

    def run(self, published: Sequence[Array], into: Sequence[Array] | None, timeout: float) -> list[Array]:
        """Moves the published arrays; returns with arrays that become ready, or fail, by the timeout."""
        with _launch_order if self._on_streams else nullcontext():
            call = None
            try:
                call = self._exchange.begin(timeout)
                with launching():
                    return self._launch(call, published, into)
            except BaseException as error:
                if call is not None:
                    self._exchange.abort(call, f"jreshard: launching the transfer failed: {error}")
                raise

    def _launch(self, call: int, published: Sequence[Array], into: Sequence[Array] | None) -> list[Array]:
        # Publish and release apart: a release holds up its device, where the same device's receive must go first.
        src_call, dst_call = self._programs.call_operands(call)
        watcher.watch(self._publish(src_call, *published), self._exchange, call)
        new: list[Array] = self._receive_new(dst_call) if into is None else self._receive_into(dst_call, *into)
        if not self._exchange.release_now(call):
            watcher.watch(new[0], self._exchange, call)
            self._release(src_call, *published)
        return new
