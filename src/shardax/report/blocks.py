"""Which device holds which block of an array: the pure value behind every drawing of a sharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from shardax.errors import LeafError, SpecError, plural
from shardax.names.mesh import AnyMesh
from shardax.names.spec import SpecLike, as_spec, axes_of, entries_of, fit


@dataclass(frozen=True)
class Blocks:
    """An array cut into blocks: how many along each dimension, and the devices that hold each block.

    >>> import jax, shardax as sx
    >>> blocks_of(NamedSharding(sx.make_mesh("dp=2,tp=4"), jax.P("dp")), (4, 6)).holders
    {(0, 0): (0, 1, 2, 3), (1, 0): (4, 5, 6, 7)}
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    holders: dict[tuple[int, ...], tuple[int, ...]]
    axes: tuple[str, ...]  # the mesh axes of each dimension, as text
    title: str

    def bounds(self, place: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """First and last-but-one element of a block along each dimension."""
        return tuple(
            (at * -(-size // count), min((at + 1) * -(-size // count), size))
            for at, size, count in zip(place, self.shape, self.counts, strict=True)
        )


def blocks_of(value: Any, shape: Sequence[int] | None = None) -> Blocks:
    """The blocks of an array, an abstract array with a sharding, or a sharding (with the shape it is for)."""
    sharding = value if isinstance(value, Sharding) else getattr(value, "sharding", None)
    if not isinstance(sharding, Sharding):
        raise LeafError(
            f"nothing to draw: {type(value).__name__} has no sharding",
            remedy="give a jax.Array, a ShapeDtypeStruct with a sharding, a sharding, or a mesh",
        )
    known = tuple(value.shape) if shape is None and not isinstance(value, Sharding) else shape
    if isinstance(sharding, NamedSharding):
        return blocks_of_spec(sharding.spec, sharding.mesh, None if known is None else tuple(known))
    if known is None:
        raise SpecError(
            f"drawing a {type(sharding).__name__} needs the shape of its array", remedy="draw(sharding, shape)"
        )
    return _mapped_blocks(sharding, tuple(known))


def blocks_of_spec(spec: SpecLike, mesh: AnyMesh, shape: tuple[int, ...] | None) -> Blocks:
    """The blocks that a spec cuts a shape into; without a shape, as many elements as blocks."""
    given = as_spec(spec)
    rank = len(shape) if shape is not None else max(1, len(given))
    entries = [axes_of(entry) for entry in entries_of(given, rank)]
    sizes = {str(name): size for name, size in mesh.shape.items()}
    counts = tuple(math.prod(sizes.get(axis, 1) for axis in axes) for axes in entries)
    if shape is None:
        shape = counts
    fit(given, shape, mesh)
    names = [str(name) for name in mesh.axis_names]
    holders: dict[tuple[int, ...], list[int]] = {place: [] for place in np.ndindex(*counts)}
    for device, coordinate in zip(_device_numbers(mesh), np.ndindex(*mesh.axis_sizes), strict=True):
        at = dict(zip(names, coordinate, strict=True))
        holders[tuple(_linear(axes, at, sizes) for axes in entries)].append(device)
    title = f"{given} on {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    text = tuple("+".join(axes) for axes in entries)
    return Blocks(shape, counts, {place: tuple(found) for place, found in holders.items()}, text, title)


def _device_numbers(mesh: AnyMesh) -> list[int]:
    """Device ids; in several slices, where ids start at 100000, their rank among the mesh's."""
    if not isinstance(mesh, Mesh):
        return list(range(mesh.size))
    ids = [device.id for device in mesh.devices.flat]
    if max(ids) < 100_000:
        return ids
    rank = {device: place for place, device in enumerate(sorted(ids))}
    return [rank[device] for device in ids]


def _linear(axes: tuple[str, ...], at: dict[str, int], sizes: dict[str, int]) -> int:
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


def _mapped_blocks(sharding: Sharding, shape: tuple[int, ...]) -> Blocks:
    """Blocks of any other sharding, from JAX's own map of devices to indices."""
    where = {
        device.id: tuple(part.indices(size)[0] for part, size in zip(index or (), shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    starts = [sorted({found[dim] for found in where.values()}) for dim in range(len(shape))]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, found in sorted(where.items()):
        holders.setdefault(tuple(s.index(at) for s, at in zip(starts, found, strict=True)), []).append(device)
    counts = tuple(len(found) for found in starts)
    title = f"{type(sharding).__name__} on {plural(len(where), 'device')}"
    return Blocks(shape, counts, {k: tuple(v) for k, v in holders.items()}, ("",) * len(shape), title)


def devices_in_words(devices: Sequence[int], most: int = 12) -> str:
    """Device ids, runs joined.

    >>> devices_in_words((0, 1, 2, 3, 8, 10, 11)), devices_in_words(range(0, 64, 2))
    ('0-3,8,10-11', '0,2,4,… 32 in all')
    """
    ordered = sorted(devices)
    runs: list[list[int]] = []
    for device in ordered:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    if len(text) <= most or len(runs) <= 3:
        return text
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:3]) + f",… {len(ordered)} in all"
