"""Do processes that must hold the same rows hold the same bytes? Asked over the key-value store, by no collective."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.cluster.kv import Store, job_store
from shardax.data.split import RowSplit, show_rows
from shardax.errors import ClusterError, Offence, ReplicaError, plural

TIMEOUT = 120.0
"""Seconds until a silent process is named: longer than a compile, shorter than a day in a queue."""


class Exchange:
    """Rounds in which every process tells every other one something small.

    All processes must ask in the same order. What a process said is forgotten a round later: then all have read it.
    """

    def __init__(self, store: Store, folder: str, timeout: float = TIMEOUT) -> None:
        self.store, self.folder, self.timeout, self._round = store, folder, timeout, 0

    def ask(self, mine: Any, about: str) -> dict[int, Any]:
        """Every process's value (as JSON) by rank; processes that do not answer in time are named."""
        store, here = self.store, f"{self.folder}/{self._round}"
        store.put(f"{here}/{store.rank}", json.dumps(mine))
        end = time.monotonic() + self.timeout
        said = {rank: store.wait(f"{here}/{rank}", max(0.001, end - time.monotonic())) for rank in range(store.size)}
        silent = [rank for rank, word in said.items() if word is None]
        if silent:
            raise ClusterError(
                f"{plural(len(silent), 'process', 'processes')} of {store.size} said nothing about {about} "
                f"in {self.timeout:g} s",
                [Offence(f"rank {rank}", "is silent") for rank in silent],
                "every process must take the same steps; look for an error or a hang on these ranks",
            )
        if self._round:
            store.remove(f"{self.folder}/{self._round - 1}/{store.rank}")
        self._round += 1
        return {rank: json.loads(word) for rank, word in said.items() if word is not None}


class _Numbers:
    """Counts per name what all processes of a job do in the same order; a new job counts from zero."""

    def __init__(self) -> None:
        self._client: Any = None
        self._counts: Counter[str] = Counter()

    def next(self, client: Any, name: str) -> int:
        if client is not self._client:
            self._client, self._counts = client, Counter()
        self._counts[name] += 1
        return self._counts[name]


_numbers = _Numbers()


def job_folder(name: str) -> str:
    """A folder for one more thing of this name: the same on all processes that make such things in the same order."""
    store = job_store()
    return f"{name}/{_numbers.next(None if store is None else store.client, name)}"


def open_exchange(folder: str) -> Exchange | None:
    """A line to the other processes of the job; None where there are none."""
    store = job_store()
    return None if store is None else Exchange(store, folder)


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


def check_replicas(exchange: Exchange, mine: Mapping[str, Mapping[str, str]], about: str) -> None:
    """Raise a `ReplicaError` that names every leaf and row shard of which two processes hold different bytes."""
    said: dict[int, dict[str, dict[str, str]]] = exchange.ask(mine, about)
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
            f"processes that share rows hold different bytes in {about}",
            odd,
            "the source and the transform must be deterministic",
        )


def _versus(groups: Sequence[list[int]]) -> str:
    return " vs ".join(f"process{'es' if len(ranks) > 1 else ''} {ranks}" for ranks in sorted(groups))
