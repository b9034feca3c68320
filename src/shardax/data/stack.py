"""Records one by one → columns: numbers are stacked, text stays on the host, what does not fit together is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardax.data.columns import is_host_only, with_paths
from shardax.errors import Offence, SourceError


class Stacker:
    """Stacks records that look like a first one. What stays on the host is settled by that one, for every process.

    >>> stacker = Stacker({"x": np.zeros(2), "name": "a"})
    >>> out = stacker.stack([{"x": np.ones(2), "name": "a"}, {"x": np.zeros(2), "name": "bc"}], "record {}".format)
    >>> out["x"].shape, out["name"].tolist()
    ((2, 2), ['a', 'bc'])
    """

    def __init__(self, sample: Any, host: Collection[str] = ()) -> None:
        self.paths, leaves, self.treedef = with_paths(sample)
        self.shapes = [np.shape(leaf) if not is_host_only(leaf) else () for leaf in leaves]
        self.on_host = [path in host or is_host_only(leaf) for path, leaf in zip(self.paths, leaves, strict=True)]

    def stack(self, records: Sequence[Any], name: Callable[[int], str]) -> Any:
        """One tree of columns; `name` says which record the n-th is, for messages."""
        rows = [self._leaves(record, name, place) for place, record in enumerate(records)]
        columns = zip(*rows, strict=True) if rows else ([] for _ in self.paths)
        return jax.tree.unflatten(
            self.treedef, [self._column(place, values, name) for place, values in enumerate(columns)]
        )

    def _leaves(self, record: Any, name: Callable[[int], str], place: int) -> list[Any]:
        leaves, treedef = jax.tree.flatten(record)
        if treedef != self.treedef:
            raise SourceError(
                "records of one source must have the same leaves",
                [Offence(name(place), f"{treedef}"), Offence("the first record", f"{self.treedef}")],
                "let a transform give every record the same form",
            )
        return leaves

    def _column(self, place: int, values: Sequence[Any], name: Callable[[int], str]) -> NDArray[Any]:
        if self.on_host[place]:
            return objects(values)
        odd = [n for n, value in enumerate(values) if np.shape(value) != self.shapes[place]]
        if odd:
            raise ragged(
                [Offence(f"{self.paths[place]} of {name(n)}", "", shape=np.shape(values[n])) for n in odd[:5]],
                Offence(f"{self.paths[place]} of the first record", "", shape=self.shapes[place]),
                self.paths[place],
            )
        return np.stack([np.asarray(value) for value in values])


def ragged(odd: Sequence[Offence], first: Offence, path: str) -> SourceError:
    """The error for a leaf whose shape changes from record to record."""
    return SourceError(
        f"records do not stack: leaf {path!r} has several shapes",
        [first, *odd],
        f"pad it to one shape before the feed, or keep it on the host with host=({path!r},)",
    )


def objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """The values as they are, in an array that only counts them."""
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one: NumPy would take values of equal length apart
        column[place] = value
    return column
