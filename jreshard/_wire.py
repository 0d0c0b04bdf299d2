"""How each dtype travels: as the array that an FFI call sees, and what becomes of it on either side."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

# XLA packs these in memory.
_PACKED_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}

# Arrays of these can be made, but XLA ends the process when a program takes one.
UNUSABLE = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}


@dataclass(frozen=True)
class Wire:
    """The form in which a leaf travels.

    Attributes:
        dtype: the leaf's dtype; may be an extended one (PRNG keys).
        array_dtype: the dtype of the array that travels.
        bits: what one element of the travelling array occupies.
        tail: dims that the travelling array has beyond the leaf's, never sharded (the words of a PRNG key).
    """

    dtype: Any
    array_dtype: np.dtype[Any]
    bits: int
    tail: tuple[int, ...] = ()

    @property
    def converts(self) -> bool:
        """Whether the travelling array is another than the leaf's own memory."""
        return not self.tail and self.array_dtype != self.dtype

    def encode(self, x: Array) -> Array:
        """The travelling array of `x`. Traced."""
        if self.tail:
            return jax.random.key_data(x)
        if not self.converts:
            return x
        if not jnp.issubdtype(self.dtype, jnp.integer):
            x = jax.lax.bitcast_convert_type(x, _unsigned_of(self.dtype))
        return x.astype(self.array_dtype)

    def decode(self, y: Array) -> Array:
        """The inverse of `encode`. Traced."""
        if self.tail:
            keys: Array = jax.random.wrap_key_data(y, impl=_key_impl(self.dtype))
            return keys
        if not self.converts:
            return y
        if jnp.issubdtype(self.dtype, jnp.integer):
            return y.astype(self.dtype)
        return jax.lax.bitcast_convert_type(y.astype(_unsigned_of(self.dtype)), self.dtype)


def wire_of(dtype: Any, *, packed: bool = True) -> Wire:
    """How a leaf of `dtype` travels.

    Types of less than a byte lie packed in device memory and travel so, where every box begins and ends on a byte;
    `packed=False` gives the form for other boxes, one byte an element.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return Wire(dtype, np.dtype(words.dtype), words.dtype.itemsize * 8, words.shape)
    dtype = np.dtype(dtype)
    bits = bits_of(dtype)
    if bits < 8 and not packed:
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return Wire(dtype, np.dtype(np.int8 if signed else np.uint8), 8)
    return Wire(dtype, dtype, bits)


def bits_of(dtype: np.dtype[Any]) -> int:
    """What one element occupies in device memory, in bits."""
    return _PACKED_BITS.get(dtype.name, dtype.itemsize * 8)


def _unsigned_of(dtype: Any) -> Any:
    return jnp.dtype(f"uint{bits_of(np.dtype(dtype))}")


def _key_impl(dtype: Any) -> Any:
    """The PRNG implementation of a key dtype; JAX gives it for (abstract) arrays only."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]
