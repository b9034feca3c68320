"""Which rank this process is, of how many, and where rank 0 is: from arguments, our launcher, or jax's detection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardax._compat import cluster_methods, detect_cluster
from shardax.errors import ClusterError, Offence, did_you_mean

COORDINATOR, PROCESSES, RANK, JOB = "SHARDAX_COORDINATOR", "SHARDAX_PROCESSES", "SHARDAX_RANK", "SHARDAX_JOB"

# Launchers that jax does not detect: their variables for size and rank.
UNDETECTED = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "an MPI launcher (PMI)": ("PMI_SIZE", "PMI_RANK"),
    "submitit": ("SUBMITIT_LOCAL_WORLD_SIZE", "SUBMITIT_LOCAL_GLOBALRANK"),
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID"),
}


@dataclass(frozen=True)
class Place:
    """One process of a job. `job` is a token that is the same in all processes of the job and in no other."""

    coordinator: str
    size: int
    rank: int
    local_device_ids: tuple[int, ...] | None = None
    job: str | None = None
    bind_address: str | None = None

    def __post_init__(self) -> None:
        host, _, port = str(self.coordinator).rpartition(":")
        if not isinstance(self.coordinator, str) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ClusterError(f"coordinator_address is {self.coordinator!r}", remedy="write it as 'host:port'")
        for name, number in (("num_processes", self.size), ("process_id", self.rank)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ClusterError(f"{name} is {number!r}", remedy="give a whole number")
        if self.size < 1:
            raise ClusterError(f"num_processes is {self.size}; a job has at least 1 process")
        if not 0 <= self.rank < self.size:
            where = f"process_id is {self.rank}, outside 0..{self.size - 1} (num_processes is {self.size})"
            raise ClusterError(f"rank {self.rank} cannot be", [Offence(f"rank {self.rank}", where)])

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def bind_host(self) -> str:
        """Where rank 0 listens: everywhere (an empty name), but on this host alone if it is reached as such."""
        if self.bind_address is not None:
            return self.bind_address.rpartition(":")[0].strip("[]")
        return "" if not self.local else "::1" if self.host == "::1" else "127.0.0.1"

    @property
    def bind(self) -> str:
        host = self.bind_host or "::"
        return self.bind_address or f"{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def local(self) -> bool:
        """Is the coordinator reachable from this host only?"""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def find_place(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    method: str | None = None,
    timeout: float = 300,
    job: str | None = None,
    bind_address: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Place | None:
    """The place of this process; None when nothing at all says that it is one of several.

    >>> find_place("10.0.0.1:1234", 4, 2, job="a")
    Place(coordinator='10.0.0.1:1234', size=4, rank=2, local_device_ids=None, job='a', bind_address=None)
    """
    _check_method(method)
    env = os.environ if environment is None else environment
    given = (coordinator_address, num_processes, process_id)
    ids = (local_device_ids,) if isinstance(local_device_ids, int) else local_device_ids
    if RANK in env and given == (None, None, None):
        try:
            given = (env[COORDINATOR], int(env[PROCESSES]), int(env[RANK]))
        except (KeyError, ValueError) as error:
            raise ClusterError(f"{COORDINATOR}, {PROCESSES} and {RANK} belong together", remedy=str(error)) from None
    address = given[0] or env.get("JAX_COORDINATOR_ADDRESS")
    found = (address, given[1], given[2], ids)
    if method != "deactivate" and None in found:
        found = detect_cluster(*found, method, int(timeout))
    address, size, rank, ids = found
    if address is None or size is None or rank is None:
        _explain_incomplete(address, size, rank, env, method)
        return None
    bind = bind_address or env.get("JAX_COORDINATOR_BIND_ADDRESS")
    return Place(address, size, rank, None if ids is None else tuple(ids), job or _job_token(env), bind)


def _check_method(method: str | None) -> None:
    """A cluster that is asked for must be there: otherwise every process of the job would go on alone."""
    if method is None or method == "deactivate":
        return
    known = cluster_methods()
    if method not in known:
        named = ", ".join(map(repr, ("deactivate", *known)))
        raise ClusterError(
            f"jax knows no cluster_detection_method {method!r}{did_you_mean(method, known)}",
            remedy=f"it is one of {named}, or None to look for any",
        )
    if not known[method]():
        raise ClusterError(
            f"cluster_detection_method={method!r}, and this process is not in one",
            remedy="start it as one (srun, mpirun), give address, size and rank, or take the argument away",
        )


def _job_token(env: Mapping[str, str]) -> str | None:
    """What distinguishes this job from another on the same hosts, if the launcher says it."""
    if JOB in env:
        return env[JOB]
    if "SLURM_JOB_ID" in env:
        return f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_NAMESPACE"):
        if name in env:
            return f"{name} {env[name]}"
    return None


def _explain_incomplete(
    address: str | None, size: int | None, rank: int | None, env: Mapping[str, str], method: str | None
) -> None:
    """Raise if something says that there are several processes; silence would make each of them a job of its own."""
    launcher = next(
        (
            (name, size_name, rank_name)
            for name, (size_name, rank_name) in UNDETECTED.items()
            if rank_name in env and env.get(size_name, "1") not in ("", "1")
        ),
        None,
    )
    said = {"coordinator_address": address, "num_processes": size, "process_id": rank}
    if (launcher is None or method == "deactivate") and set(said.values()) == {None}:
        return
    missing = [Offence(name, "is not given and was not detected") for name, value in said.items() if value is None]
    remedy = "give all three, or start with srun, mpirun (Open MPI), or shardax launch"
    if launcher:
        name, size_name, rank_name = launcher
        remedy = (
            f"{name} says {env[size_name]} tasks, but began no step: start it with srun"
            if name == "SLURM"
            else f"this looks like {name}, which jax does not detect: sx.initialize('<host of rank 0>:<port>', "
            f"int(os.environ[{size_name!r}]), int(os.environ[{rank_name!r}]))"
        )
        remedy += "; if it is to run alone, sx.initialize(cluster_detection_method='deactivate')"
    raise ClusterError("this process does not know its place in the job", missing, remedy)
