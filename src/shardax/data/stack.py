"""Records one by one → columns: numbers are stacked, text stays on the host, what does not fit together is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardax.data.columns import is_host_only, is_key, is_row, value_of, with_paths
from shardax.errors import Offence, SourceError


class Stacker:
    """Stacks records that look like a first one. What stays on the host is settled by that one, for every process.

    >>> stacker = Stacker({"x": np.zeros(2), "name": "a"})
    >>> out = stacker.stack([{"x": np.ones(2), "name": "a"}, {"x": np.zeros(2), "name": "bc"}], "record {}".format)
    >>> out["x"].shape, out["name"].tolist()
    ((2, 2), ['a', 'bc'])
    """

    def __init__(self, sample: Any, host: Collection[str] = ()) -> None:
        self.paths, found, self.treedef = with_paths(sample, is_row)
        leaves = [value_of(leaf) for leaf in found]
        self.on_host = [path in host or is_host_only(leaf) for path, leaf in zip(self.paths, leaves, strict=True)]
        keys = [path for path, leaf in zip(self.paths, leaves, strict=True) if is_key(leaf)]
        if keys:
            raise no_keys(keys)
        first = [None if stays else np.asarray(leaf) for leaf, stays in zip(leaves, self.on_host, strict=True)]
        self.shapes = [() if leaf is None else leaf.shape for leaf in first]
        self.dtypes = [np.dtype(object) if leaf is None else leaf.dtype for leaf in first]

    def stack(self, records: Sequence[Any], name: Callable[[int], str]) -> Any:
        """One tree of columns; `name` says which record the n-th is, for messages."""
        rows = [self._leaves(record, name, place) for place, record in enumerate(records)]
        columns = zip(*rows, strict=True) if rows else ([] for _ in self.paths)
        return jax.tree.unflatten(
            self.treedef, [self._column(place, values, name) for place, values in enumerate(columns)]
        )

    def _leaves(self, record: Any, name: Callable[[int], str], place: int) -> list[Any]:
        leaves, treedef = jax.tree.flatten(record, is_row)
        if treedef != self.treedef:
            raise SourceError(
                "records of one source must have the same leaves",
                [Offence(name(place), f"{treedef}"), Offence("the first record", f"{self.treedef}")],
                "give every record the same form where it is read: a transform comes later, when they are columns",
            )
        return leaves

    def _column(self, place: int, values: Sequence[Any], name: Callable[[int], str]) -> NDArray[Any]:
        if self.on_host[place]:
            return objects(values)
        shapes = [_shape(value) for value in values]
        odd = [n for n, shape in enumerate(shapes) if shape != self.shapes[place]]
        if odd:
            path = self.paths[place]
            raise SourceError(
                f"records do not stack: leaf {path!r} has several shapes",
                [
                    Offence("the first record", "", shape=self.shapes[place]),
                    *(Offence(name(n), "" if shapes[n] is not None else "is ragged", shape=shapes[n]) for n in odd[:5]),
                ],
                f"pad it to one shape before the feed, or keep it on the host with host=({path!r},)",
            )
        return self._stacked(place, [np.asarray(value) for value in values], name)

    def _stacked(self, place: int, arrays: list[NDArray[Any]], name: Callable[[int], str]) -> NDArray[Any]:
        """In the dtype of the first record: what the records of one process happen to hold must not decide it."""
        dtype = self.dtypes[place]
        others = [n for n, array in enumerate(arrays) if array.dtype != dtype]
        lossy = [n for n in others if not np.can_cast(arrays[n].dtype, dtype, "same_kind")]
        if lossy:
            path = self.paths[place]
            raise SourceError(
                f"records do not stack: leaf {path!r} has several dtypes",
                [Offence("the first record", str(dtype)), *(Offence(name(n), str(arrays[n].dtype)) for n in lossy[:5])],
                "give every record the same dtype where it is read",
            )
        return np.stack([array.astype(dtype) for array in arrays] if others else arrays)


def _shape(value: Any) -> tuple[int, ...] | None:
    try:
        return np.shape(value)
    except ValueError:  # a ragged list
        return None


def check_records(records: Sequence[Any], name: Callable[[int], str]) -> None:
    """Every record must be something; an error names those that are None."""
    missing = [Offence(name(place), "is None") for place, record in enumerate(records) if record is None]
    if missing:
        raise SourceError(
            "a source must have a record for every number below its length",
            missing[:5],
            "filter before the feed counts records: a Grain filter leaves None behind",
        )


def no_keys(paths: Sequence[str]) -> SourceError:
    """The error for random keys in a source."""
    return SourceError(
        "random keys have no form on the host",
        [Offence(path, "holds keys") for path in paths if path],
        "give the feed jax.random.key_data(keys)",
    )


def column_of(values: Sequence[Any], keep: bool = False) -> NDArray[Any]:
    """One value for each row as one array: numbers of one shape are stacked; text, ragged rows, objects stay objects.

    >>> column_of([[1, 2], [3, 4]]).shape, column_of(["a", "b"]).dtype, column_of([[1], [2, 3]]).dtype
    ((2, 2), dtype('O'), dtype('O'))
    """
    rows = [] if keep else [value_of(value) for value in values]
    if not rows or any(is_host_only(row) for row in rows) or len({np.shape(row) for row in rows}) > 1:
        return objects(values)
    return np.stack([np.asarray(row) for row in rows])


def objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """The values as they are, in an array that only counts them."""
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one: NumPy would take values of equal length apart
        column[place] = value
    return column
