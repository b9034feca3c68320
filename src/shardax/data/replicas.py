"""Do processes that must hold the same rows hold the same bytes?"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.data.exchange import Exchange
from shardax.data.split import RowSplit, show_rows
from shardax.errors import Offence, ReplicaError


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
