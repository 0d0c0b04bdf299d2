"""The compiled programs of one route: prepare, publish, receive, release; and exchange, which publishes and receives.

Each runs over the user's own mesh, so that arrays pass straight in and out. They carry no declared side effects, which
would cost JAX's fast dispatch path (some 15 µs an array); instead each returns something that is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jreshard._compat import launching, own_tracing_context, row_major
from jreshard._layout import layout_of_sharding
from jreshard._planning.route import Leaf, Route
from jreshard._runtime.native import PUBLISH, RECEIVE, RELEASE, library
from jreshard._wire import Wire, bits_of

Program = Callable[..., Any]

_ALIKE = PartitionSpec()  # the same on every device
_TOKEN = jax.ShapeDtypeStruct((), jnp.uint32)  # the call's number, handed on


@dataclass(frozen=True)
class _Item:
    """A leaf as the programs see it."""

    leaf: Leaf
    wire: Wire
    src_dtype: Any  # of the user's array; the cast to `leaf.dtype` comes first

    @property
    def prepared(self) -> bool:
        """Whether another array than the user's own is published."""
        return self.wire.converts or self.src_dtype != self.leaf.dtype

    @property
    def published_dtype(self) -> Any:
        return self.wire.array_dtype if self.prepared else self.leaf.dtype

    def prepare(self, x: Array) -> Array:
        return self.wire.encode(x if self.src_dtype == self.leaf.dtype else x.astype(self.leaf.dtype))

    def on_wire(self, x: Array) -> Array:
        """The published array as the FFI call takes it: a PRNG key's words are its own memory."""
        return self.wire.encode(x) if self.wire.tail else x


