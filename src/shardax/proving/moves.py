"""What must travel when an array goes from one layout to another: pure arithmetic on specs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from shardax.names.spec import axes_of, entries_of, entry_of

Entries = tuple[tuple[str, ...], ...]
"""A spec with exactly one tuple of axes for every dimension: hashable, and one spelling per layout."""


@dataclass(frozen=True, slots=True)
class Move:
    """One collective: its name, the mesh axes it runs along, and the bytes of one device in one execution."""

    collective: str
    axes: tuple[str, ...]
    payload_bytes: int
    among: int = 0  # devices, where the program says groups of its own; else all along the axes


def stored_width(dtype: Any, itemsize: int) -> float:
    """Bytes of one element as XLA stores it: it packs what is smaller than a byte.

    >>> stored_width("float32", 4), stored_width("int4", 1), stored_width("float4_e2m1fn", 1)
    (4, 0.5, 0.5)
    """
    packed = re.match(r"u?int([24])$|float(4)_", str(dtype))
    return int(packed[1] or packed[2]) / 8 if packed else itemsize


def entries(spec: PartitionSpec, rank: int) -> Entries:
    """The entries of a spec, one per dimension.

    >>> entries(PartitionSpec("dp", ("fsdp", "tp")), 3)
    (('dp',), ('fsdp', 'tp'), ())
    """
    return tuple(axes_of(entry) for entry in entries_of(spec, rank))


def replicated(rank: int) -> Entries:
    return ((),) * rank


def as_spec(found: Entries) -> PartitionSpec:
    """The inverse of `entries`."""
    return PartitionSpec(*map(entry_of, found))


def used(found: Entries) -> tuple[str, ...]:
    """Every axis, in order of dimensions."""
    return tuple(axis for axes in found for axis in axes)


def without(found: Entries, axes: Iterable[str]) -> Entries:
    """The layout once these axes have been gathered."""
    gone = set(axes)
    return tuple(tuple(axis for axis in dim if axis not in gone) for dim in found)


def local_bytes(shape: Sequence[int], itemsize: float, found: Entries, sizes: Mapping[str, int]) -> int:
    """Bytes of one device's block (the largest, where the last one is smaller)."""
    blocks = (-(-n // math.prod(sizes[axis] for axis in axes)) for n, axes in zip(shape, found, strict=True))
    return math.ceil(math.prod(blocks) * itemsize)


def moves(
    old: Entries, new: Entries, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]
) -> tuple[Move, ...]:
    """The collectives that take an array from one layout to another; slicing is free.

    >>> sizes = {"dp": 4, "tp": 2}
    >>> moves((("dp",), ()), ((), ()), (64, 64), 4, sizes)
    (Move(collective='all-gather', axes=('dp',), payload_bytes=16384, among=0),)
    >>> moves((("dp",), ()), ((), ("dp",)), (64, 64), 4, sizes)
    (Move(collective='all-to-all', axes=('dp',), payload_bytes=4096, among=0),)
    >>> moves(((), ()), (("dp",), ("tp",)), (64, 64), 4, sizes)
    ()
    """
    before = {axis: dim for dim, axes in enumerate(old) for axis in axes}
    after = {axis: dim for dim, axes in enumerate(new) for axis in axes}
    gathered = tuple(axis for axis in before if axis not in after and sizes[axis] > 1)
    turned = tuple(axis for axis in before if axis in after and after[axis] != before[axis] and sizes[axis] > 1)
    rest = without(old, gathered)
    found: list[Move] = []
    permuted = () if turned else _reordered(old, rest, new, sizes)
    if permuted:
        finer = new if len(used(new)) > len(used(old)) else old
        found.append(Move("collective-permute", permuted, local_bytes(shape, itemsize, finer, sizes)))
    found += _gathers(old, gathered, shape, itemsize, sizes)
    if turned:
        found.append(Move("all-to-all", turned, local_bytes(shape, itemsize, rest, sizes)))
    return tuple(found)


def _gathers(
    old: Entries, gathered: Sequence[str], shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]
) -> Iterator[Move]:
    """One all-gather for every dimension, the last one first, as XLA does it."""
    held = old
    for axes in reversed(old):
        lost = tuple(axis for axis in axes if axis in gathered)
        if lost:
            held = without(held, lost)
            yield Move("all-gather", lost, local_bytes(shape, itemsize, held, sizes))


def _reordered(old: Entries, rest: Entries, new: Entries, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes of a dimension whose blocks must change places: what is gathered or sliced has to be minor to what stays."""
    for before, kept, after in zip(old, rest, new, strict=True):
        stays, one, other = (tuple(axis for axis in axes if sizes[axis] > 1) for axes in (kept, before, after))
        if stays and (one[: len(stays)] != stays or other[: len(stays)] != stays):
            return other if len(other) >= len(one) else one
    return ()
