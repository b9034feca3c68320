"""The devices of a target without its compiler: where each stands, on which host and slice.

What libtpu lists for the same topology, device by device (a test asks it): hosts of 2×2 chips, numbered along x first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import Mesh

from shardax.names.mesh import MeshLike
from shardax.names.mesh_build import make_mesh
from shardax.proving.target import Target


@dataclass(frozen=True)
class StandIn:
    """A device that is described, not present."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0


@lru_cache(maxsize=64)
def devices_of_target(target: Target) -> tuple[StandIn, ...]:
    """Every device of a target, in the order of its compiler.

    >>> [device.coords for device in devices_of_target(Target.of("tpu:v5e:2x4"))[:3]]
    [(0, 0, 0), (1, 0, 0), (0, 1, 0)]
    """
    if target.platform == "tpu":
        return tuple(_tpu(target))
    per_host = target.shape[-1]
    kind = target.chip.device_kind if target.chip else target.platform
    return tuple(StandIn(at, target.platform, kind, at // per_host, 0) for at in range(target.devices))


def mesh_on(target: Target, mesh: MeshLike) -> Mesh:
    """The mesh that a proof for this target lays over its devices.

    >>> mesh_on(Target.of("tpu:v5e:2x4"), "fsdp=4,tp=2").devices[1, 0].coords
    (0, 1, 0)
    """
    return make_mesh(target.mesh(mesh), devices=devices_of_target(target))


def _tpu(target: Target) -> Iterator[StandIn]:
    chip = target.chip
    assert chip is not None
    wide, tall, deep = (*target.shape, 1, 1)[:3]
    one_host = math.prod(target.shape) == 1 or target.shape == (2, 4)
    host = (wide, tall) if one_host else (min(2, wide), min(2, tall))
    hosts = math.prod(target.shape) // math.prod(host)
    for part in range(target.slices):
        first = 100_000 * (part + 1) if target.slices > 1 else 0
        number = part * hosts
        for z in range(deep):
            for top in range(0, tall, host[1]):
                for left in range(0, wide, host[0]):
                    for y in range(top, top + host[1]):
                        for x in range(left, left + host[0]):
                            at = x + wide * (y + tall * z)
                            for core in range(chip.devices_per_chip):
                                name = first + at * chip.devices_per_chip + core
                                yield StandIn(name, "tpu", chip.device_kind, number, part, (x, y, z), core)
                    number += 1
