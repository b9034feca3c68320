"""`barrier`: wait for all processes, and know who is absent."""

from __future__ import annotations

from shardax.cluster.kv import JobCounts, Store, job_store
from shardax.cluster.ranks import show_ranks
from shardax.errors import BarrierError, ClusterError, Offence

_arrivals = JobCounts()  # how often this process has come to each barrier
_failures = JobCounts()  # how often it failed: the service does not take a failed one up again


def barrier(name: str, timeout: float = 60.0) -> None:
    """Wait until every process has come to the barrier of this name; `BarrierError` lists who has not in time.

    It is no collective: it works with uneven devices, before any device is touched, and in a process alone.

    >>> barrier("epoch 1")
    """
    check_wait(name, timeout)
    store = job_store()
    if store is None:
        return
    arrivals, failures = _arrivals.of(store), _failures.of(store)
    arrivals[name] += 1
    mine = arrivals[name]
    store.put(f"barrier/{name}/{store.rank}", str(mine))
    store.put(f"last barrier/{store.rank}", name)
    if (said := store.meet(f"barrier/{name}/{failures[name]}", timeout)) is not None:
        failures[name] += 1
        raise _absence(store, name, mine, timeout, said)


def check_wait(name: object, timeout: object) -> None:
    """What all wait for has a name, and the wait an end."""
    if not isinstance(name, str) or not name:
        raise ClusterError(f"a barrier is named by a text, not {name!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < LONGEST:
        raise ClusterError(
            f"timeout={timeout!r} is no time to wait", remedy="seconds, more than none and less than a month"
        )


LONGEST = 30 * 86400.0


def _absence(store: Store, name: str, mine: int, timeout: float, said: str) -> BarrierError:
    came = {rank for rank, count in store.by_rank(f"barrier/{name}").items() if int(count) >= mine}
    absent = sorted(set(range(store.size)) - came)
    headline = f"barrier {name!r} was not reached by all {store.size} processes within {timeout:g} s"
    if not absent:
        problem = "came too late: the others had given up" if "DEADLINE_EXCEEDED" in said else said.splitlines()[0]
        return BarrierError(headline, [Offence(f"rank {store.rank}", problem)], ranks=[store.rank])
    last = store.by_rank("last barrier")
    offences = [Offence(f"rank {rank}", f"is absent; {_last(last.get(rank), name)}") for rank in absent]
    return BarrierError(headline, offences, f"here: {show_ranks(came)}", absent)


def _last(seen: str | None, name: str) -> str:
    if seen is None:
        return "it has not been at any barrier"
    return f"it was last at barrier {seen!r}" + (" (an earlier time)" if seen == name else "")
