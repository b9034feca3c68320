"""What a feed can read: columns by index array, records by number. (Streams stand in `streams.py`.)"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, TypeAlias, cast

import jax
import numpy as np
from numpy.typing import NDArray

from shardax.data.columns import columns_of, is_array, is_key, is_random_access, is_spread, is_stream, is_tree
from shardax.data.stack import Stacker, check_records, column_of, no_keys
from shardax.errors import SourceError

Indices: TypeAlias = NDArray[np.int64]


class Readable(Protocol):
    """Random access to `records` records: a tree of columns for any array of their numbers."""

    @property
    def records(self) -> int: ...

    def read(self, indices: Indices) -> Any: ...


class ColumnSource:
    """Arrays, memmaps, array-likes and lists of equal length, alone or in a tree; blocks are read by index array.

    >>> ColumnSource({"x": np.arange(5) * 10, "name": list("abcde")}).read(np.array([3, 1]))
    {'name': array(['d', 'b'], dtype=object), 'x': array([30, 10])}
    """

    def __init__(self, tree: Any, host: Collection[str] = ()) -> None:
        self._columns = columns_of(tree)
        misfits = self._columns.misfits()
        if misfits or not self._columns.values:
            raise SourceError(
                "the columns of this source are not equally many records" if misfits else "this source has no columns",
                misfits,
                "every leaf needs a leading axis of the same length; constants belong into the transform",
            )
        self.records = cast("int", self._columns.lengths[0])
        paths = zip(self._columns.paths, self._columns.values, strict=True)
        self._values = [_column(path, value, path in host) for path, value in paths]

    def read(self, indices: Indices) -> Any:
        """The rows of these records, as fresh arrays."""
        run = _as_run(indices)
        return self._columns.rebuilt(_rows(value, indices, run) for value in self._values)


def _column(path: str, value: Any, keep: bool) -> Any:
    """A column that can be subscripted with an index array; lists are looked through once."""
    if isinstance(value, jax.Array):
        if is_spread(value):
            raise SourceError("a global jax.Array is already spread over processes: give the feed host data")
        if is_key(value):
            raise no_keys([path])
        return np.asarray(value)
    if hasattr(value, "iloc"):  # a pandas Series is subscripted by label
        return np.asarray(value)
    return value if is_array(value) else column_of(list(value), keep)


def _as_run(indices: Indices) -> slice | None:
    """The slice that these numbers are, if they are one."""
    if not len(indices) or int(indices[-1]) - int(indices[0]) != len(indices) - 1:
        return None
    return slice(int(indices[0]), int(indices[-1]) + 1) if bool((np.diff(indices) == 1).all()) else None


def _rows(value: Any, indices: Indices, run: slice | None) -> NDArray[Any]:
    if run is not None:
        return np.array(value[run])  # a copy: a batch on its way must not change with the source
    if isinstance(value, np.ndarray):
        return np.take(value, indices, axis=0, mode="clip").view(np.ndarray)
    ordered, back = np.unique(indices, return_inverse=True)  # files want growing numbers, each once
    return np.asarray(value[ordered])[back]


class RecordSource:
    """Any sequence of records, or a Grain `MapDataset` or `RandomAccessDataSource`: read one by one and stacked.

    A source with `__getitems__(numbers)` is asked for a whole batch at once.
    """

    def __init__(self, source: Any, host: Collection[str] = ()) -> None:
        self.source, self.records, self._host = source, len(source), host
        self._stacker: Stacker | None = None

    def read(self, indices: Indices) -> Any:
        """The records with these numbers as columns."""
        numbers = cast("list[int]", indices.tolist())
        fetch = getattr(self.source, "__getitems__", None)
        records = list(fetch(numbers)) if fetch is not None else [self.source[number] for number in numbers]
        return self.stacked(records, numbers)

    def stacked(self, records: list[Any], numbers: list[int]) -> Any:
        """Records that were read elsewhere, as columns."""
        check_records(records, lambda place: f"record {numbers[place]}")
        if self._stacker is None:  # record 0 is the same one on every process
            self._stacker = Stacker(self.source[0], self._host)
        return self._stacker.stack(records, lambda place: f"record {numbers[place]}")


def readable(source: Any, host: Collection[str] = ()) -> Readable | None:
    """The way to read a source by number; None for a stream; an error for anything else."""
    if isinstance(source, (ColumnSource, RecordSource)):
        return source
    if hasattr(source, "__dataframe__") and hasattr(source, "columns"):  # pandas, polars
        return ColumnSource({str(name): np.asarray(source[name]) for name in source.columns}, host)
    if is_array(source) and getattr(source, "shape", ()) and not _is_records(source):
        return ColumnSource(source, host)
    if is_tree(source) or _is_tuple_of_columns(source):
        return ColumnSource(source, host)
    if is_stream(source):
        return None
    if is_random_access(source) and getattr(source, "shape", None) != ():
        return RecordSource(source, host)
    raise SourceError(
        f"cannot feed from {type(source).__name__}{' without dimensions' if is_array(source) else ''}",
        remedy="give arrays or a tree of them, a sequence, a Grain data set, data source or DataLoader, or an iterable",
    )


def _is_records(source: Any) -> bool:
    return hasattr(source, "to_iter_dataset")


def _is_tuple_of_columns(source: Any) -> bool:
    return isinstance(source, tuple) and bool(source) and all(is_array(s) and s.shape for s in cast("Any", source))
