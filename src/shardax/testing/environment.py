"""The environment of a test process: CPU devices of its own, the same hashes everywhere, collectives that give up."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardax.errors import ProcessesError

COLLECTIVE_SECONDS = 30


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a child process gets: the parent's variables, without the parent's simulated devices.

    >>> child_environment({"WHO": "me"})["WHO"]
    'me'
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    if not any("collective_timeout" in flag for flag in flags):
        flags.append(f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_SECONDS}")
    ours = {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDAX_", "PYTEST_"))}
    return {**inherited, **ours, **(extra or {})}


def per_rank(devices: int | tuple[int, ...] | list[int], processes: int) -> tuple[int, ...]:
    """How many devices each process has.

    >>> per_rank(2, 3), per_rank((2, 2, 1), 3)
    ((2, 2, 2), (2, 2, 1))
    """
    if not _is_count(processes):
        raise ProcessesError(f"processes={processes!r} is no number of processes", remedy="at least 1")
    counts = (devices,) * processes if isinstance(devices, int) else tuple(devices)
    if len(counts) != processes:
        raise ProcessesError(f"devices={devices!r} names {len(counts)} processes, there are {processes}")
    if not all(map(_is_count, counts)):
        raise ProcessesError(f"devices={devices!r} is no number of devices", remedy="at least 1 in each process")
    return counts


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
