"""The two public functions, and the cache that makes a repeated transfer cheap."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from typing import Any

import jax

from jreshard._checks import check_timeout
from jreshard._compat import deleted_among, is_tracer, is_tracing, tracing_config
from jreshard._make_plan import build_plan
from jreshard._paper_plans import PaperPlans
from jreshard._plan import Plan
from jreshard._planning.spread import even_out, take_turns
from jreshard._planning.topology import Topology
from jreshard._runtime.transform import Transform
from jreshard._signature import alias_pattern, facts_of

_TIMEOUT = 300.0
_PLANS_KEPT = 64
_PAPER_PLANS_KEPT = 8


def transfer(
    params: Any,
    src_sharding: Any,
    dst_sharding: Any,
    *,
    donate: bool = False,
    into: Any = None,
    dtype: Any = None,
    transform: Transform | None = None,
    verify: bool = False,
    timeout: float = _TIMEOUT,
    transport: str = "auto",
) -> Any:
    """Moves a tree of arrays to other shardings, on the same devices or on others.

    Each byte that a destination device needs and does not hold is read once, from one source device that holds it.
    Within a process it returns at once, like all of JAX; the arrays become ready later, or raise what went wrong when
    they are used. With `"nccl"`, and between GPUs of several processes, it returns when it has ended. Work queued on
    the arrays before is seen, work queued after sees the result.

    Args:
        params: any pytree of `jax.Array`s. NumPy arrays and Python numbers in it are placed on the destination.
        src_sharding: where the arrays lie: one `NamedSharding` or a prefix tree of them; `None` for wherever they lie.
        dst_sharding: where they go, likewise (but never `None`), matching the tree that `transform` returns.
        donate: delete the source arrays; their memory is free once they have been read. If the transfer then fails,
            the weights are lost.
        into: an earlier result, or a tree like it. Its arrays are donated: the new ones take over their memory, and the
            old ones are deleted, also if the transfer fails once it has begun.
        dtype: a floating dtype. Floating leaves are cast to it on the source side, before anything moves.
        transform: a traceable function from `params` to the tree that is to arrive, compiled for the source devices.
            Its identity is part of the cache key: pass the same function each time.
        verify: compare position-dependent checksums of both sides; waits for the result.
        timeout: seconds after which a transfer that has not ended fails, naming the devices that it waited for. What a
            first call compiles does not count.
        transport: `"host"` between CPU devices, `"p2p"` (copy engines) between GPUs of one host, `"nccl"` between any
            GPUs; `"auto"` takes the first of these that works.

    Returns:
        The tree, each leaf with exactly the sharding that `dst_sharding` gives it.

    Raises:
        ValueError: leaves, shardings or options do not fit; every bad leaf is named by its path. Nothing has moved.
        TypeError: likewise, where all the faults are ones of type.
        VerificationError: with `verify`, the destination differs from the source.
        TransferError: the transfer failed, where that is known before the call returns.
        MismatchError: the processes that take part are about to do different things; nothing has moved.
        PeerTimeout: another process has not come in time.
        PeerLost: another process has died, or has left.

    Example:
        >>> trainer = jax.make_mesh((2, 2), ("fsdp", "tp"), devices=jax.devices()[:4])  # doctest: +SKIP
        >>> rollout = jax.make_mesh((2,), ("tp",), devices=jax.devices()[4:6])  # doctest: +SKIP
        >>> src = NamedSharding(trainer, P("fsdp", "tp"))  # doctest: +SKIP
        >>> dst = NamedSharding(rollout, P(None, "tp"))  # doctest: +SKIP
        >>> weights = jreshard.transfer(params, src, dst)  # doctest: +SKIP
        >>> weights = jreshard.transfer(params, src, dst, into=weights)  # doctest: +SKIP
    """
    check_timeout(timeout)
    request = {"src_sharding": src_sharding, "dst_sharding": dst_sharding, "dtype": dtype, "transform": transform}
    leaves, treedef, made = _cached(params, float(timeout), **request)
    return made.execute_leaves(
        leaves, treedef, donate=donate, into=into, verify=verify, timeout=timeout, transport=transport
    )


def plan(
    params: Any,
    src_sharding: Any,
    dst_sharding: Any,
    *,
    dtype: Any = None,
    transform: Transform | None = None,
    topology: Topology | str | None = None,
) -> Plan:
    """What a transfer would do: its moves and figures, to look at, and to execute as often as wanted.

    Args:
        params: as for `transfer`; `jax.ShapeDtypeStruct`s will do.
        src_sharding: as for `transfer`. Meshes may be abstract: source and destination devices are then distinct. They
            may also be made of `paper_devices`, in any order, the same ones on both sides.
        dst_sharding: likewise.
        dtype: as for `transfer`.
        transform: as for `transfer`.
        topology: a `Topology`, or the name of a preset: which ranks share a fast domain and what the links carry. The
            loads of the links are then evened out over the whole plan: boxes are split, and replicas pass on to each
            other what one of them was sent. Without one, all devices count as equally near, and each box is sent by one
            replica in turn.

    Raises:
        ValueError: as `transfer`; or the topology does not fit the meshes.
        TypeError: as `transfer`.

    Example:
        >>> trainer = jax.sharding.AbstractMesh((4,), ("fsdp",))
        >>> rollout = jax.sharding.AbstractMesh((2,), ("tp",))
        >>> w = jax.ShapeDtypeStruct((8, 8), np.float32)
        >>> src = jax.NamedSharding(trainer, jax.P("fsdp"))
        >>> dst = jax.NamedSharding(rollout, jax.P(None, "tp"))
        >>> plan({"w": w}, src, dst).bytes_moved
        256
    """

    request = {"src_sharding": src_sharding, "dst_sharding": dst_sharding, "dtype": dtype, "transform": transform}

    def replan(params: Any) -> Plan:
        return _cached(params, _TIMEOUT, **request)[2]

    if isinstance(topology, str):
        topology = Topology.preset(topology)
    spread = take_turns if topology is None else partial(even_out, topology=topology)
    build = partial(build_plan, params, **request, executes=False, replan=replan, timeout=_TIMEOUT, spread=spread)
    if transform is not None:
        return build()
    return _paper_plans.get(params, (src_sharding, dst_sharding), (dtype, topology), build)


class _PlanCache:
    """The plans used last, bounded."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Plan | None:
        with self._lock:
            if found := self._plans.get(key):
                self._plans.move_to_end(key)
            return found

    def drop(self, key: Hashable) -> None:
        with self._lock:
            self._plans.pop(key, None)

    def put(self, key: Hashable, made: Plan) -> None:
        with self._lock:
            self._plans[key] = made
            while len(self._plans) > self._capacity:
                self._plans.popitem(last=False)


