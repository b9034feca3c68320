"""Small things that processes tell each other over the key-value store: no collective, and only among those asked."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from shardax.cluster.kv import JobCounts, Store, job_store
from shardax.cluster.ranks import show_ranks
from shardax.errors import ClusterError, Offence, plural

TIMEOUT = 120.0
"""Seconds until a silent process is named: longer than a compile, shorter than a day in a queue."""


class Exchange:
    """Rounds in which every member tells every other one something small.

    All members must ask in the same order. What a process said is forgotten a round later: then all have read it.
    """

    def __init__(self, store: Store, folder: str, members: Sequence[int], timeout: float = TIMEOUT) -> None:
        self.store, self.folder, self.members, self.timeout = store, folder, tuple(members), timeout
        self._round = 0

    def ask(self, mine: Any, about: str) -> dict[int, Any]:
        """Every member's value (as JSON) by rank; processes that do not answer in time are named."""
        store, said = self.store, self.hear(mine)
        silent = [rank for rank in self.members if rank not in said]
        if silent:
            raise ClusterError(
                f"{plural(len(silent), 'process', 'processes')} of {len(self.members)} said nothing about {about} "
                f"in {self.timeout:g} s",
                [Offence(f"rank {rank}", "is silent") for rank in silent],
                "every process must take the same steps; look for an error or a hang on these ranks",
            )
        if self._round:
            store.remove(f"{self.folder}/{self._round - 1}/{store.rank}")
        self._round += 1
        return said

    def hear(self, mine: Any) -> dict[int, Any]:
        """What the members have said until all have, or time is up: one question to the store for all, not one each."""
        store, here = self.store, f"{self.folder}/{self._round}"
        store.put(f"{here}/{store.rank}", json.dumps(mine))
        end = time.monotonic() + self.timeout
        while missing := [rank for rank in self.members if rank not in (said := store.by_rank(here))]:
            if store.wait(f"{here}/{missing[0]}", max(0.001, end - time.monotonic())) is None:
                break
        return {rank: json.loads(word) for rank, word in said.items()}


_made = JobCounts()


def job_folder(name: str, members: Sequence[int]) -> str:
    """A folder for one more thing of this name: the same on all members, which make such things in the same order.

    What other processes make among themselves does not count: one may feed its own devices beside the job's.
    """
    store = job_store()
    made, group = _made.of(store), f"{name}/{show_ranks(members)}"
    made[group] += 1
    return f"{group}/{made[group]}"


def open_exchange(folder: str, members: Sequence[int], timeout: float = TIMEOUT) -> Exchange | None:
    """A line between these processes; None where there are no others, or this process is not one of them."""
    store = job_store()
    if store is None or len(members) < 2 or store.rank not in members:
        return None
    return Exchange(store, folder, members, timeout)
