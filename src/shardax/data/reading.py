"""What one process holds of one global batch, and a place in the stream of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

RowsOf: TypeAlias = Callable[[int], NDArray[np.int64]]
"""Rows in the global batch → the ones that this process loads."""


@dataclass(frozen=True)
class Position:
    """Where a feed stands: before global step `step`, in an epoch that began at `epoch_start`."""

    step: int = 0
    epoch: int = 0
    epoch_start: int = 0
    resume: Any = None
    """The state of a stream's iterator there, if it has one."""


START = Position()


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Which rows a process holds of which global batch: what a transform may ask to know."""

    step: int
    epoch: int
    size: int
    """Rows of the global batch."""
    rows: NDArray[np.int64]
    """The ones that this process holds: the leading axis of every column."""
    valid: NDArray[np.bool_]
    """Which of them count; all, unless the policy is `pad`."""
    records: NDArray[np.int64] | None = None
    """The record in each row; None for a stream."""
    seed: int = 0

    def keys(self) -> jax.Array:
        """One random key per row, the same for a record in an epoch wherever and whenever it is loaded."""
        base = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed % 2**32), self.epoch), _APART)
        names = self._names()

        def key(high: Any, low: Any) -> Any:
            return jax.random.fold_in(jax.random.fold_in(base, high), low)

        return jax.vmap(key)((names >> 32).astype(np.uint32), (names & 0xFFFFFFFF).astype(np.uint32))

    def generators(self) -> list[np.random.Generator]:
        """One NumPy generator per row, likewise."""
        return [np.random.default_rng([self.seed % 2**64, self.epoch, name]) for name in self._names().tolist()]

    def _names(self) -> NDArray[np.int64]:
        return self.step * self.size + self.rows if self.records is None else self.records


_APART = 0x73686478
"""Keeps these keys apart from those that a user folds from the same seed."""


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The columns of this process's rows of one global batch.

    A process without rows reads one all the same (`rows` in `about`), to know what its arrays look like; `held` is what
    it really holds.
    """

    about: BatchRows
    columns: Any
    held: NDArray[np.int64]
    after: Position


def or_first(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows, or row 0 where there are none: what a process without rows reads to know their form."""
    return rows if len(rows) else np.zeros(1, np.int64)
