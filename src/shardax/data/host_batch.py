"""What happens to a process's rows between source and devices: the transform, and the check of what it gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator
from typing import Any

import numpy as np

from shardax.data.batches import BatchPlacer
from shardax.data.columns import columns_of, is_array, is_host_only, is_key, value_of, with_paths
from shardax.data.exchange import Exchange
from shardax.data.reading import LocalBatch, Position
from shardax.data.replicas import check_replicas
from shardax.data.stack import column_of
from shardax.errors import FeedError, Offence, TransformError, did_you_mean

Transform = Callable[..., Any]
"""`transform(columns)`, or `transform(columns, about)` with the `BatchRows` of this process."""


def wants_rows(transform: Transform) -> bool:
    """Does the transform take a second argument without a default? One that no call of ours fits is an error."""
    if not callable(transform):
        raise TransformError(f"transform={transform!r} cannot be called", remedy="give a function of the columns")
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # builtins and C functions: they take what they always take
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) > 2:
        named = ", ".join(p.name for p in needed)
        raise TransformError(
            f"the transform needs {len(needed)} arguments: {named}",
            remedy="it is called as transform(columns) or transform(columns, about); bind the others with partial",
        )
    return len(needed) == 2


def transformed(transform: Transform | None, with_rows: bool, local: LocalBatch, host: Collection[str]) -> Any:
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
    paths = zip(columns.paths, columns.values, strict=True)
    return columns.rebuilt(_as_array(path, value, path in host) for path, value in paths)


def _as_array(path: str, value: Any, keep: bool) -> Any:
    if is_key(value):
        raise TransformError("a transform cannot return random keys: return jax.random.key_data(keys)")
    if is_array(value):
        return np.asarray(value)
    rows = [value_of(row) for row in value]
    if not keep and len(shapes := {np.shape(row) for row in rows if not is_host_only(row)}) > 1:
        raise TransformError(  # to keep it on the host would depend on the rows that this process happens to hold
            f"the transform returns rows of several shapes: {', '.join(map(str, sorted(shapes)))}",
            [Offence(path, "does not stack")] if path else [],
            f"pad them to one shape, or keep them on the host with host=({path!r},)",
        )
    return column_of(list(value), keep)


class BatchWork:
    """From local batches to global ones: transform, check, place, mask."""

    def __init__(
        self, placer: BatchPlacer, transform: Transform | None, host: frozenset[str], mask: str | None
    ) -> None:
        self.placer, self.transform, self.host, self.mask = placer, transform, host, mask
        self._with_rows = transform is not None and wants_rows(transform)
        self._host_names_known = not host

    def run(self, batches: Generator[LocalBatch], check: Exchange | None = None) -> Generator[tuple[Any, Position]]:
        """Every global batch with the position after it; over `check` processes compare the rows that they share."""
        for local in batches:
            columns = transformed(self.transform, self._with_rows, local, self.host)
            self._check_host_names(local.columns, columns)
            if check is not None:
                mine = self.placer.digests(columns, local.held, local.about.size, self.host)
                check_replicas(check, mine, f"step {local.about.step}")
            batch = self.placer.put(columns, local.held, local.about.size, self.host)
            yield self._masked(batch, local), local.after

    def _check_host_names(self, read: Any, given: Any) -> None:
        """What is to stay on the host must be a leaf of the records or of what the transform makes of them."""
        if self._host_names_known:
            return
        known = dict.fromkeys([*with_paths(read)[0], *with_paths(given)[0]])
        strange = sorted(self.host.difference(known))
        if strange:
            raise FeedError(
                "host= names leaves that there are not",
                [Offence(repr(name), f"is no leaf{did_you_mean(name, known)}") for name in strange],
                f"the leaves are {', '.join(map(repr, known))}",
            )
        self._host_names_known = True

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
