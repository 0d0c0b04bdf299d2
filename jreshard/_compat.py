"""Every use of JAX that is private, or differs between versions, in one place.

Tried on jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import jax
import jax._src.config
import jax._src.core
import jax._src.distributed
import jax._src.lib
import jaxlib._jax
import numpy as np
from jax.sharding import Mesh


@contextmanager
def own_tracing_context() -> Iterator[None]:
    """Traces our programs alike, whatever mesh or 64-bit mode the caller has set.

    Without this, `shard_map` refuses a mesh other than the caller's, 64-bit arrays that were made elsewhere would be
    traced as 32-bit ones, and nothing could be compiled under `jax.disable_jit`.
    """
    no_mesh = Mesh(np.empty((), object), ())
    with jax.set_mesh(no_mesh), jax.enable_x64(True), jax.disable_jit(False):
        yield


@contextmanager
def launching() -> Iterator[None]:
    """Launches our programs alike, whatever checks the caller has set for their own.

    The call's number comes from the host, which is not what a transfer guard is set against; NaNs among the weights are
    moved like all other values.
    """
    config: Any = jax.config  # its flags are not in JAX's types
    with ExitStack() as stack:  # what is not needed costs several times the check
        if _transfers_are_guarded():
            stack.enter_context(jax.transfer_guard("allow"))
        if config.jax_debug_nans or config.jax_debug_infs or config.jax_disable_jit:
            for flag in (jax.debug_nans, jax.debug_infs, jax.disable_jit):
                stack.enter_context(flag(False))
        yield


def _transfers_are_guarded() -> bool:
    """Whether a transfer guard may be on, for this thread or for all."""
    guard = jax._src.lib.guard_lib
    states = guard.thread_local_state(), guard.global_state()
    levels = {
        level for state in states for level in (state.host_to_device, state.device_to_device, state.device_to_host)
    }
    return not levels <= {None, guard.TransferGuardLevel.ALLOW}


def is_tracing() -> bool:
    """Whether a function is being traced in this thread."""
    return not jax._src.core.trace_state_clean()


def is_array(x: Any) -> bool:
    """Whether `x` is an array that exists: on the way of every leaf of every transfer.

    `isinstance(x, jax.Array)` asks an abstract class, at ten times the cost, and takes tracers for arrays.
    """
    return type(x) is jaxlib._jax.ArrayImpl or (isinstance(x, jax.Array) and not is_tracer(x))


def are_plain_arrays(leaves: Iterable[Any]) -> bool:
    """Whether all are arrays that exist, and none a PRNG key, which JAX wraps."""
    return set(map(type, leaves)) == {jaxlib._jax.ArrayImpl}


def deleted_among(leaves: Sequence[Any]) -> list[bool]:
    """For each leaf whether it is an array whose memory is gone; twice on the way of every leaf of every transfer."""
    if are_plain_arrays(leaves):
        return list(map(jaxlib._jax.ArrayImpl.is_deleted, leaves))  # a third of the time of the line below
    return [is_array(x) and x.is_deleted() for x in leaves]


def is_tracer(x: Any) -> bool:
    """Whether `x` stands for a value inside a traced function."""
    return isinstance(x, jax.core.Tracer)


def tracing_config() -> Hashable:
    """Everything in JAX's configuration that may change what a function is traced to."""
    config: Hashable = jax._src.config.trace_context()
    return config


def is_ready(x: Any) -> bool:
    """Whether the array has been computed, or has failed; JAX's types do not know the method."""
    return bool(_plain(x).is_ready())


def addresses_of(x: Any) -> list[tuple[Any, int]]:
    """The device and the address of each shard in this process that is computed.

    Asking another one for its address would wait for it, and with Python's lock held.
    Of the public ways to a shard `addressable_shards` takes up to ten times as long, and `addressable_data` gives one
    replica for all.
    """
    shards = [shard for shard in _plain(x)._arrays if shard.is_ready()]
    return [(next(iter(shard.sharding.device_set)), shard.unsafe_buffer_pointer()) for shard in shards]


def row_major(x: Any) -> bool:
    """Whether the array lies in the default device-local layout; JAX's types do not know `format`."""
    plain = _plain(x)
    layout = plain.format.layout
    return layout is None or tuple(layout.major_to_minor) == tuple(range(plain.ndim))


def all_row_major(arrays: Sequence[Any]) -> bool:
    """Whether `row_major` holds for all, at a tenth of the time: those that lie alike are asked once."""
    if are_plain_arrays(arrays):
        with suppress(jax.errors.JaxRuntimeError):  # as `format` does where a backend has no layouts
            arrays = list({x._pjrt_layout: x for x in arrays}.values())
    return all(map(row_major, arrays))


def _plain(x: Any) -> Any:
    """The words of a PRNG key array, which has not all the methods of others; any other array itself."""
    if type(x) is jaxlib._jax.ArrayImpl:
        return x
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def distributed_client() -> Any | None:
    """The client of the coordination service of `jax.distributed`, if that is initialised in this process."""
    return jax._src.distributed.global_state.client


def distributed_process() -> int:
    """This process's index in the job of `jax.distributed`; unlike `jax.process_index`, needs no devices."""
    return jax._src.distributed.global_state.process_id


def coordinator_address() -> str:
    """Where the coordination service of `jax.distributed` listens, as it was given to this process: host:port."""
    return str(jax._src.distributed.global_state.coordinator_address)


def coordination_set(client: Any, key: str, value: str) -> None:
    """Writes to the store of the coordination service, over what was there."""
    client.key_value_set(key, value, allow_overwrite=True)


def coordination_get(client: Any, key: str, timeout: float) -> str | None:
    """Reads from the store of the coordination service; None if nothing is written there for `timeout` seconds."""
    try:
        return str(client.blocking_key_value_get(key, max(1, round(1000 * timeout))))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise
