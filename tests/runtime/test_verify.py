"""`verify=True` tells moved weights from weights that only look moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import P, mesh, named, numbers, put

import jreshard
from jreshard._runtime import verify

SRC, DST = {"x": 2, "y": 2}, {"x": 4}


def sums(value: np.ndarray, sharding) -> tuple[np.ndarray, np.ndarray]:
    return sums_of(put(value, sharding), sharding)


def sums_of(array: jax.Array, sharding) -> tuple[np.ndarray, np.ndarray]:
    by_rank = verify.checksums([array], [sharding], [array.dtype])
    return np.stack([by_rank[rank][0] for rank in range(len(by_rank))]), verify.boxes_of(array.shape, sharding)


def swapped(value: np.ndarray) -> np.ndarray:
    value[[0, 5]] = value[[5, 0]]
    return value


def zeroed(value: np.ndarray) -> np.ndarray:
    value[3] = 0
    return value


def repeated(value: np.ndarray) -> np.ndarray:
    value[2] = value[1]
    return value


def one_bit(value: np.ndarray) -> np.ndarray:
    value.view(np.uint8)[4, 4] ^= 1
    return value


@pytest.mark.parametrize("damage", [swapped, zeroed, repeated, one_bit, np.flipud])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_damage_is_noticed(damage, dtype):
    value = (numbers((8, 12)) * 100).astype(dtype)
    src = named(mesh([0, 1, 2, 3], **SRC), "x", "y")
    dst = named(mesh([4, 5, 6, 7], **DST), None, "x")
    sent = sums(value, src)
    verify.compare(["w"], [sent], [sums(value, dst)])
    with pytest.raises(jreshard.VerificationError, match="w: checksum"):
        verify.compare(["w"], [sent], [sums(damage(value.copy()), dst)])


def test_replicas_that_differ_are_noticed():
    value = numbers((8, 12))
    on = named(mesh([0, 1]))
    parts = [jax.device_put(v, d) for v, d in zip((value, zeroed(value.copy())), on.mesh.devices.flat, strict=True)]
    array = jax.make_array_from_single_device_arrays(value.shape, on, parts)
    torn = sums_of(array, on)
    with pytest.raises(jreshard.VerificationError, match=r"w: destination replicas differ, at positions \[1\]"):
        verify.compare(["w"], [sums(value, named(mesh([4])))], [torn])


def test_sums_do_not_depend_on_the_layout():
    value = numbers((16, 8))
    totals = set()
    for ids, spec in (([0], P()), ([1, 2], P("x")), ([3, 4, 5, 6], P(None, "x"))):
        of_devices, boxes = sums(value, named(mesh(ids), *spec))
        _, first = np.unique(boxes, return_index=True)
        totals.add(tuple(of_devices[first].astype(np.uint64).sum(axis=0) % 2**32))
    assert len(totals) == 1
