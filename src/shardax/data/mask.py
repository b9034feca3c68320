"""`masked_mean`: the mean over the rows that count, for the last batch of an epoch under policy `pad`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from shardax.errors import FeedError, Offence


def masked_mean(values: ArrayLike, mask: ArrayLike, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """The mean of `values` where `mask` is true; `mask` has the leading dimensions of `values`.

    Rows that do not count may hold anything, also NaN: they reach neither the value nor its gradient with respect to
    `values`. No valid row gives 0.

    >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False])))
    2.0
    """
    array, valid = jnp.asarray(values), jnp.asarray(mask).astype(bool)
    if valid.shape != array.shape[: valid.ndim]:
        raise FeedError(
            "the mask does not belong to these values",
            [Offence("values", "", shape=array.shape), Offence("mask", "", shape=valid.shape)],
            "a mask has the leading dimensions of the values",
        )
    spread = valid.reshape(valid.shape + (1,) * (array.ndim - valid.ndim))
    counted = jnp.broadcast_to(spread, array.shape)
    wide = jnp.result_type(array.dtype, jnp.float32)  # 16 bits can neither count to 2,049 nor add up to 65,520
    total = jnp.sum(jnp.where(counted, array, 0).astype(wide), axis=axis)
    mean = total / jnp.maximum(jnp.sum(counted, axis=axis), 1).astype(wide)
    return mean.astype(array.dtype) if jnp.issubdtype(array.dtype, jnp.inexact) else mean
