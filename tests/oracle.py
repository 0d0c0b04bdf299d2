"""What every device must hold after a move, computed by NumPy alone.

Values are hashes of the global position: no two positions look alike, so no shifted, swapped, repeated or missing
block can pass for the right one, and no byte is zero, so that memory nobody wrote does not pass either.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec

SUB_BYTE_BITS = {
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
}


# --- devices and layouts ---------------------------------------------------------------------------------------------


def cpus() -> list[jax.Device]:
    return jax.devices("cpu")[:8]


def mesh(ids: Iterable[int], axis_type: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """The mesh of these CPU devices, in this order; one axis `x` over all where no axes are named."""
    devices = np.array([cpus()[i] for i in ids])
    axes = axes or {"x": devices.size}
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(axis_type,) * len(axes))


def named(on: Mesh, *spec: Any, memory_kind: str | None = None) -> NamedSharding:
    return NamedSharding(on, P(*spec), memory_kind=memory_kind)


# --- values ----------------------------------------------------------------------------------------------------------


def _mixed(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: flips about half of the bits for any change of the input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed_bytes(size: int, itemsize: int, seed: int) -> np.ndarray:
    """(size, itemsize) bytes from 1 to 255 that depend on the position and the seed."""
    words = -(-itemsize // 8)
    salt = np.uint64((seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64)
    hashes = _mixed(_mixed(np.arange(size * words, dtype=np.uint64) + salt) + salt)
    return hashes.view(np.uint8).reshape(size, words * 8)[:, :itemsize] % np.uint8(255) + np.uint8(1)


def values(shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Position-unique raw bytes seen as `dtype`; floats take every bit pattern, NaN among them."""
    dtype = np.dtype(dtype)
    size = math.prod(shape)
    if dtype == np.bool_:
        return (hashed_bytes(size, 1, seed) & 1).astype(np.bool_).reshape(shape)
    if bits := SUB_BYTE_BITS.get(dtype.name):
        raw = hashed_bytes(size, 1, seed) % np.uint8(2**bits - 1) + np.uint8(1)
        return raw.view(dtype).reshape(shape)
    raw = np.ascontiguousarray(hashed_bytes(size, dtype.itemsize, seed))
    return raw.reshape(-1).view(dtype).reshape(shape)


def numbers(shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Position-unique finite numbers in [-1, 1), for tests that compute with them."""
    raw = np.ascontiguousarray(hashed_bytes(math.prod(shape), 4, seed)).reshape(-1).view(np.uint32)
    return (raw / 2.0**31 - 1).astype(dtype).reshape(shape)


def poison(value: np.ndarray) -> np.ndarray:
    """Differs from `value` in every bit, so that a destination element nobody writes is seen."""
    if value.dtype == np.bool_:
        return ~value
    bits = SUB_BYTE_BITS.get(value.dtype.name, 8)
    flipped = raw_bytes(value) ^ np.uint8(2**bits - 1)
    return flipped.view(value.dtype).reshape(value.shape)


def lendable(value: np.ndarray) -> np.ndarray:
    """A copy that JAX could take over without copying: it begins at a multiple of 64 bytes."""
    memory = np.empty(value.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def put(value: Any, sharding: Any) -> Any:
    """`value` on `sharding`, in memory of its own.

    On CPU the first device_put may lend the NumPy array's memory to all devices, and JAX never donates lent memory.
    """
    return jax.device_put(jax.device_put(value, sharding), sharding, may_alias=False)


def wrapped_keys(data: np.ndarray, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(jax.device_put(data, cpus()[0]), impl=impl)


# --- comparing -------------------------------------------------------------------------------------------------------


def is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def raw_bytes(array: Any) -> np.ndarray:
    """A copy of an array's bytes: a view, which JAX may keep, would pin the buffer and defeat a later donation."""
    if isinstance(array, jax.Array) and is_key(array):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array):
        array = jax.device_put(array, array.sharding, may_alias=False)
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).copy()


def pointers(array: jax.Array) -> list[int]:
    if is_key(array):
        array = jax.random.key_data(array)
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def tree_pointers(tree: Any) -> list[list[int]]:
    return [pointers(leaf) for leaf in jax.tree.leaves(tree)]