class Programs:
    """Compiles the programs of a route, each when it is first wanted.

    Args:
        route: the leaves and their moves; both meshes have devices.
        src_dtypes: the dtype of each leaf's source array.
        key: of the exchange.
        in_order: whether chunks of leaves must be received in their order, on every device alike.

    Attributes:
        prepared: the leaves of which another array than the user's own is published.
        sends: whether this process has devices of the source mesh; else it has no use for the programs over it.
        receives: whether it has devices of the destination mesh.
        at_once: whether both meshes are the same devices in the same order, so that one program publishes and receives.
        releases_apart: whether releases are programs by themselves.
        one_by_one: whether each program has to have run before the next is launched. On CPU a program keeps as many of
            XLA's threads as it has devices, of which there may be no more than devices; and while XLA has programs with
            several devices take turns, it lets one with a single device come after those that wait for it.
    """

    def __init__(self, route: Route, src_dtypes: Sequence[Any], key: int, *, in_order: bool) -> None:
        library()  # registers the handlers that the programs call
        self._items = [
            _Item(leaf, route.moves_of(i).wire, dtype)
            for i, (leaf, dtype) in enumerate(zip(route.leaves, src_dtypes, strict=True))
        ]
        self._key, self._in_order = np.int64(key), in_order
        numbers = count()
        self._chunks = [[(next(numbers), leaves) for leaves in part] for part in route.chunks_by_part]
        self._src, self._dst = _auto(route.src_mesh), _auto(route.dst_mesh)
        self._fixed_calls = None if route.devices[0].platform == "cpu" else (_zero(self._src), _zero(self._dst))
        self.sends, self.receives = _is_local(self._src), _is_local(self._dst)
        self.at_once = self.sends and list(self._src.devices.flat) == list(self._dst.devices.flat)
        # Over NCCL who receives has sent as well, in the same program.
        self.releases_apart = not self.at_once or (len(self._chunks) > 1 and not in_order)
        self._local_devices = [len(mesh.local_devices) for mesh in (self._src, self._dst)]
        self.one_by_one = route.devices[0].platform == "cpu" and 1 in self._local_devices
        self.prepared = [i for i, item in enumerate(self._items) if item.prepared]

    def call_operands(self, call: int) -> tuple[Any, Any]:
        """What the source's and the destination's programs take as their call.

        On CPU the handlers read its number there. On GPUs they run before the operand is on the device, and go by the
        order of launches: a fixed array saves the copy.
        """
        return self._fixed_calls or (np.uint32(call), np.uint32(call))

    def leaves_of(self, part: int) -> slice:
        """The leaves of a part."""
        chunks = self._chunks[part]
        return slice(chunks[0][1].start, chunks[-1][1].stop)

    def steps_of(self, part: int) -> tuple[int, int]:
        """How many publish and how many receive steps a part has on devices of this process."""
        chunks = len(self._chunks[part])
        publishing, receiving = self._local_devices
        return chunks * publishing, chunks * receiving

    def compile_prepare(self) -> Program:
        """`(arrays of self.prepared…) -> [published arrays]`: casts and conversions, fused by XLA."""
        items = [self._items[i] for i in self.prepared]

        def prepare(*arrays: Array) -> list[Array]:
            return [item.prepare(x) for item, x in zip(items, arrays, strict=True)]

        args = [_struct(i.leaf.shape, i.src_dtype, self._src, i.leaf.src.spec) for i in items]
        out = [NamedSharding(self._src, i.leaf.src.spec) for i in items]
        return _compile(prepare, args, out_shardings=out)

    def compile_publish(self, part: int) -> Program:
        """`(call, published arrays of the part…) -> token`."""
        return self._compile_source(partial(self._publish, part), self._items[self.leaves_of(part)])

    def compile_releases(self) -> list[Program]:
        """`(call, published arrays…) -> token`; while it runs, XLA keeps the arrays as they are.

        One for each part where chunks are received in their order, else one for all.
        """
        if not self._in_order:
            return [self._compile_release(len(self._chunks) - 1, self._items)]
        return [self._compile_release(part, self._items[self.leaves_of(part)]) for part in range(len(self._chunks))]

    def _compile_release(self, last_part: int, items: Sequence[_Item]) -> Program:
        return self._compile_source(lambda call, *_: self._release(last_part, self._src, call, []), items)

    def _compile_source(self, fn: Program, items: Sequence[_Item]) -> Program:
        return _compile(fn, [_call_struct(self._src), *self._published(items)], keep_unused=True)

    def compile_receive(self, part: int, *, into: bool) -> Program:
        """`(call[, old arrays of the part…]) -> ([new arrays], token)`; old arrays are donated and give their memory.

        Users may delete the new arrays, but not the token.
        """
        items = self._items[self.leaves_of(part)]

        def receive(call: Array, *old: Array) -> tuple[list[Array], Array]:
            return self._receive(part, call, old)[:2]

        return self._compile_receiving(receive, [_call_struct(self._dst)], items, into=into)

    def compile_exchange(self, part: int, *, into: bool) -> Program:
        """`(call, published arrays of the part…[, old arrays…]) -> ([new arrays], token)`: publishes and receives.

        Where releases are no programs by themselves, it also releases.
        """
        items = self._items[self.leaves_of(part)]
        published = self._published(items)

        def exchange(call: Array, *arrays: Array) -> tuple[list[Array], Array]:
            call = self._publish(part, call, *arrays[: len(published)])
            new, call, arrived = self._receive(part, call, arrays[len(published) :])
            return new, call if self.releases_apart else self._release(part, self._dst, call, arrived)

        return self._compile_receiving(exchange, [_call_struct(self._src), *published], items, into=into)

    def _compile_receiving(self, fn: Program, args: list[Any], items: Sequence[_Item], *, into: bool) -> Program:
        old = self._old(items) if into else []
        donate = tuple(range(len(args), len(args) + len(old)))
        out = _results(items), NamedSharding(self._dst, _ALIKE)
        return _compile(fn, [*args, *old], out_shardings=out, donate_argnums=donate, keep_unused=True)

    # Each chunk is mapped over the mesh by itself: XLA's time is quadratic in the operands of what is mapped at once.

    def _publish(self, part: int, call: Array, *arrays: Array) -> Array:
        left = iter(arrays)
        for chunk, leaves in self._chunks[part]:
            items = self._items[leaves]
            body = partial(self._publish_chunk, chunk, items)
            specs = [item.leaf.src.spec for item in items]
            call = _shard_map(body, self._src, [_ALIKE, *specs], _ALIKE)(call, *islice(left, len(items)))
        return call

    def _publish_chunk(self, chunk: int, items: Sequence[_Item], call: Array, *arrays: Array) -> Any:
        wires = [item.on_wire(x) for item, x in zip(items, arrays, strict=True)]
        return _ffi(PUBLISH, _TOKEN)(call, *wires, key=self._key, chunk=np.int64(chunk))

    def _receive(
        self, part: int, call: Array, old: Sequence[Array]
    ) -> tuple[list[Array], Array, list[tuple[Array, PartitionSpec]]]:
        """The new arrays; a token; and for each chunk something that is there when it has arrived, and its layout."""
        new: list[Array] = []
        arrived = []
        left = iter(old)
        for chunk, leaves in self._chunks[part]:
            items = self._items[leaves]
            some_old = list(islice(left, len(items)))
            specs = [item.leaf.dst.spec for item in items]
            old_specs = specs[: len(some_old)]  # none where there are no old arrays
            last_spec = _ALIKE if self._in_order else specs[0]
            mapped = _shard_map(
                partial(self._receive_chunk, chunk, items), self._dst, [_ALIKE, *old_specs], (specs, last_spec)
            )
            some, last = mapped(call, *some_old)
            if self._in_order:
                call = last  # what the next chunk waits for
            new += some
            arrived.append((last, last_spec))
        return new, call, arrived

    def _receive_chunk(self, chunk: int, items: Sequence[_Item], call: Array, *old: Array) -> tuple[list[Array], Array]:
        given = zip(items, old, strict=False)
        reused = {j: item.wire.encode(x) for j, (item, x) in enumerate(given) if not item.wire.converts}
        aliases = {1 + position: j for position, j in enumerate(reused)}
        structs = [jax.ShapeDtypeStruct(_wire_shard(item), item.wire.array_dtype) for item in items]
        token = [_TOKEN] if self._in_order else []
        receive = _ffi(RECEIVE, [*structs, *token], input_output_aliases=aliases)
        wires = list(receive(call, *reused.values(), key=self._key, chunk=np.int64(chunk)))
        last = wires.pop() if self._in_order else wires[0]
        return [item.wire.decode(wire) for item, wire in zip(items, wires, strict=True)], last

    def _release(self, last_part: int, mesh: Mesh, call: Array, arrived: Sequence[tuple[Array, PartitionSpec]]) -> Any:
        """Releases what is not released yet, up to the end of a part, when that has arrived."""
        end, _ = self._chunks[last_part][-1]
        body = partial(_ffi(RELEASE, _TOKEN), key=self._key, end=np.int64(end + 1))
        specs = [_ALIKE, *(spec for _, spec in arrived)]
        return _shard_map(body, mesh, specs, _ALIKE)(call, *(x for x, _ in arrived))

    def _published(self, items: Sequence[_Item]) -> list[jax.ShapeDtypeStruct]:
        return [_struct(i.leaf.shape, i.published_dtype, self._src, i.leaf.src.spec) for i in items]

    def _old(self, items: Sequence[_Item]) -> list[jax.ShapeDtypeStruct]:
        return [_struct(i.leaf.shape, i.leaf.dtype, self._dst, i.leaf.dst.spec) for i in items]


