"""What a process says of itself before it joins a job, and what is wrong with what all of them say together."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from shardax.cluster.detect import Place
from shardax.cluster.ranks import group_ranks, show_ranks
from shardax.errors import Offence

# Settings that change the programs which processes compile: a difference is a hang or a wrong result later.
CONFIGURATION = (
    "jax_enable_x64",
    "jax_platforms",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_use_shardy_partitioner",
    "jax_disable_jit",
    "jax_debug_nans",
)
# Flags that may differ: where a process writes, how many devices it simulates.
MAY_DIFFER = ("xla_dump", "host_platform_device_count")


@dataclass(frozen=True)
class ProcessFacts:
    """One process as it presents itself: who and where it is, and `settings` in which all must agree."""

    rank: int
    size: int
    job: str | None
    host: str
    machine: str
    address: str
    pid: int
    cpu: bool
    settings: tuple[tuple[str, str], ...]

    @staticmethod
    def here(place: Place) -> ProcessFacts:
        """This process."""
        host = socket.gethostname()
        return ProcessFacts(
            rank=place.rank,
            size=place.size,
            job=place.job,
            host=host,
            machine=f"{host} {_boot_id()}",
            address=_resolve(host),
            pid=os.getpid(),
            cpu=_setting("jax_platforms") == "cpu",
            settings=tuple(sorted(_settings().items())),
        )

    @staticmethod
    def from_json(content: dict[str, Any]) -> ProcessFacts:
        settings = tuple((str(name), str(value)) for name, value in content["settings"])
        named: dict[str, Any] = {**content, "settings": settings}
        return ProcessFacts(**named)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


@dataclass(frozen=True)
class Fault:
    """What is wrong with certain ranks."""

    ranks: tuple[int, ...]
    problem: str
    remedy: str | None = None

    def as_offence(self) -> Offence:
        return Offence(show_ranks(self.ranks), self.problem, remedy=self.remedy)


def faults(arrived: Sequence[ProcessFacts], size: int) -> list[Fault]:
    """Everything that is wrong with the processes that are here (who is missing is a matter of time, not said here)."""
    ordered = sorted(arrived, key=lambda facts: (facts.rank, facts.pid))
    return [*_twice(ordered), *_outside(ordered, size), *_different(ordered), *_unreachable(ordered)]


def _twice(arrived: Sequence[ProcessFacts]) -> Iterable[Fault]:
    by_rank: dict[int, list[ProcessFacts]] = {}
    for facts in arrived:
        by_rank.setdefault(facts.rank, []).append(facts)
    for rank, same in by_rank.items():
        if len(same) > 1:
            word = {2: "two", 3: "three"}.get(len(same), str(len(same)))
            names = " and ".join(str(facts) for facts in same)
            yield Fault((rank,), f"{word} processes say they are rank {rank}: {names}")


def _outside(arrived: Sequence[ProcessFacts], size: int) -> Iterable[Fault]:
    for facts in arrived:
        if not 0 <= facts.rank < size:
            yield Fault((facts.rank,), f"is outside 0..{size - 1} ({facts})")


def _different(arrived: Sequence[ProcessFacts]) -> Iterable[Fault]:
    said = {facts.rank: {"num_processes": str(facts.size), **dict(facts.settings)} for facts in arrived}
    for name in sorted({name for settings in said.values() for name in settings}):
        (usual, many), *others = group_ranks({rank: settings.get(name, "not set") for rank, settings in said.items()})
        for value, ranks in others:
            yield Fault(tuple(ranks), f"{name} is {value}, but {usual} on {show_ranks(many)}")


def _unreachable(arrived: Sequence[ProcessFacts]) -> Iterable[Fault]:
    """CPU collectives (gloo) listen where a process's own host name leads: nowhere, or to itself, is useless."""
    several = len({facts.machine for facts in arrived}) > 1
    remedy = "a line '<its address on the network> <its host name>' in its /etc/hosts"
    for facts in arrived:
        if facts.cpu and not facts.address and len(arrived) > 1:
            yield Fault((facts.rank,), f"its host name {facts.host!r} does not resolve", remedy)
        elif facts.cpu and several and facts.address.startswith(("127.", "::1")):
            problem = f"its host name {facts.host!r} resolves to {facts.address}, where other hosts cannot reach it"
            yield Fault((facts.rank,), problem, remedy)


def _settings() -> dict[str, str]:
    versions = {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "shardax": version("shardax"),
    }
    flags: dict[str, str] = {}
    for flag in f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split():
        name, _, value = flag.partition("=")
        if not any(part in name for part in MAY_DIFFER):
            flags[name] = value or "true"
    seed = {"PYTHONHASHSEED": os.environ["PYTHONHASHSEED"]} if "PYTHONHASHSEED" in os.environ else {}
    return {**versions, **flags, **seed, **{name: _setting(name) for name in CONFIGURATION}}


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _setting(name: str) -> str:
    return str(getattr(jax.config, name, "unknown to this jax"))