_plans = _PlanCache(_PLANS_KEPT)
_paper_plans = PaperPlans(_PAPER_PLANS_KEPT)


def _cached(params: Any, timeout: float, **request: Any) -> tuple[list[Any], Any, Plan]:
    """The leaves and the structure of `params`, and the plan for trees like it."""
    leaves, treedef = jax.tree.flatten(params)
    if is_tracing() and not any(map(is_tracer, leaves)):  # tracers are refused by path
        raise TypeError("transfer was called inside a function that is traced (jit, grad, vmap, …); call it outside")
    key = _request_key(leaves, treedef, **request)
    try:
        found = _plans.get(key)
    except (TypeError, ValueError):
        # Not a sharding, which building the plan will tell; or containers that carry what cannot be compared, such as
        # arrays, beside their leaves: their plan is made each time.
        key, found = None, None
    if found is None or any(deleted_among(leaves)):

        def replan(other: Any) -> Plan:
            return _cached(other, timeout, **request)[2]

        found = build_plan(params, executes=True, replan=replan, timeout=timeout, **request)
        if key is not None:
            _plans.put(key, found)
    elif not found.holds(timeout):
        _plans.drop(key)
        raise RuntimeError("jreshard: what transform makes lies otherwise than before; call again to plan anew")
    return leaves, treedef, found


def _request_key(
    leaves: list[Any], treedef: Any, *, src_sharding: Any, dst_sharding: Any, dtype: Any, transform: Any
) -> Hashable:
    """Equal for requests that one plan serves."""
    # A transform, and the placing of values of the host, depend on JAX's configuration.
    facts = facts_of(leaves)
    from_host = any([type(of_leaf[0]) is not tuple for of_leaf in facts])
    config = tracing_config() if transform is not None or from_host else None
    shardings = [(tuple(leaves), treedef) for leaves, treedef in map(jax.tree.flatten, (src_sharding, dst_sharding))]
    return treedef, facts, alias_pattern(leaves), *shardings, dtype, transform, config
