"""The key-value store and the barriers of the coordination service, under names of our own.

They work before any device exists and with uneven devices, unlike a collective; a call takes a fraction of a
millisecond.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jax.errors import JaxRuntimeError

from shardax._compat import distributed_client, distributed_place

PREFIX = "shardax/"


@dataclass(frozen=True, eq=False)
class Store:
    """What the processes of one job share. Keys are strings with `/`, values are strings."""

    client: Any
    rank: int
    size: int

    def put(self, key: str, value: str) -> None:
        """Set a key, whatever it held."""
        self.client.key_value_set(PREFIX + key, value, allow_overwrite=True)

    def put_first(self, key: str, value: str) -> bool:
        """Set a key unless another process was first; whether this one was."""
        try:
            self.client.key_value_set(PREFIX + key, value, allow_overwrite=False)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def look(self, key: str) -> str | None:
        """The value of a key now."""
        try:
            return str(self.client.key_value_try_get(PREFIX + key))
        except JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def wait(self, key: str, timeout: float) -> str | None:
        """The value of a key as soon as it has one; None when time is up."""
        try:
            return str(self.client.blocking_key_value_get(PREFIX + key, max(1, int(timeout * 1000))))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def remove(self, key: str) -> None:
        """Forget a key; exchanges that go on for days must not fill the coordinator."""
        self.client.key_value_delete(PREFIX + key)

    def under(self, folder: str) -> dict[str, str]:
        """Every key below a folder, without the folder's name."""
        full = f"{PREFIX}{folder}/"
        return {key.removeprefix(full): value for key, value in self.client.key_value_dir_get(full)}

    def by_rank(self, folder: str) -> dict[int, str]:
        """What each process has put under its own rank in a folder."""
        return {int(key): value for key, value in self.under(folder).items()}

    def meet(self, name: str, timeout: float) -> str | None:
        """Wait until every process calls this; None when all came, else what the service says."""
        try:
            self.client.wait_at_barrier(PREFIX + name, max(1, int(timeout * 1000)))
        except JaxRuntimeError as error:
            return str(error)
        return None


@dataclass(eq=False)
class JobCounts:
    """Counts by name of what all processes of a job do in the same order; in another job they begin at zero."""

    _client: Any = None
    _counts: Counter[str] = field(default_factory=Counter)

    def of(self, store: Store | None) -> Counter[str]:
        """The counts in this job."""
        client = None if store is None else store.client
        if client is not self._client:
            self._client, self._counts = client, Counter()
        return self._counts


def job_store() -> Store | None:
    """The store of this job, or None in a process that stands alone."""
    client = distributed_client()
    rank, size, _ = distributed_place()
    return Store(client, rank, size) if client is not None and size > 1 else None
