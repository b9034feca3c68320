"""`StateSharding`: one sharding per cell, chosen by filters over paths and cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from shardax.errors import StateShardingError

Path = tuple[Any, ...]
Predicate = Callable[[Path, Any], bool]


@dataclass(frozen=True)
class PathIn:
    """The filter that knows its paths by heart.

    >>> PathIn(frozenset({("mlp", "kernel")}))(("mlp", "kernel"), None)
    True
    """

    paths: frozenset[Path]

    def __call__(self, path: Path, value: Any) -> bool:
        return path in self.paths


class StateSharding:
    """Shardings for the cells of one argument: the first filter that matches decides.

    >>> from jax.sharding import PartitionSpec as P
    >>> import shardax as sx
    >>> by_name = sx.StateSharding({lambda path, cell: path[-1] == "kernel": P(None, "tp"), ...: P()})
    >>> by_name.map_prefix(("mlp", "kernel"), None), by_name.map_prefix(("mlp", "bias"), None)
    (P(None, 'tp'), P())

    Filters: a type of cell, a tag (a string, compared with the cell's `tag`), `True` or `...` for everything, `False`
    or `None` for nothing, a callable `(path, cell)`, or a list of filters of which any may match. An `nnx.State` of
    shardings stands for its paths.
    """

    __slots__ = ("_filters", "_predicates", "_shardings")

    def __init__(self, filter_sharding: Any, /) -> None:
        pairs = _pairs(filter_sharding)
        self._filters = tuple(filter for filter, _ in pairs)
        self._shardings = tuple(sharding for _, sharding in pairs)
        self._predicates = tuple(map(to_predicate, self._filters))

    @property
    def filters(self) -> tuple[Any, ...]:
        """The filters, in the order in which they are asked."""
        return self._filters

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The sharding (or PartitionSpec) of each filter."""
        return self._shardings

    def map_prefix(self, path: Path, variable: Any) -> Any:
        """The sharding of the cell at `path`; a `ValueError` where no filter covers it."""
        for predicate, sharding in zip(self._predicates, self._shardings, strict=True):
            if predicate(path, variable):
                return sharding
        raise StateShardingError(
            f"No axis found for {path=}, {variable=}", remedy="end with `...: P()` to cover the rest"
        )

    def __repr__(self) -> str:
        return f"StateSharding({dict(zip(self._filters, self._shardings, strict=True))})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StateSharding) and self._filters == other._filters and self._shardings == other._shardings
        )

    def __hash__(self) -> int:
        return hash((self._filters, self._shardings))


def _pairs(given: Any) -> tuple[tuple[Any, Any], ...]:
    if hasattr(given, "flat_state"):  # nnx.State
        paths: dict[Any, list[Path]] = {}
        for path, sharding in _flat(given, ()):
            paths.setdefault(sharding, []).append(path)
        return tuple((PathIn(frozenset(places)), sharding) for sharding, places in paths.items())
    items: Iterable[Any] = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple((filter, sharding) for filter, sharding in items)
    except (TypeError, ValueError):
        raise StateShardingError(
            f"StateSharding takes a mapping, pairs or an nnx.State of shardings, not {type(given).__name__}",
            remedy="StateSharding({nnx.Param: P('fsdp'), ...: P()})",
        ) from None


def _flat(tree: Any, path: Path) -> Iterable[tuple[Path, Any]]:
    """What stands in nested mappings, or in their Variables; an nnx.State's own way to list it is deprecated."""
    if not isinstance(tree, Mapping):
        return [(path, tree.get_value() if hasattr(tree, "get_value") else tree)]
    return [found for key, below in tree.items() for found in _flat(below, (*path, key))]


def to_predicate(filter: Any) -> Predicate:
    """The predicate that a filter stands for.

    >>> to_predicate(["head", False])((), type("Cell", (), {"tag": "head"})())
    True
    """
    if isinstance(filter, (bool, EllipsisType)) or filter is None:
        verdict = filter is True or filter is ...
        return lambda path, value: verdict
    if isinstance(filter, str):
        return lambda path, value: _tagged(tag_of(value), filter)
    if isinstance(filter, type):
        return lambda path, value: isinstance(value, filter) or _of_type(value, filter)
    if isinstance(filter, (list, tuple)):
        predicates = tuple(map(to_predicate, filter))
        return lambda path, value: any(predicate(path, value) for predicate in predicates)
    if callable(filter):
        predicate: Any = filter
        return predicate
    raise StateShardingError(
        f"unknown filter {filter!r} ({type(filter).__name__})",
        remedy="a type, a tag, True or ..., False or None, a callable (path, cell), or a list of those",
    )


def tag_of(value: Any) -> Any:
    """The tag of a cell: an attribute, or an entry of a State's metadata."""
    metadata = getattr(value, "metadata", None)
    if isinstance(metadata, Mapping) and "tag" in metadata:
        return metadata["tag"]
    return getattr(value, "tag", None)


def _tagged(tag: Any, wanted: str) -> bool:
    """A tag is a string, or in brainstate a set of strings."""
    return wanted in tag if isinstance(tag, (set, frozenset)) else bool(tag == wanted)


def _of_type(value: Any, cls: type) -> bool:
    declared = getattr(value, "type", None)
    return isinstance(declared, type) and issubclass(declared, cls)
