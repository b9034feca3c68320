"""`initialize`: `jax.distributed.initialize` with a meeting before it, sane time-outs, and errors that name ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax._compat import backend_initialised, distributed_client, distributed_place
from shardax.cluster import preemption
from shardax.cluster.detect import Place, find_place
from shardax.cluster.facts import Fault, ProcessFacts
from shardax.cluster.kv import job_store
from shardax.cluster.preflight import preflight as meet_before
from shardax.errors import ClusterError, Offence, PreflightError, plural
from shardax.tables import Table

COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"


@dataclass(frozen=True)
class Cluster:
    """This process's place among the processes of its job; a process alone is rank 0 of 1."""

    rank: int
    size: int
    coordinator: str | None = None

    def table(self) -> Table:
        """Every process with its host and devices (this touches the devices)."""
        devices: dict[int, list[Any]] = {rank: [] for rank in range(self.size)}
        for device in jax.devices():
            devices[device.process_index].append(device)
        store = job_store()
        who = store.by_rank("process") if store else {}
        rows: list[tuple[str, ...]] = []
        for rank, owned in devices.items():
            host, pid = (
                json.loads(who[rank]) if rank in who else (socket.gethostname() if rank == self.rank else "?", "")
            )
            kinds = " ".join(sorted({device.device_kind for device in owned}))
            rows.append((str(rank), host, str(pid), str(len(owned)), kinds))
        title = f"{plural(self.size, 'process', 'processes')}, {plural(len(jax.devices()), 'device')}"
        return Table(title, ("rank", "host", "pid", "devices", "kind"), tuple(rows), right=("rank", "pid", "devices"))


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: float = 300,
    heartbeat_timeout_seconds: int = 20,
    shutdown_timeout_seconds: int = 60,
    coordinator_bind_address: str | None = None,
    *,
    collective_timeout_seconds: int = 60,
    preflight: bool = True,
    job: str | None = None,
    show: bool = False,
) -> Cluster:
    """Join this process to its job. Call it first in the program, as often as you like; alone, it does nothing.

    Without arguments rank, size and address come from `shardax launch` or from jax's detection (SLURM, Open MPI,
    Kubernetes, Cloud TPU). Before JAX starts, all processes meet at the coordinator's address: a rank that is missing,
    there twice, out of range, from another `job`, or different in size, versions or flags is an error in every process
    that names it, within `initialization_timeout`. The other time-outs decide how soon a process that dies
    (`heartbeat_timeout_seconds`) or a CPU collective that nobody joins (`collective_timeout_seconds`) ends the rest.
    With `show`, rank 0 writes a table of processes, hosts and devices.

    >>> import shardax as sx
    >>> cluster = sx.initialize()
    >>> cluster.rank, cluster.size
    (0, 1)
    """
    seconds = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout_seconds": heartbeat_timeout_seconds,
        "shutdown_timeout_seconds": shutdown_timeout_seconds,
        "collective_timeout_seconds": collective_timeout_seconds,
    }
    _check_seconds(seconds)
    given = (coordinator_address, num_processes, process_id)
    if distributed_client() is not None:
        return _show(_already(*given), show)
    place = find_place(
        *given,
        local_device_ids,
        method=cluster_detection_method,
        timeout=initialization_timeout,
        job=job,
        bind_address=coordinator_bind_address,
    )
    if place is None:
        return _show(Cluster(0, 1), show)
    if backend_initialised():
        raise ClusterError(
            f"rank {place.rank} has touched its devices before sx.initialize()",
            remedy="call sx.initialize() first: before jax.devices(), arrays, and imports that make arrays",
        )
    facts = ProcessFacts.here(place)
    _limit_collectives(collective_timeout_seconds)
    end = time.monotonic() + initialization_timeout
    timeouts = (heartbeat_timeout_seconds, shutdown_timeout_seconds)
    if preflight:
        with meet_before(place, facts, initialization_timeout) as token:
            _connect(place, max(30.0, end - time.monotonic()), *timeouts)
        _recognise(place, token)
    else:
        _connect(place, initialization_timeout, *timeouts)
    if (store := job_store()) is not None:
        store.put(f"process/{place.rank}", json.dumps([facts.host, facts.pid]))
    return _show(Cluster(place.rank, place.size, place.coordinator), show)


def _check_seconds(given: Mapping[str, object]) -> None:
    """JAX answers a heartbeat of no seconds with an abort."""
    wrong = [
        Offence(name, f"{seconds!r} is no time to wait")
        for name, seconds in given.items()
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds < float("inf")
    ]
    if wrong:
        raise ClusterError("every wait has an end, and some time before it", wrong, "give seconds, at least 1")


def _already(address: str | None, size: int | None, rank: int | None) -> Cluster:
    """The running world, if the arguments do not speak of another one."""
    here, there, coordinator = distributed_place()
    asked = {"coordinator_address": (address, coordinator), "num_processes": (size, there), "process_id": (rank, here)}
    other = {name: pair for name, pair in asked.items() if pair[0] is not None and pair[0] != pair[1]}
    if other:
        said = ", ".join(f"{name}={wanted!r} (it is {given!r})" for name, (wanted, given) in other.items())
        raise ClusterError(f"this process has already joined a job and cannot join one with {said}")
    return Cluster(here, there, coordinator)


def _limit_collectives(seconds: int) -> None:
    """A CPU collective that a process never joins becomes an exception; XLA reads the flag with the first device."""
    flags = os.environ.get("XLA_FLAGS", "")
    if COLLECTIVE_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {COLLECTIVE_FLAG}={seconds}".strip()


def _connect(place: Place, timeout: float, heartbeat: int, shutdown: int) -> None:
    earlier = preemption.before_initialize()
    jax.distributed.initialize(
        place.coordinator,
        place.size,
        place.rank,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=shutdown,
        coordinator_bind_address=place.bind,
    )
    preemption.after_initialize(earlier)


def _recognise(place: Place, token: str) -> None:
    """Is this the coordinator of the processes met before? Two can listen on one port of a host."""
    store = job_store()
    if store is None:
        return
    if place.rank == 0:
        store.put("token", token)
    elif (found := store.wait("token", 30)) != token:
        said = "was connected to the coordinator of another job" if found else "heard nothing from its coordinator"
        fault = Fault((place.rank,), f"{said} at {place.coordinator}", "another port")
        raise PreflightError("two jobs share one address", [fault.as_offence()], ranks=[place.rank])


def _show(cluster: Cluster, show: bool) -> Cluster:
    if show:
        table = cluster.table()
        if cluster.rank == 0:
            sys.stdout.write(f"{table}\n")
            sys.stdout.flush()
    return cluster