def _results(items: Sequence[_Item]) -> list[NamedSharding]:
    return [NamedSharding(item.leaf.dst.mesh, item.leaf.dst.spec) for item in items]


def _auto(mesh: Any) -> Mesh:
    """The same devices and axis names without explicit axis types, which would type the programs' inner arrays."""
    return Mesh(mesh.devices, mesh.axis_names)


def _zero(mesh: Mesh) -> Array:
    with launching():
        return jax.make_array_from_callback((), NamedSharding(mesh, _ALIKE), lambda _: np.uint32(0), dtype=np.uint32)


def _is_local(mesh: Mesh) -> bool:
    mine = jax.process_index()
    return any(device.process_index == mine for device in mesh.devices.flat)


def _wire_shard(item: _Item) -> tuple[int, ...]:
    return layout_of_sharding(item.leaf.shape + item.wire.tail, item.leaf.dst).shard_shape


def _struct(shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _call_struct(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return _struct((), jnp.uint32, mesh, _ALIKE)


_ffi = jax.ffi.ffi_call


def _shard_map(fn: Program, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Any) -> Program:
    mapped: Program = partial(jax.shard_map, mesh=mesh, check_vma=False)(
        fn, in_specs=tuple(in_specs), out_specs=out_specs
    )
    return mapped


def _compile(fn: Program, args: Sequence[Any], *, out_shardings: Any = None, **options: Any) -> Program:
    """Compiles now, so that no call ever waits for a compilation in the midst of a transfer."""
    jitted = jax.jit(fn, out_shardings=out_shardings, **options)
    with own_tracing_context():
        compiled = jitted.lower(*args).compile()
    if not any(_is_sub_byte(arg.dtype) for arg in args):
        return compiled

    def call(*arrays: Any) -> Any:
        # Compiled objects refuse arrays of less than a byte an element: JAX gives the two sides different layouts
        # (`sub_byte_element_size_in_bits`). A jitted function takes them, in the context that it was lowered in.
        # It would also take other device-local layouts, by way of copies that are gone when the readers come.
        if not all(row_major(x) for x in arrays if isinstance(x, Array)):
            raise ValueError("an array has another device-local layout than the default, row-major one")
        with own_tracing_context():
            return jitted(*arrays)

    return call


def _is_sub_byte(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and bits_of(np.dtype(dtype)) < 8
