"""`shuffled`: a keyed permutation of `range(n)` that is computed, never stored.

An alternating Feistel network on the smallest power of two that holds `n`, with cycle walking: a bijection for every n,
vectorised, O(1) memory, and position 10⁹ costs what position 0 costs.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 6
"""Each half is mixed three times."""

SMALL_ROUNDS = 24
"""Halves of a bit or two mix slowly: below 4,096 records six rounds leave some orders five times too likely."""

LARGEST = 2**62
"""Positions are int64, and the walk needs one bit of head room."""

_ODD_32, _ODD_64 = 0x9E3779B1, 0x9E3779B97F4A7C15


def shuffled(positions: ArrayLike, n: int, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    """The records at these positions of the order that `(n, seed, epoch)` stands for.

    >>> order = shuffled(np.arange(10), 10, seed=0)
    >>> sorted(order.tolist()) == list(range(10)), order.tolist() == shuffled(np.arange(10), 10, seed=1).tolist()
    (True, False)
    >>> int(shuffled(999_999_999, 10**9, seed=0)) < 10**9
    True
    """
    if not 0 < n <= LARGEST:
        raise ValueError(f"cannot order {n} records: give between 1 and 2^62")
    asked = np.asarray(positions, np.int64)
    if asked.size and (int(asked.min()) < 0 or int(asked.max()) >= n):
        raise ValueError(f"positions must lie in 0 … {n - 1}, got {asked.min()} … {asked.max()}")
    bits = max(2, (n - 1).bit_length())
    keys = _round_keys(n, seed, epoch, bits)
    walk = _narrow if bits <= 32 else _wide
    value = walk(asked.ravel(), bits, keys)
    outside = np.flatnonzero(value >= n)
    while outside.size:  # fewer than half of the domain lies outside, so this ends quickly
        value[outside] = walk(value[outside], bits, keys)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64).reshape(asked.shape)


@lru_cache(maxsize=64)
def _round_keys(n: int, seed: int, epoch: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Per round an odd multiplier and an offset, from a hash that is the same everywhere and for ever."""
    width = 4 if bits <= 32 else 8
    rounds = SMALL_ROUNDS if bits <= 12 else ROUNDS
    digest = hashlib.shake_256(f"shardax order 1/{n}/{seed}/{epoch}".encode()).digest(2 * width * rounds)
    numbers = [int.from_bytes(digest[at : at + width], "little") for at in range(0, len(digest), width)]
    return tuple((numbers[2 * r] | 1, numbers[2 * r + 1]) for r in range(rounds))


def _narrow(positions: NDArray[np.generic], bits: int, keys: tuple[tuple[int, int], ...]) -> NDArray[np.uint32]:
    """One pass over at most 32 bits: 32-bit products run in vector registers."""
    low, high = bits // 2, bits - bits // 2
    value = positions.astype(np.uint32)
    left, right = value >> np.uint32(low), value & np.uint32((1 << low) - 1)
    odd, fifteen = np.uint32(_ODD_32), np.uint32(15)
    for multiplier, offset in keys:
        mixed = right * np.uint32(multiplier)
        mixed += np.uint32(offset)
        mixed ^= mixed >> fifteen
        mixed *= odd
        mixed >>= np.uint32(32 - high)
        left ^= mixed
        left, right = right, left
        low, high = high, low
    left <<= np.uint32(low)
    left |= right
    return left


def _wide(positions: NDArray[np.generic], bits: int, keys: tuple[tuple[int, int], ...]) -> NDArray[np.uint64]:
    """The same over more than 32 bits, in 64-bit arithmetic."""
    low, high = bits // 2, bits - bits // 2
    value = positions.astype(np.uint64)
    left, right = value >> np.uint64(low), value & np.uint64((1 << low) - 1)
    odd, thirty = np.uint64(_ODD_64), np.uint64(30)
    for multiplier, offset in keys:
        mixed = right * np.uint64(multiplier)
        mixed += np.uint64(offset)
        mixed ^= mixed >> thirty
        mixed *= odd
        mixed >>= np.uint64(64 - high)
        left ^= mixed
        left, right = right, left
        low, high = high, low
    left <<= np.uint64(low)
    left |= right
    return left
