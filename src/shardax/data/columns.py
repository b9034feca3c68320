"""Columns: the leaves of a tree whose leading axis counts records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer

from shardax.errors import Offence


@dataclass(frozen=True, eq=False)
class Columns:
    """A tree taken apart: the path and value of every column, and how to put a tree of the same form together."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: Any

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """Records in every column; None for a leaf that has no records."""
        return tuple(length_of(value) for value in self.values)

    def misfits(self) -> list[Offence]:
        """Leaves that are no columns, and all columns if their lengths differ."""
        without = [
            Offence(path, f"{type(value).__name__} has no records to count", shape=getattr(value, "shape", None))
            for path, value, length in zip(self.paths, self.values, self.lengths, strict=True)
            if length is None
        ]
        if without or len(set(self.lengths)) < 2:
            return without
        return [Offence(path, f"{length} records") for path, length in zip(self.paths, self.lengths, strict=True)]

    def rebuilt(self, values: Iterable[Any]) -> Any:
        """A tree of this form with other values."""
        return jax.tree.unflatten(self.treedef, list(values))


def columns_of(tree: Any) -> Columns:
    """The columns of a tree; a list is a column of records, not a node.

    >>> columns_of({"x": np.zeros((3, 2)), "name": ["a", "b", "c"]}).lengths
    (3, 3)
    """
    paths, values, treedef = with_paths(tree, _is_list)
    return Columns(tuple(paths), tuple(values), treedef)


def with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[str], list[Any], Any]:
    """The paths and leaves of a tree, and its form."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    return paths, [leaf for _, leaf in found], treedef


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def length_of(value: Any) -> int | None:
    """Records in a column: its leading axis, or the length of a sequence that is not text; None if it has none.

    >>> length_of(np.zeros((4, 2))), length_of([1, 2]), length_of("text"), length_of(3.0)
    (4, 2, None, None)
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return int(cast("tuple[int, ...]", shape)[0]) if shape else None
    return len(value) if is_random_access(value) else None


def is_array(value: Any) -> bool:
    """Anything with a shape, a dtype and a subscript: NumPy, jax, memmaps, HDF5, Zarr."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__getitem__")


def is_random_access(value: Any) -> bool:
    """A sequence of records, by protocol: a length and a subscript. Text, mappings and sets are none."""
    if isinstance(value, (str, bytes, bytearray, Mapping, set, frozenset)):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def is_tree(value: Any) -> bool:
    """A mapping, a namedtuple or a registered node: something that holds columns by name."""
    if isinstance(value, tuple) and hasattr(cast("Any", value), "_fields"):
        return True
    if isinstance(value, (list, tuple, str)) or value is None:
        return False
    return isinstance(value, Mapping) or not jax.tree_util.all_leaves([value])


def is_stream(value: Any) -> bool:
    """Records one after another: an iterator, or an iterable without a subscript (it may know its length)."""
    if isinstance(value, (str, bytes, bytearray, Mapping, set, frozenset, Sequence)):
        return False
    return hasattr(value, "__next__") or (hasattr(value, "__iter__") and not is_random_access(value))


def is_spread(value: Any) -> bool:
    """A jax.Array of which other processes hold parts; one that is being traced is whole."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and not value.is_fully_addressable


def is_host_only(value: Any) -> bool:
    """Text, bytes, dates and objects have no device form: they stay where they are.

    >>> is_host_only("text"), is_host_only(np.array(["a"])), is_host_only(np.zeros(2)), is_host_only(1.5)
    (True, True, False, False)
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "OSUMm" or value.dtype.type is np.void  # bfloat16 has kind V too
    return not isinstance(value, (jax.Array, bool, int, float, complex))


def is_row(node: Any) -> bool:
    """A list of numbers and text, or of such lists: the value of one leaf, not a node with a leaf for each number."""
    return isinstance(node, list) and all(isinstance(item, _PLAIN) or is_row(item) for item in cast("list[Any]", node))


_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


def value_of(leaf: Any) -> Any:
    """A list of numbers as the array that it is; a ragged one, and anything else, stays itself.

    >>> value_of([[1, 2], [3, 4]]).shape, value_of([[1], [2, 3]]), value_of("text")
    ((2, 2), [[1], [2, 3]], 'text')
    """
    if not isinstance(leaf, list):
        return leaf
    try:
        return np.asarray(cast("list[Any]", leaf))
    except ValueError:
        return cast("list[Any]", leaf)


def is_key(value: Any) -> bool:
    """A random key, or an array of them: it has no form on the host."""
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
