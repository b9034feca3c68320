"""The nine meshes on which feeding by `process_index` was found right, refused, or silently wrong: 4 processes × 2 devices."""

from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

BATCH = 16


@dataclass(frozen=True)
class Case:
    """Mesh order as numbers of devices (2 per process), axes, spec, rows that each process must load."""

    shape: dict
    spec: P
    rows: tuple[int, int, int, int]
    order: tuple[int, ...] = tuple(range(8))
    naive: bool = False
    """Is the split by process_index right here?"""

    def mesh(self, devices):
        return Mesh(np.array(devices)[list(self.order)].reshape(tuple(self.shape.values())), tuple(self.shape))

    def owners(self):
        return [place // 2 for place in self.order]


CASES = {
    "A data over all": Case({"data": 8}, P("data"), (4, 4, 4, 4), naive=True),
    "D model inside a host": Case({"data": 4, "model": 2}, P("data"), (4, 4, 4, 4), naive=True),
    "C model over hosts": Case({"data": 2, "model": 4}, P("data"), (8, 8, 8, 8)),
    "E model major": Case({"model": 4, "data": 2}, P("data"), (16, 16, 16, 16)),
    "H replicated": Case({"data": 8}, P(), (16, 16, 16, 16)),
    "F sequence over hosts": Case({"data": 2, "seq": 4}, P("data", "seq"), (8, 8, 8, 8)),
    "B interleaved": Case({"data": 8}, P("data"), (4, 4, 4, 4), order=(0, 2, 4, 6, 1, 3, 5, 7)),
    "I reversed": Case({"data": 8}, P("data"), (4, 4, 4, 4), order=(7, 6, 5, 4, 3, 2, 1, 0)),
    "G hosts without batch devices": Case({"data": 4}, P("data"), (8, 8, 0, 0), order=(0, 1, 2, 3)),
}

UNEVEN = (2, 2, 1, 2)
"""Devices per process of the mesh with uneven hosts; its rows for 14 in a batch."""
UNEVEN_BATCH = 14
UNEVEN_ROWS = (4, 4, 2, 4)


class StandIn:
    """A device that only knows its process: enough for the pure layer."""

    def __init__(self, number: int, process: int) -> None:
        self.id, self.process_index, self.platform = number, process, "cpu"


def stand_ins(per_process=(2, 2, 2, 2)):
    owners = [process for process, count in enumerate(per_process) for _ in range(count)]
    return [StandIn(number, process) for number, process in enumerate(owners)]
