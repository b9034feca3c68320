"""`rows_of_process`: one process's part of anything that holds records, without copying arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from shardax.data.columns import columns_of, is_array, is_random_access, is_spread, is_stream, is_tree
from shardax.data.split import process_bounds
from shardax.errors import SharderError, plural


class RowsView(Sequence[Any]):
    """A contiguous part of a random-access source, read only when asked.

    >>> view = RowsView(range(100), 10, 15)
    >>> len(view), view[0], view[-1], list(view[1:3])
    (5, 10, 14, [11, 12])
    """

    def __init__(self, source: Any, start: int, stop: int) -> None:
        self.source, self.start, self.stop = source, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return [self[place] for place in range(start, stop, step)]
            return RowsView(self.source, self.start + start, self.start + max(start, stop))
        if not -len(self) <= at < len(self):
            raise IndexError(f"record {at} of {len(self)}")
        return self.source[self.start + at % len(self)]

    def __repr__(self) -> str:
        return f"RowsView({type(self.source).__name__}, {self.start}:{self.stop})"


def rows_of_process(data: Any, index: int, count: int, drop_remainder: bool, warn: Callable[[str], None]) -> Any:
    """The rows of process `index` of `count`; what has no rows is a `SharderError`."""
    if type(data) is list or (type(data) is np.ndarray and data.ndim):  # the common cases, in two microseconds
        total = len(data)
        if total < count:
            warn_if_starved(total, count, drop_remainder, warn)
        start, stop = process_bounds(total, index, count, drop_remainder)
        return data[start:stop]

    def part(value: Any) -> Any:
        return _slice(value, *process_bounds(len(value), index, count, drop_remainder))

    if is_spread(data):
        raise SharderError(
            f"Cannot shard data of type {type(data)}: a global array is already split over processes",
            remedy="give each process's host data, or reshard with shard(batch, sharding)",
        )
    if is_array(data) and not data.shape:
        raise _unknown(data)
    if is_tree(data):
        return _tree(data, part, index, count, drop_remainder, warn)
    if is_stream(data):
        return _strided(iter(data), index, count, drop_remainder, warn)
    if not is_random_access(data):
        raise _unknown(data)
    warn_if_starved(len(data), count, drop_remainder, warn)
    return part(data)


def _tree(
    data: Any, part: Callable[[Any], Any], index: int, count: int, drop_remainder: bool, warn: Callable[[str], None]
) -> Any:
    columns = columns_of(data)
    if not columns.values:
        raise _unknown(data)
    misfits = columns.misfits()
    if misfits:
        raise SharderError(
            f"Cannot shard data of type {type(data)}: its leaves are not equally many records",
            misfits,
            "give columns of one length; what is not per record does not belong in the batch",
        )
    warn_if_starved(int(cast("int", columns.lengths[0])), count, drop_remainder, warn)
    return columns.rebuilt(part(value) for value in columns.values)


def _slice(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, jax.Array) and stop - start == len(value):
        return value  # slicing an array that lives on a device copies it
    if isinstance(value, (np.ndarray, jax.Array, list, tuple, range)):
        return value[start:stop]
    if hasattr(value, "iloc"):
        return value.iloc[start:stop]
    if hasattr(value, "slice") and hasattr(value, "to_iter_dataset"):  # a Grain MapDataset knows its own slices
        return value[start:stop]
    return RowsView(value, start, stop)


def _strided(
    stream: Iterator[Any], index: int, count: int, drop_remainder: bool, warn: Callable[[str], None]
) -> Iterator[Any]:
    """Every `count`-th record: one group of records in memory, never more."""
    if not drop_remainder:
        yield from itertools.islice(stream, index, None, count)
        return
    for group in itertools.count():
        records = list(itertools.islice(stream, count))
        if len(records) < count:
            if group == 0 and records:
                warn_if_starved(len(records), count, drop_remainder, warn)
            return
        yield records[index]


def warn_if_starved(total: int, count: int, drop_remainder: bool, warn: Callable[[str], None]) -> None:
    """Fewer records than processes, and the remainder dropped: every process would silently get nothing."""
    if drop_remainder and 0 < total < count:
        few = f"{plural(total, 'record')} {'is' if total == 1 else 'are'} fewer than {count} processes"
        warn(
            f"{few} and drop_remainder=True leaves none of them to anyone; "
            "set drop_remainder=False, or give at least one record per process"
        )


def _unknown(data: Any) -> SharderError:
    return SharderError(
        f"Cannot shard data of type {type(data)}",
        remedy="give a list, a tuple, an array, a tree of equally long columns, a random-access source or an iterator",
    )
