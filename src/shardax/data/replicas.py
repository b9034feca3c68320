"""Do processes that must hold the same rows hold the same bytes? Asked over the key-value store, by no collective."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.cluster.kv import Store
from shardax.data.split import RowSplit, show_rows
from shardax.errors import ClusterError, Offence, ReplicaError, plural

TIMEOUT = 120.0
"""Seconds until a silent process is named: longer than a compile, shorter than a day in a queue."""


def exchange(store: Store, folder: str, value: str, timeout: float = TIMEOUT) -> dict[int, str]:
    """Every process's value by rank. All processes must call this; those that do not in time are named."""
    store.put(f"{folder}/{store.rank}", value)
    end = time.monotonic() + timeout
    said = {rank: store.wait(f"{folder}/{rank}", max(0.001, end - time.monotonic())) for rank in range(store.size)}
    silent = [rank for rank, word in said.items() if word is None]
    if silent:
        raise ClusterError(
            f"{plural(len(silent), 'process', 'processes')} of {store.size} did not reach {folder} in {timeout:g} s",
            [Offence(f"rank {rank}", "said nothing") for rank in silent],
            "every process must take the same steps; look for an error or a hang on these ranks",
        )
    return {rank: word for rank, word in said.items() if word is not None}


def digests(local: NDArray[Any], rows: NDArray[np.int64], split: RowSplit, process: int) -> dict[str, str]:
    """A digest of every row shard that a process owns, by its row range; `local` holds `rows`, whole."""
    found: dict[str, str] = {}
    for start, stop in sorted({(cut.rows.start, cut.rows.stop) for cut in split.cuts_of(process)}):
        begin = int(np.searchsorted(rows, start))
        block = np.ascontiguousarray(local[begin : begin + stop - start])
        bytes_of = repr(block.tolist()).encode() if block.dtype.hasobject else block.tobytes()
        head = f"{block.dtype}{block.shape}".encode()
        found[show_rows(np.arange(start, stop))] = hashlib.blake2b(head + bytes_of, digest_size=8).hexdigest()
    return found


def check_replicas(store: Store, folder: str, mine: Mapping[str, Mapping[str, str]], timeout: float = TIMEOUT) -> None:
    """Raise a `ReplicaError` that names every leaf and row shard of which two processes hold different bytes."""
    said = {rank: json.loads(word) for rank, word in exchange(store, folder, json.dumps(mine), timeout).items()}
    holders: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, leaves in said.items():
        for path, blocks in leaves.items():
            for rows, digest in blocks.items():
                holders[path, rows][digest].append(rank)
    odd = [
        Offence(path, f"rows {rows} differ: {_versus(list(groups.values()))}")
        for (path, rows), groups in sorted(holders.items())
        if len(groups) > 1
    ]
    if odd:
        raise ReplicaError(
            "processes that share rows hold different bytes", odd, "the source and the transform must be deterministic"
        )


def _versus(groups: Sequence[list[int]]) -> str:
    return " vs ".join(f"process{'es' if len(ranks) > 1 else ''} {ranks}" for ranks in sorted(groups))
