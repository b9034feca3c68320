"""Which rows of a global batch each process must load: they follow from the mesh, never from `process_index` alone.

Pure: a sharding, a shape and a map from devices to processes go in, row numbers come out. No device is touched, and
the devices may be stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import ArrayLike, NDArray

from shardax.errors import BatchSizeError, Offence, SplitError, plural
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.names.spec import SpecLike, as_spec, axes_of, entries_of, fit
from shardax.tables import Table

Index: TypeAlias = tuple[slice, ...]
Processes: TypeAlias = "ArrayLike | Mapping[Any, int] | Callable[[Any], int]"
ShardingLike: TypeAlias = "Sharding | tuple[MeshLike, SpecLike]"


def process_bounds(total: int, index: int, count: int, drop_remainder: bool = True) -> tuple[int, int]:
    """The contiguous rows of process `index` of `count`, where rows follow from nothing but the process.

    >>> [process_bounds(10, i, 4) for i in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 8)]
    >>> [process_bounds(10, i, 4, drop_remainder=False) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    each, rest = divmod(total, count)
    if drop_remainder:
        return index * each, (index + 1) * each
    start = index * each + min(index, rest)
    return start, start + each + (index < rest)


@dataclass(frozen=True, eq=False)
class Cut:
    """One device's block of a global array: its process, and the slice of every dimension."""

    device: Any
    process: int
    index: Index

    @property
    def rows(self) -> slice:
        return self.index[0] if self.index else slice(0, 0)


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Every device's block of one global array of `shape`, and so the rows that every process must load.

    >>> split = row_split(("dp=2,tp=4", PartitionSpec("dp")), (8, 3), processes=[0, 0, 1, 1, 2, 2, 3, 3])
    >>> split.rows(1).tolist(), split.rows(3).tolist()
    ([0, 1, 2, 3], [4, 5, 6, 7])
    >>> split.shared
    ((0, 1), (2, 3))
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that own a device of this array."""
        return tuple(sorted({cut.process for cut in self.cuts}))

    def cuts_of(self, process: int) -> tuple[Cut, ...]:
        """The blocks of one process's devices."""
        return tuple(cut for cut in self.cuts if cut.process == process)

    def rows(self, process: int) -> NDArray[np.int64]:
        """The rows that a process must load, in order and each once; none where it owns no device of the array."""
        return union_of_rows(cut.rows for cut in self.cuts_of(process))

    @cached_property
    def shards(self) -> int:
        """Into how many different pieces the rows are cut."""
        return len(self.owners)

    @cached_property
    def owners(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The processes that own each piece of the rows, by where it starts and stops."""
        found: dict[tuple[int, int], set[int]] = {}
        for cut in self.cuts:
            found.setdefault((cut.rows.start, cut.rows.stop), set()).add(cut.process)
        return {piece: tuple(sorted(found[piece])) for piece in sorted(found)}

    @cached_property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """Groups of processes that must load the very same rows."""
        groups: dict[bytes, list[int]] = {}
        for process in self.processes:
            groups.setdefault(self.rows(process).tobytes(), []).append(process)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """Dimensions after the rows of which some process owns only a part: whole rows must be cut where they land."""
        found: set[int] = set()
        for process in self.processes:
            cuts = self.cuts_of(process)
            for dim in range(1, len(self.shape)):
                held = union_of_rows(cut.index[dim] for cut in cuts)
                if len(held) < self.shape[dim]:
                    found.add(dim)
        return tuple(sorted(found))

    def follows_process_index(self, count: int) -> bool:
        """Would "process p of `count` takes the p-th part" have been right here?"""
        naive = (np.arange(*process_bounds(self.shape[0], p, count, drop_remainder=False)) for p in range(count))
        return all(np.array_equal(self.rows(p), rows) for p, rows in enumerate(naive))

    def table(self) -> Table:
        """Process → rows, for people."""
        rows = tuple(
            (str(process), str(len(self.rows(process))), show_rows(self.rows(process))) for process in self.processes
        )
        return Table(f"rows of a global batch {self.shape}", ("process", "loads", "rows"), rows, right=("loads",))

    def __str__(self) -> str:
        return str(self.table())


def union_of_rows(slices: Iterator[slice]) -> NDArray[np.int64]:
    """The numbers in any of the slices, sorted."""
    spans = sorted({(piece.start, piece.stop) for piece in slices})
    if not spans:
        return np.zeros(0, np.int64)
    return np.unique(np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans]))


def show_rows(rows: NDArray[np.int64]) -> str:
    """Row numbers as ranges.

    >>> show_rows(np.array([0, 1, 2, 6, 7, 9]))
    '0–2, 6–7, 9'
    """
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) or "none"


def row_split(sharding: ShardingLike, shape: Sequence[int], processes: Processes | None = None) -> RowSplit:
    """Split a global batch of `shape`, rows first, as a sharding does.

    `sharding` is a jax sharding, or `(mesh, spec)` where the mesh may be text such as "dp=2,tp=4". `processes` says
    which process owns which device: in mesh order, by device, or as a function; without it every device is asked for
    its `process_index`.

    >>> split = row_split(("dp=2,tp=4", ["dp"]), (32, 128), processes=[0, 0, 1, 1, 2, 2, 3, 3])
    >>> [(int(split.rows(process)[0]), len(split.rows(process))) for process in split.processes]  # the first, how many
    [(0, 16), (0, 16), (16, 16), (16, 16)]
    """
    size = tuple(int(n) for n in shape)
    if not size or min(size) < 0 or size[0] < 1:
        raise BatchSizeError(f"a global batch has rows first and no negative size, not shape {size}")
    if isinstance(sharding, Sharding) and not isinstance(sharding, NamedSharding):
        indices = cast("Mapping[Any, Index]", sharding.devices_indices_map(size))
        owner = _owner(processes, list(indices))
        return RowSplit(size, tuple(Cut(d, owner(d), _closed(index, size)) for d, index in indices.items()))
    mesh, spec = (sharding.mesh, sharding.spec) if isinstance(sharding, NamedSharding) else sharding
    check_batch_divides(mesh, as_spec(spec), size[0])
    devices = _devices(mesh)
    owner = _owner(processes, devices)
    return RowSplit(
        size, tuple(Cut(d, owner(d), index) for d, index in zip(devices, _blocks(mesh, spec, size), strict=True))
    )


def check_batch_divides(mesh: MeshLike, spec: PartitionSpec, batch: int) -> None:
    """The global batch must divide over its shards; the error names the axes and the batches that would."""
    sizes = MeshSpec.of(mesh).shape
    axes = axes_of(next(entries_of(spec, 1)))
    ways = math.prod(sizes.get(axis, 1) for axis in axes)
    if batch % ways:
        named = " × ".join(f"{axis}={sizes.get(axis, 1)}" for axis in axes)
        below = batch // ways * ways
        options = [str(size) for size in (below, below + ways) if size]
        raise BatchSizeError(
            f"a global batch of {batch} does not divide over {plural(ways, 'shard')} ({named})",
            [Offence("rows", f"{batch} = {batch // ways} × {ways} + {batch % ways}", spec=spec)],
            f"would work: a global batch of {' or '.join(options)}, or fewer axes on the rows",
        )


def _blocks(mesh: MeshLike, spec: SpecLike, shape: tuple[int, ...]) -> Iterator[Index]:
    """Every device's block, in mesh order: the leading axis of a composite entry is the major one."""
    sizes = MeshSpec.of(mesh).shape
    given = tuple(entries_of(fit(spec, shape, mesh).spec, len(shape)))
    for place in np.ndindex(*sizes.values()):
        at = dict(zip(sizes, place, strict=True))
        index: list[slice] = []
        for size, entry in zip(shape, given, strict=True):
            part, parts = 0, 1
            for axis in axes_of(entry):
                part, parts = part * sizes[axis] + at[axis], parts * sizes[axis]
            index.append(slice(part * (size // parts), (part + 1) * (size // parts)))
        yield tuple(index)


def _devices(mesh: MeshLike) -> list[Any]:
    if isinstance(mesh, Mesh):
        return list(mesh.devices.flat)
    return list(range(mesh.size if isinstance(mesh, AbstractMesh) else MeshSpec.of(mesh).size))


def _owner(processes: Processes | None, devices: list[Any]) -> Callable[[Any], int]:
    if callable(processes):
        return processes
    if processes is None:
        if any(not hasattr(device, "process_index") for device in devices):
            raise SplitError(
                "a mesh without devices does not say which process owns what",
                remedy="pass processes=[…], one process per device in mesh order",
            )
        return lambda device: int(device.process_index)
    if isinstance(processes, Mapping):
        owned: Mapping[Any, int] = processes
    else:
        flat = np.asarray(processes).ravel()
        if len(flat) != len(devices):
            raise SplitError(
                f"processes names {plural(len(flat), 'owner')} for {plural(len(devices), 'device')} of the mesh"
            )
        owned = dict(zip(devices, flat.tolist(), strict=True))
    return lambda device: int(owned[device])


def _closed(index: Index, shape: tuple[int, ...]) -> Index:
    """The slices of jax's index map with their ends written out."""
    return tuple(slice(*piece.indices(size)[:2]) for piece, size in zip(index, shape, strict=True))
