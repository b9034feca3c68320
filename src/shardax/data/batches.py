"""`BatchPlacer`: a layout or sharding → the rows a process loads, and its host columns → one global batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from shardax.data.assemble import check_range, place_rows
from shardax.data.columns import is_host_only, with_paths
from shardax.data.replicas import digests
from shardax.data.shardings import cut_to_rank, is_sharding, read_shardings, spread, with_spec
from shardax.data.split import RowSplit, row_split, union_of_rows
from shardax.names.spec import fit, misfit_error


class BatchPlacer:
    """Knows the sharding of every leaf of a batch. One sharding serves leaves of any rank: it is cut to theirs.

    `given` is a sharding, a `Layout`, a `PartitionSpec` (on the mesh in force), a `(mesh, spec)` pair, or a tree of
    these that is a prefix of the batch, in which None leaves a part on the host.
    """

    def __init__(self, given: Any) -> None:
        self.given = read_shardings(given)
        self.all: list[Sharding] = jax.tree.leaves(self.given, is_leaf=is_sharding)
        self.process = jax.process_index()
        self._shardings: dict[tuple[Sharding, str, tuple[int, ...]], Sharding] = {}
        self._rows: dict[int, NDArray[np.int64]] = {}

    @cached_property
    def _row_shardings(self) -> list[Sharding]:
        """How the rows alone are split: one sharding of one dimension for each that occurs."""
        found: list[Sharding] = []
        for sharding in self.all:
            alone = cut_to_rank(sharding, 1)
            if alone not in found:
                found.append(alone)
        return found

    def splits(self, size: int) -> list[RowSplit]:
        """The splits of a global batch of this many rows; a batch that does not divide is an error."""
        return [row_split(sharding, (size,)) for sharding in self._row_shardings]

    def rows(self, size: int) -> NDArray[np.int64]:
        """The rows of a global batch of this size that this process loads."""
        if size not in self._rows:
            splits = [row_split(self._adapted(sharding, (size,)), (size,)) for sharding in self._row_shardings]
            self._rows[size] = union_of_rows(cut.rows for split in splits for cut in split.cuts_of(self.process))
        return self._rows[size]

    def _adapted(self, sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
        """The sharding for a batch that may be a smaller last one: what does not divide its rows is replicated."""
        if not isinstance(sharding, NamedSharding):
            return sharding
        rows = fit(PartitionSpec(*tuple(sharding.spec)[:1]), shape[:1], sharding.mesh, "adapt").spec
        return with_spec(sharding, PartitionSpec(*(tuple(rows) or (None,)), *tuple(sharding.spec)[1:]))

    def put(self, columns: Any, rows: NDArray[np.int64], size: int, host: frozenset[str]) -> Any:
        """The global batch of `size` rows of which this process holds `rows`; host leaves stay as they are."""
        paths, leaves, treedef = with_paths(columns)
        placed: list[Any] = []
        for path, leaf, sharding in zip(paths, leaves, spread(self.given, columns), strict=True):
            if sharding is None or is_host_only(leaf) or path in host:
                placed.append(leaf[: len(rows)])
            else:
                check_range(path, leaf)
                shape = (size, *leaf.shape[1:])
                placed.append(place_rows(leaf, rows, self._fitted(path, sharding, shape), shape))
        return jax.tree.unflatten(treedef, placed)

    def digests(self, columns: Any, rows: NDArray[np.int64], size: int, host: frozenset[str]) -> dict[str, Any]:
        """By leaf and row shard, a digest of what this process holds; nothing where it holds nothing."""
        paths, leaves, _ = with_paths(columns)
        found: dict[str, Any] = {}
        for path, leaf, sharding in zip(paths, leaves, spread(self.given, columns), strict=True):
            if len(rows) and sharding is not None and not is_host_only(leaf) and path not in host:
                alone = self._fitted("", cut_to_rank(sharding, 1), (size,))
                found[path] = digests(leaf, rows, row_split(alone, (size,)), self.process)
        return found

    def put_mask(self, valid: NDArray[np.bool_], rows: NDArray[np.int64], size: int) -> jax.Array:
        """The validity of every row, split as the rows are."""
        return place_rows(valid, rows, self._fitted("", self.all[0], (size,)), (size,))

    def _fitted(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
        key = (sharding, path, shape)
        if key not in self._shardings:
            cut = self._adapted(cut_to_rank(sharding, len(shape)), shape)
            if isinstance(cut, NamedSharding):
                found = fit(cut.spec, shape, cut.mesh, "adapt")
                if found.corrections:
                    raise misfit_error("a leaf of the batch does not fit its sharding", [(found, path, None)])
            self._shardings[key] = cut
        return self._shardings[key]
