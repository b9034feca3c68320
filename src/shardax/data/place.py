"""`place_batch`: a batch of mixed leaves under shardings, in one process or in many."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardax.arrays.constrain import constrain
from shardax.data.assemble import check_range, place_rows, split_of_local
from shardax.data.columns import is_host_only, is_spread, with_paths
from shardax.data.exchange import job_folder, open_exchange
from shardax.data.replicas import check_replicas, digests
from shardax.data.shardings import cut_to_rank, read_shardings, spread
from shardax.errors import Offence, SharderError, SplitError
from shardax.names.spec import fit, misfit_error


def place_batch(batch: Any, sharding: Any, whole_rows: bool | None) -> Any:
    """Every leaf under its sharding; `sharding` is one for all, or a tree that is a prefix of the batch."""
    paths, placed, treedef = with_paths(batch)
    asked = spread(read_shardings(sharding), batch)
    wholly: list[int] = []
    in_parts: list[int] = []
    for place, (leaf, wanted) in enumerate(zip(placed, asked, strict=True)):
        if is_host_only(leaf) or wanted is None:
            continue
        asked[place] = cut_to_rank(wanted, np.ndim(leaf))
        whole = isinstance(leaf, Tracer) or is_spread(leaf)
        at_once = whole or wanted.is_fully_addressable or np.ndim(leaf) == 0
        (wholly if at_once else in_parts).append(place)
    if wholly:
        _check_fit([(paths[p], placed[p], asked[p]) for p in wholly])
        for place, array in zip(wholly, _moved([(placed[p], asked[p]) for p in wholly]), strict=True):
            placed[place] = array
    if in_parts:
        _check_told({paths[p]: (placed[p], asked[p]) for p in in_parts}, whole_rows)
        shared = _Shared()
        for place in in_parts:
            placed[place] = _from_local_rows(paths[place], placed[place], asked[place], whole_rows, shared)
        shared.check()
    return jax.tree.unflatten(treedef, placed)


def _moved(leaves: list[tuple[Any, Any]]) -> list[Any]:
    """Whole arrays under their shardings: one transfer, or one constraint each where a trace is active."""
    if any(isinstance(leaf, Tracer) for leaf, _ in leaves):
        return [constrain(leaf, wanted) for leaf, wanted in leaves]
    return jax.device_put([leaf for leaf, _ in leaves], [wanted for _, wanted in leaves])


def _check_fit(leaves: list[tuple[str, Any, Any]]) -> None:
    """Every leaf that its sharding does not divide, in one error."""
    fits = [
        (fit(wanted.spec, np.shape(leaf), wanted.mesh, "adapt"), path, None)
        for path, leaf, wanted in leaves
        if isinstance(wanted, NamedSharding)
    ]
    if any(found.corrections for found, _, _ in fits):
        raise misfit_error("the batch does not fit its sharding", fits)


def _check_told(leaves: dict[str, tuple[Any, Any]], whole_rows: bool | None) -> None:
    """Rows that are cut in other dimensions too: do the leaves hold them whole, or in blocks? We must be told."""
    kinds = [
        Offence(path, f"a {type(sharding).__name__} over several processes does not name the axes of its rows")
        for path, (_, sharding) in leaves.items()
        if not isinstance(sharding, NamedSharding)
    ]
    if kinds:
        raise SharderError("cannot tell which rows are whose", kinds, "give a NamedSharding")
    if whole_rows is not None:
        return
    cut = [
        Offence(path, f"dims {dims} are cut over processes", shape=np.shape(leaf), spec=sharding.spec)
        for path, (leaf, sharding) in leaves.items()
        if (dims := split_of_local(sharding, np.shape(leaf), jax.process_index()).cut_dims)
    ]
    if cut:
        raise SplitError(
            "this sharding cuts more than rows over processes: is a row here whole, or this process's block of it?",
            cut,
            "say whole_rows=True (each process holds whole rows) or whole_rows=False (only its own block)",
        )


@dataclass
class _Shared:
    """Digests of the rows that several processes own, by leaf, and the processes that they are spread over."""

    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)

    def check(self) -> None:
        """They must have handed in the same rows; jax would take any without a word."""
        if not self.digests:
            return
        members = sorted(self.members)
        folder = job_folder("shard", members)
        if (exchange := open_exchange(folder, members)) is not None:
            check_replicas(exchange, self.digests, "this batch")


def _from_local_rows(
    path: str, leaf: Any, sharding: NamedSharding, whole_rows: bool | None, shared: _Shared
) -> jax.Array:
    local = np.asarray(leaf)
    if whole_rows is False:
        return jax.make_array_from_process_local_data(sharding, local)
    check_range(path, local)
    split = split_of_local(sharding, local.shape, jax.process_index())
    rows = split.rows(jax.process_index())
    if any(len(owners) > 1 for owners in split.owners.values()):
        shared.digests[path] = digests(local, rows, split, jax.process_index())
        shared.members.update(split.processes)
    return place_rows(local, rows, sharding, split.shape)
