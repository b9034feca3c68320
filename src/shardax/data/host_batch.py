"""What happens to a process's rows between source and devices: the transform, and the check of what it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from shardax.data.batches import BatchPlacer
from shardax.data.columns import columns_of, is_array
from shardax.data.exchange import Exchange
from shardax.data.reading import LocalBatch, Position
from shardax.data.replicas import check_replicas
from shardax.data.stack import objects
from shardax.errors import FeedError, Offence, TransformError

Transform = Callable[..., Any]
"""`transform(columns)`, or `transform(columns, about)` with the `BatchRows` of this process."""


def wants_rows(transform: Transform) -> bool:
    """Does the transform take a second argument without a default?"""
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # builtins and C functions: they take what they always take
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) >= 2


def transformed(transform: Transform | None, with_rows: bool, local: LocalBatch) -> Any:
    """The columns after the transform: one row for every row, as arrays; anything else is a `TransformError`."""
    if transform is None:
        return local.columns
    given = transform(local.columns, local.about) if with_rows else transform(local.columns)
    columns = columns_of(given)
    rows = len(local.about.rows)
    wrong = [
        Offence(path, f"{'no rows' if length is None else f'{length} rows'} for {rows}", shape=np.shape(value))
        for path, value, length in zip(columns.paths, columns.values, columns.lengths, strict=True)
        if length != rows
    ]
    if wrong or not columns.values:
        raise TransformError(
            f"the transform does not return one row for each of its {rows} rows (step {local.about.step})",
            wrong or [Offence("", f"it returned {type(given).__name__} without arrays")],
            "it may change everything but the leading axis; filter and group records before the feed",
        )
    return columns.rebuilt(_as_array(value) for value in columns.values)


def _as_array(value: Any) -> Any:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TransformError("a transform cannot return random keys: return jax.random.key_data(keys)")
    if is_array(value):
        return np.asarray(value)
    values: list[Any] = list(value)
    return objects(values) if any(isinstance(item, str) for item in values) else np.asarray(values)


class BatchWork:
    """From local batches to global ones: transform, check, place, mask."""

    def __init__(
        self, placer: BatchPlacer, transform: Transform | None, host: frozenset[str], mask: str | None
    ) -> None:
        self.placer, self.transform, self.host, self.mask = placer, transform, host, mask
        self._with_rows = transform is not None and wants_rows(transform)

    def run(self, batches: Generator[LocalBatch], check: Exchange | None = None) -> Generator[tuple[Any, Position]]:
        """Every global batch with the position after it; over `check` processes compare the rows that they share."""
        for local in batches:
            columns = transformed(self.transform, self._with_rows, local)
            if check is not None:
                mine = self.placer.digests(columns, local.held, local.about.size, self.host)
                check_replicas(check, mine, f"step {local.about.step}")
            batch = self.placer.put(columns, local.held, local.about.size, self.host)
            yield self._masked(batch, local), local.after

    def _masked(self, batch: Any, local: LocalBatch) -> Any:
        if self.mask is None:
            return batch
        mask = self.placer.put_mask(local.about.valid, local.held, local.about.size)
        if not isinstance(batch, dict):
            return batch, mask
        if self.mask in batch:
            raise FeedError(
                f"policy 'pad' adds a leaf {self.mask!r} and the batch has one already",
                remedy="name it otherwise with mask=…",
            )
        return {**batch, self.mask: mask}