def assert_placed(array: Any, sharding: NamedSharding, label: str = "") -> None:
    """`array` lies on exactly this sharding: equal to it, on its devices, and so says its type."""
    assert isinstance(array, jax.Array), f"{label}: {type(array)}"
    if is_key(array):  # JAX writes P() of a key array as P(None, ...), also in device_put and jit
        assert array.sharding.mesh == sharding.mesh, label
        assert array.sharding.is_equivalent_to(sharding, array.ndim), f"{label}: {array.sharding} != {sharding}"
    else:
        assert array.sharding == sharding, f"{label}: {array.sharding} != {sharding}"
        assert tuple(array.sharding.spec) == tuple(sharding.spec), label
    assert array.sharding.memory_kind == sharding.memory_kind, label
    assert {shard.device for shard in array.addressable_shards} == sharding.addressable_devices, label
    assert jax.typeof(array).sharding.mesh == sharding.mesh.abstract_mesh, label


def assert_holds(array: Any, value: np.ndarray, sharding: NamedSharding, label: str = "") -> None:
    """Every device of `sharding` holds its part of `value`, byte for byte. For keys `value` is their key data."""
    assert_placed(array, sharding, label)
    assert array.shape == value.shape[: array.ndim], f"{label}: {array.shape}, expected {value.shape}"
    if not is_key(array):
        assert array.ndim == value.ndim
        assert array.dtype == value.dtype, f"{label}: {array.dtype}, expected {value.dtype}"
    expected_parts = sharding.devices_indices_map(array.shape)
    for shard in array.addressable_shards:
        index = expected_parts[shard.device]
        expected, found = raw_bytes(value[index]), raw_bytes(shard.data)
        assert found.size == expected.size, f"{label}: {found.size} bytes on {shard.device}, expected {expected.size}"
        wrong = np.flatnonzero(found != expected)
        assert wrong.size == 0, (
            f"{label}: {wrong.size} of {expected.size} bytes wrong on {shard.device} {index}, the first at {wrong[0]}"
        )


def assert_tree_holds(tree: Any, host: Any, shardings: Any) -> None:
    """`assert_holds` for every leaf; `shardings` is one sharding or a tree like `host`."""
    if isinstance(shardings, NamedSharding):
        sharding = shardings
        shardings = jax.tree.map(lambda _: sharding, host)
    assert jax.tree.structure(tree) == jax.tree.structure(host)
    expected = zip(jax.tree.leaves(host), jax.tree.leaves(shardings), strict=True)
    for (path, leaf), (value, sharding) in zip(jax.tree.leaves_with_path(tree), expected, strict=True):
        assert_holds(leaf, value, sharding, jax.tree_util.keystr(path))


# --- plans -----------------------------------------------------------------------------------------------------------


def replay(plan: Any, leaf: int, shape: Sequence[int], src: NamedSharding, dst: NamedSharding) -> None:
    """Carries the moves of one leaf out on arrays of positions: every element is written once, with the right one.

    A move of a later phase reads, on the rank that passes it on, only what earlier phases have written there.
    """
    positions = np.arange(math.prod(shape)).reshape(tuple(shape))
    ranks = {device: rank for rank, device in enumerate(plan.devices)}
    held = {ranks[device]: index for device, index in src.devices_indices_map(tuple(shape)).items()}
    wanted = {ranks[device]: index for device, index in dst.devices_indices_map(tuple(shape)).items()}
    written = {rank: np.full(positions.shape, -1) for rank in wanted}
    source = {}
    for rank, index in held.items():
        source[rank] = np.full(positions.shape, -1)
        source[rank][index] = positions[index]
    moves = plan.moves(leaf)
    for phase in sorted({move.phase for move in moves}):
        before = {rank: array.copy() for rank, array in written.items()} if phase else source
        for move in (move for move in moves if move.phase == phase):
            box = tuple(map(slice, move.start, move.stop))
            value = before[move.src_rank][box]
            assert value.size > 0, f"leaf {leaf}: {move} moves nothing"
            assert (value >= 0).all(), f"leaf {leaf}: {move} reads what rank {move.src_rank} does not have"
            assert (written[move.dst_rank][box] < 0).all(), f"leaf {leaf}: {move} writes for the second time"
            written[move.dst_rank][box] = value
    for rank, index in wanted.items():
        expected = np.full(positions.shape, -1)
        expected[index] = positions[index]
        assert np.array_equal(written[rank], expected), f"leaf {leaf}: rank {rank} lacks bytes, or has others"
