"""What is known of each accelerator: memory, peak rates, links. The numbers and their sources are in `chips.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from shardax.errors import Offence, TargetError, did_you_mean
from shardax.tables import Table, show_bytes

UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "GiB": 2.0**30, "GB": 1e9, "B": 1.0}
# A kernel costs at least this long on the device, however small it is. GPU: an H200 took 2.1 µs for each of 3,000 tiny
# ones (benchmarks/truth_gpu.py). TPU: an order of magnitude, never measured; it ranks, it does not time.
LAUNCH_SECONDS = {"tpu": 1e-6, "gpu": 2e-6}
_FORMS = {
    "tpu": 'a target names the chip and its topology: "tpu:v5p:4x4x4"',
    "gpu": 'a target names the chip and how many: "gpu:h100:8"',
}


@dataclass(frozen=True)
class Chip:
    """One accelerator, *per JAX device* (a TPU 7x chip is two devices, so a device has half the chip).

    >>> v5p = chip("v5p")
    >>> v5p.device_kind, v5p.peak_flops["bf16"], show_bytes(v5p.hbm_usable)
    ('TPU v5', 459000000000000.0, '95.7 GiB')
    >>> v5p.sources["hbm_bandwidth"]
    'docs.cloud.google.com/tpu/docs/v5p'
    """

    name: str
    platform: str
    device_kind: str
    peak_flops: Mapping[str, float]  # FLOP/s by dtype
    hbm: int  # bytes on the data sheet
    hbm_usable: int  # bytes the compiler or the driver gives to programs
    hbm_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s one device can send along one mesh axis
    link_name: str
    dcn_bandwidth: float  # bytes/s one device can send to another slice or host
    launch_seconds: float
    torus: int  # dimensions of the interconnect's torus; 0: a switch
    devices_per_chip: int
    sources: Mapping[str, str]
    facts: Mapping[str, Any]  # what the compiler needs besides: names, listed slices, GPU core counts

    def table(self) -> Table:
        """Every number with its source."""
        rows = (
            ("bf16 FLOP/s", f"{self.peak_flops['bf16']:.4g}", self.sources["bf16"]),
            ("memory", show_bytes(self.hbm), self.sources["hbm"]),
            ("memory for programs", show_bytes(self.hbm_usable), self.sources["hbm_usable"]),
            ("memory bandwidth, B/s", f"{self.hbm_bandwidth:.4g}", self.sources["hbm_bandwidth"]),
            (f"{self.link_name} per axis, B/s", f"{self.link_bandwidth:.4g}", self.sources["link_bandwidth"]),
            ("network, B/s", f"{self.dcn_bandwidth:.4g}", self.sources["network_bandwidth"]),
        )
        return Table(f"{self.name} ({self.device_kind}), per JAX device", ("fact", "value", "source"), rows, ("value",))

    def __str__(self) -> str:
        return str(self.table())


@lru_cache(maxsize=1)
def chips() -> Mapping[str, Chip]:
    """Every chip that is known, by name.

    >>> sorted(chips())
    ['a100', 'b200', 'h100', 'h200', 'tpu7x', 'v4', 'v5e', 'v5p', 'v6e']
    """
    text = resources.files("shardax.proving").joinpath("chips.json").read_text(encoding="utf-8")
    return {name: _read(name, entry) for name, entry in json.loads(text)["chips"].items()}


def chip(name: str, platform: str | None = None) -> Chip:
    """The chip of that name or alias; an unknown one is an error that names the nearest.

    >>> chip("ironwood").name
    'tpu7x'
    """
    known = {key: found for key, found in chips().items() if platform in (None, found.platform)}
    spelled = {spelling: found for found in known.values() for spelling in (found.name, *found.facts["aliases"])}
    found = spelled.get(name.lower())
    if found is None:
        raise TargetError(
            f"unknown {platform or ''} chip {name!r}".replace("  ", " "),
            [Offence(name or "(nothing)", f"is not one of {', '.join(sorted(known))}{did_you_mean(name, spelled)}")],
            _FORMS.get(platform or "", ""),
        )
    return found


def _read(name: str, entry: Mapping[str, Any]) -> Chip:
    devices = entry["devices_per_chip"]

    def number(key: str, share: int = 1) -> float:
        return entry[key]["value"] * UNITS[entry[key]["unit"]] / share

    rates = {"bf16": number("bf16", devices), "f16": number("bf16", devices)}
    rates |= {name: number(key, devices) for key, name in (("fp8", "f8"), ("tf32", "tf32")) if key in entry}
    ways = 2 if entry["torus"] else 1  # a torus dimension is two links: one each way round the ring
    return Chip(
        name=name,
        platform=entry["platform"],
        device_kind=entry["device_kind"],
        peak_flops=rates,
        hbm=int(number("hbm", devices)),
        hbm_usable=int(number("hbm_usable")),
        hbm_bandwidth=number("hbm_bandwidth", devices),
        link_bandwidth=number("link_bandwidth", devices) * ways,
        link_name="ICI" if entry["torus"] else "NVLink",
        dcn_bandwidth=number("network_bandwidth", devices),
        launch_seconds=LAUNCH_SECONDS[entry["platform"]],
        torus=entry["torus"],
        devices_per_chip=devices,
        sources={key: value["source"] for key, value in entry.items() if isinstance(value, dict) and "source" in value},
        facts=entry,
    )


def gpu_target_config(found: Chip) -> str:
    """The text XLA reads a GPU from when none is present (GpuTargetConfigProto).

    Leaving out `threads_per_warp` or `block_dim_limit_x` divides by zero inside the compiler.
    """
    facts = found.facts["compiler_facts"]
    major, minor = facts["compute_capability"]
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": facts["shared_memory_per_core"],
        "threads_per_core_limit": 2048,
        "core_count": facts["core_count"],
        "fpus_per_core": 64 if major == 8 else 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(found.hbm_bandwidth),
        "l2_cache_size": facts["l2_cache_size"],
        "clock_rate_ghz": facts["clock_rate_ghz"],
        "device_memory_size": found.hbm_usable,
        "shared_memory_per_block_optin": facts["shared_memory_per_block_optin"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"  {key}: {value}" for key, value in device.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    head = ["gpu_device_info {", *lines, "}", "runtime_version { major: 13 }", 'platform_name: "CUDA"']
    return "\n".join(
        [*head, "dnn_version_info { major: 9 minor: 12 }", f'device_description_str: "{found.device_kind}"']
    )
