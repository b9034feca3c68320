"""The order: a bijection for every size, the same for ever, and without a visible pattern."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardax.data.order import shuffled


@given(n=st.integers(1, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 50))
def test_every_record_stands_once(n, seed, epoch):
    assert np.array_equal(np.sort(shuffled(np.arange(n), n, seed, epoch)), np.arange(n))


@given(n=st.integers(1, 2**62), seed=st.integers(0, 9), data=st.data())
def test_any_size_any_position(n, seed, data):
    first = data.draw(st.integers(0, n - 1))
    positions = np.arange(first, min(n, first + 50))
    records = shuffled(positions, n, seed)
    assert records.min() >= 0 and records.max() < n and len(set(records.tolist())) == len(positions)
    assert int(shuffled(first, n, seed)) == int(records[0])


def test_the_order_is_the_same_for_ever():
    """A change here breaks the resume of every run that was ever saved: never update these numbers."""
    assert shuffled(np.arange(8), 10, seed=0).tolist() == GOLDEN_10
    assert shuffled(np.arange(4), 10**9, seed=42, epoch=3).tolist() == GOLDEN_BILLION
    assert shuffled(np.arange(3), 10**13, seed=1).tolist() == GOLDEN_WIDE


GOLDEN_10 = [6, 8, 3, 1, 0, 7, 5, 2]
GOLDEN_BILLION = [578989154, 849466739, 143468196, 67437858]
GOLDEN_WIDE = [7283977305958, 1376985179475, 4326814941345]


def test_seed_and_epoch_change_the_order():
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("n", [2, 3, 5, 7, 10, 100])
def test_every_record_is_as_likely_in_every_place(n):
    orders = 3000
    counts = np.zeros((n, n))
    for seed in range(orders):
        counts[np.arange(n), shuffled(np.arange(n), n, seed)] += 1
    expected = orders / n
    assert ((counts - expected) ** 2 / expected).sum() / (n - 1) ** 2 < (8 if n == 2 else 3 if n < 7 else 1.8)


@pytest.mark.parametrize("n", [1000, 10**6, 10**9])
def test_neighbours_are_not_related(n):
    records = shuffled(np.arange(min(n, 100_000)), n, seed=7)
    assert abs(np.corrcoef(records[:-1], records[1:])[0, 1]) < 4 / np.sqrt(len(records))


def test_memory_does_not_grow_with_the_data_set():
    shuffled(np.arange(1024), 10**9, 0)
    tracemalloc.start()
    shuffled(np.arange(1024) + 5 * 10**8, 10**9, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("positions, n", [([10], 10), ([-1], 10), ([0], 0), ([0], 2**62 + 1)])
def test_positions_outside_are_errors(positions, n):
    with pytest.raises(ValueError, match=r"positions must lie in 0 … 9|cannot order"):
        shuffled(positions, n, 0)
