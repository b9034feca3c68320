"""A content hash of every leaf, in chunks of rows of the *global* array, computed on the devices that hold it.

It is a sum over all elements of a mix of the element's bits and its place, so it does not depend on how the array is
cut over devices or processes, and a change of any one element always changes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

CHUNKS = 16
"""A leaf has at most so many chunks."""


def fingerprint(leaf: Any) -> list[str]:
    """One hash of 64 bits for each chunk of rows of an array.

    >>> x = np.arange(6, dtype=np.float32).reshape(3, 2)
    >>> y = x.copy()
    >>> y[2, 1] = 7
    >>> [one == two for one, two in zip(fingerprint(x), fingerprint(y), strict=True)]
    [True, True, False]
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shape = np.shape(leaf)
    if 0 in shape:
        return []
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    with jax.set_mesh(mesh):  # pyright: ignore[reportArgumentType]  (the caller's may have other devices: jit refuses ours)
        sums = _hasher(sharding)(leaf)
    return [f"{low:08x}{high:08x}" for low, high in np.asarray(sums.addressable_data(0)).tolist()]


def rows_of_chunk(shape: tuple[int, ...], chunk: int) -> tuple[int, int]:
    """The first row of a chunk, and the first after it.

    >>> rows_of_chunk((100, 3), 1), rows_of_chunk((100, 3), 14), rows_of_chunk((), 0)
    ((7, 14), (98, 100), (0, 1))
    """
    rows = shape[0] if shape else 1
    each = -(-rows // CHUNKS)
    return chunk * each, min((chunk + 1) * each, rows)


@lru_cache(maxsize=1024)
def _hasher(sharding: Sharding | None) -> Any:
    """One program per sharding and shape; every process gets the whole, small result."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return jax.jit(_chunk_sums, out_shardings=everywhere)


def _chunk_sums(x: jax.Array) -> jax.Array:
    words = _words(x)
    words = words.reshape((1,)) if words.ndim == 0 else words
    place = jnp.uint32(0)
    for dim in range(words.ndim):
        place = place * jnp.uint32(31) + _mix(jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) + _SEEDS[0])
    rows = words.shape[0]
    each = -(-(x.shape[0] if x.ndim else 1) // CHUNKS)
    number = jnp.arange(rows, dtype=jnp.uint32) // jnp.uint32(each)
    chunk = number[None] == jnp.arange(-(-rows // each), dtype=jnp.uint32)[:, None]
    sums: list[jax.Array] = []
    for seed in _SEEDS[1:]:
        mixed = _mix(_mix(words + place) + jnp.uint32(seed))
        by_row = jnp.sum(mixed, axis=tuple(range(1, words.ndim)), dtype=jnp.uint32)
        sums.append(jnp.sum(jnp.where(chunk, by_row[None], jnp.uint32(0)), axis=1, dtype=jnp.uint32))
    return jnp.stack(sums, axis=1)


_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


def _mix(word: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the input moves half of the output."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    return word ^ (word >> jnp.uint32(16))


def _words(x: jax.Array) -> jax.Array:
    """The bits of every element as unsigned words of 32 bits; wider elements get a last dimension of their words."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    bits = jnp.iinfo(x.dtype).bits if integer else jnp.finfo(x.dtype).bits
    if bits < 8:
        return _words(x.astype(jnp.int8 if integer else jnp.float32))
    if bits == 64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
