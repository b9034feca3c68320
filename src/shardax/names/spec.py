"""Pure arithmetic on partition specs: canonical form, fit to a shape, local shapes and counts.

`fit` is the one place where a spec meets a shape and a mesh; everything that corrects goes through it and leaves a
`Correction` behind.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardax.errors import Offence, ShardaxError, SpecError, UnknownAxisError, did_you_mean, plural
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.tables import show_bytes

FREE = PartitionSpec.UNCONSTRAINED
"""A dimension that the compiler may shard as it likes."""

REPLICATED = None
"""A dimension that every device holds whole."""

OnMisfit: TypeAlias = Literal["error", "warn", "adapt"]
Reason: TypeAlias = Literal["unknown-axis", "indivisible", "duplicate", "too-long"]
SpecLike: TypeAlias = "PartitionSpec | Sequence[Any] | None"
MeshShape: TypeAlias = tuple[tuple[str, int], ...]


def as_spec(spec: SpecLike) -> PartitionSpec:
    """A PartitionSpec from itself, from a sequence of entries, or from None (replicated).

    >>> as_spec(["dp", None]), as_spec(None)
    (P('dp', None), P())
    """
    if isinstance(spec, PartitionSpec):
        return spec
    if spec is None:
        return PartitionSpec()
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise SpecError(f"not a partition spec: {spec!r}", remedy="give P('dp', None) or a sequence of its entries")
    return PartitionSpec(*(axes_of(entry) if isinstance(entry, (list, tuple)) else entry for entry in spec))


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec.

    >>> axes_of("tp"), axes_of(("fsdp", "dp")), axes_of(None), axes_of(FREE)
    (('tp',), ('fsdp', 'dp'), (), ())
    """
    if entry is None or entry is FREE:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)):
        return tuple(axis for part in entry for axis in axes_of(part))
    raise SpecError(f"a spec entry is an axis name, a tuple of them, None or FREE, not {entry!r}")


def axes_in(spec: Iterable[Any]) -> tuple[str, ...]:
    """Every mesh axis of a spec, in order.

    >>> axes_in(PartitionSpec(("fsdp", "dp"), None, "tp"))
    ('fsdp', 'dp', 'tp')
    """
    return tuple(axis for entry in spec for axis in axes_of(entry))


def entry_of(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """The entry that names these axes, in its plainest form."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def canonical(spec: SpecLike, mesh: MeshLike | None = None) -> PartitionSpec:
    """The one spelling of a layout: no trailing None, no 1-tuples, and (given a mesh) no axes of size 1.

    `P('x')`, `P('x', None)` and an extra size-1 axis are three jit cache entries for one layout.

    >>> canonical(PartitionSpec(("dp",), None, None)), canonical(PartitionSpec("dp", "tp"), "dp=1,tp=4")
    (P('dp',), P(None, 'tp'))
    """
    sizes: dict[str, int] = dict(mesh_shape(mesh)) if mesh is not None else {}
    entries: list[Any] = [
        entry if entry is FREE else entry_of([axis for axis in axes_of(entry) if sizes.get(axis) != 1])
        for entry in as_spec(spec)
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def mesh_shape(mesh: MeshLike) -> MeshShape:
    """Axis names with their sizes, as the hashable form that arithmetic is cached by."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh.shape_tuple
    spec = MeshSpec.of(mesh)
    _ = spec.size
    return tuple(zip(spec.names, spec.sizes, strict=True))


# ---- fit ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Correction:
    """What one dimension lost, why, and what that costs on every device."""

    dim: int
    axes: tuple[str, ...]
    reason: Reason
    bytes_per_device: int
    detail: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lost = "+".join(map(repr, self.axes)) or "nothing"
        cost = f", {show_bytes(self.bytes_per_device)} more per device" if self.bytes_per_device else ""
        return f"dim {self.dim} loses {lost} ({self.reason}: {self.detail}{cost})"


@dataclass(frozen=True)
class Fit:
    """What was asked of a shape on a mesh, what it got, and the corrections in between."""

    asked: PartitionSpec
    shape: tuple[int, ...]
    mesh: MeshShape
    spec: PartitionSpec
    corrections: tuple[Correction, ...] = ()

    @property
    def exact(self) -> bool:
        """Did the array get what was asked?"""
        return not self.corrections

    @property
    def bytes_per_device(self) -> int:
        """What all corrections together cost on every device."""
        return sum(correction.bytes_per_device for correction in self.corrections)

    def offences(self, where: str = "", rule: str | None = None) -> list[Offence]:
        """The corrections as the lines of an error that says where, by which rule, and what would work."""
        return [
            Offence(
                where,
                f"dim {c.dim}: {c.detail}",
                shape=self.shape,
                spec=self.asked,
                rule=rule,
                remedy=c.remedy or None,
            )
            for c in self.corrections
        ]


def fit(
    spec: SpecLike,
    shape: Sequence[int],
    mesh: MeshLike,
    on_misfit: OnMisfit = "error",
    *,
    dtype: Any = np.float32,
    stored: bool = True,
) -> Fit:
    """Fit a spec to a shape on a mesh: exactly, or with every correction recorded.

    `adapt` keeps the largest leading part of a composite entry that divides. What a stored array loses becomes
    replicated; with `stored=False` (an activation) it becomes free.

    >>> fit(PartitionSpec(("fsdp", "sp"), "tp"), (8, 6), "fsdp=4,tp=4", "adapt").spec
    P('fsdp',)
    >>> fit(PartitionSpec("fsdp", "tp"), (8, 6), "fsdp=4,tp=4")
    Traceback (most recent call last):
        ...
    shardax.errors.SpecError: the spec does not fit
      dim 1: 6 does not divide by 'tp' (4) [shape (8, 6), spec P('fsdp', 'tp')]; would work: a dim of 8
    """
    asked = as_spec(spec)
    _ = axes_in(asked)  # what is no entry is refused
    found = fit_cached(asked, tuple(shape), mesh_shape(mesh), np.dtype(dtype).itemsize, stored)
    if found.corrections and on_misfit != "adapt":
        check_misfit_policy(on_misfit)
        if on_misfit == "error":
            raise misfit_error("the spec does not fit", [(found, "", None)])
        for correction in found.corrections:
            warnings.warn(f"{found.asked} on shape {found.shape}: {correction}", stacklevel=2)
    return found


def check_misfit_policy(on_misfit: str) -> None:
    """An unknown policy is an error before anything is done under it."""
    if on_misfit not in ("error", "warn", "adapt"):
        raise SpecError(f"on_misfit={on_misfit!r} is unknown{did_you_mean(on_misfit, ('error', 'warn', 'adapt'))}")


def misfit_error(headline: str, fits: Iterable[tuple[Fit, str, str | None]], remedy: str = "") -> ShardaxError:
    """One error for all fits (each with its path and rule); a KeyError too when only names are unknown."""
    listed = list(fits)
    offences = [offence for found, where, rule in listed for offence in found.offences(where, rule)]
    reasons = {correction.reason for found, _, _ in listed for correction in found.corrections}
    kind = UnknownAxisError if reasons == {"unknown-axis"} else SpecError
    return kind(headline, offences, remedy)


@lru_cache(maxsize=65536)
def fit_cached(asked: PartitionSpec, shape: tuple[int, ...], mesh: MeshShape, itemsize: int, stored: bool) -> Fit:
    """The arithmetic of `fit`, without a policy; its arguments are hashable and compared by value."""
    sizes = dict(mesh)
    used: dict[str, int] = {}
    entries: list[Any] = []
    lost: list[tuple[int, tuple[str, ...], Reason, str, str]] = []
    for dim, entry in enumerate(asked):
        if dim >= len(shape):
            if axes_of(entry):
                lost.append((dim, axes_of(entry), "too-long", *_too_long(asked, shape)))
            continue
        kept, losses = _fit_dimension(dim, entry, shape[dim], sizes, used)
        lost.extend(losses)
        emptied = bool(losses) and not kept
        entries.append(FREE if entry is FREE or (emptied and not stored) else entry_of(kept))
    while entries and entries[-1] is None:
        entries.pop()
    given = PartitionSpec(*entries)
    local_bytes = math.prod(shape) * itemsize // shard_count_of(given, sizes)
    corrections = tuple(
        Correction(dim, axes, reason, _cost(local_bytes, axes, reason, sizes), detail, remedy)
        for dim, axes, reason, detail, remedy in lost
    )
    return Fit(asked, shape, mesh, asked if not corrections else given, corrections)


def _fit_dimension(
    dim: int, entry: Any, size: int, sizes: Mapping[str, int], used: dict[str, int]
) -> tuple[list[str], list[tuple[int, tuple[str, ...], Reason, str, str]]]:
    losses: list[tuple[int, tuple[str, ...], Reason, str, str]] = []
    candidates: list[str] = []
    for axis in axes_of(entry):
        if axis not in sizes:
            detail = f"{axis!r} is not an axis of the mesh {tuple(sizes)}{did_you_mean(axis, sizes)}"
            losses.append((dim, (axis,), "unknown-axis", detail, ""))
        elif axis in used:
            detail = f"{axis!r} already shards dim {used[axis]}"
            losses.append((dim, (axis,), "duplicate", detail, f"{axis!r} on one dim only"))
        else:
            used[axis] = dim
            candidates.append(axis)
    kept = _leading_part(candidates, size, sizes)
    if len(kept) < len(candidates):
        dropped = tuple(candidates[len(kept) :])
        for axis in dropped:
            del used[axis]
        losses.append((dim, dropped, "indivisible", *_indivisible(size, candidates, kept, sizes)))
    return kept, losses


def _leading_part(axes: list[str], size: int, sizes: Mapping[str, int]) -> list[str]:
    """The largest leading part of a composite entry whose product divides the dimension."""
    for length in range(len(axes), 0, -1):
        if size % math.prod(sizes[axis] for axis in axes[:length]) == 0:
            return axes[:length]
    return []


def _indivisible(size: int, axes: list[str], kept: list[str], sizes: Mapping[str, int]) -> tuple[str, str]:
    product = math.prod(sizes[axis] for axis in axes)
    named = "×".join(f"{axis!r} ({sizes[axis]})" for axis in axes)
    total = f" = {product}" if len(axes) > 1 else ""
    options = [f"a dim of {-(-size // product) * product}"]
    if kept:
        options.insert(0, f"{entry_of(kept)!r} alone")
    fitting = [
        f"{axis!r} ({n})" for axis, n in sizes.items() if 1 < n != product and size % n == 0 and axis not in axes
    ]
    if fitting:
        options.append(f"another axis, {' or '.join(fitting)}")
    return f"{size} does not divide by {named}{total}", "; or ".join(options)


def _too_long(asked: PartitionSpec, shape: tuple[int, ...]) -> tuple[str, str]:
    dims, most = plural(len(shape), "dim"), plural(len(shape), "entry", "entries")
    return f"the spec has {len(asked)} entries for {dims}", f"a spec of at most {most}"


def _cost(local_bytes: int, axes: tuple[str, ...], reason: Reason, sizes: Mapping[str, int]) -> int:
    """Bytes per device that sharding over the lost axes would have saved; an axis that is not there saves nothing."""
    if reason in ("duplicate", "too-long"):  # these axes are already used, or have no dimension to shard
        return 0
    ways = math.prod(sizes.get(axis, 1) for axis in axes)
    return local_bytes - -(-local_bytes // ways)


# ---- counts ---------------------------------------------------------------------------------------------------------


def shard_count_of(spec: Iterable[Any], sizes: Mapping[str, int]) -> int:
    """The number of distinct blocks that a spec cuts an array into."""
    return math.prod(sizes.get(axis, 1) for axis in axes_in(spec))


def shard_count(spec: SpecLike, mesh: MeshLike) -> int:
    """The number of distinct blocks that a spec cuts an array into on a mesh.

    >>> shard_count(PartitionSpec(("dp", "tp")), "dp=2,tp=4,sp=3")
    8
    """
    return shard_count_of(known_spec(spec, mesh), dict(mesh_shape(mesh)))


def replication_factor(spec: SpecLike, mesh: MeshLike) -> int:
    """On how many devices each block stands.

    >>> replication_factor(PartitionSpec(("dp", "tp")), "dp=2,tp=4,sp=3")
    3
    """
    return math.prod(size for _, size in mesh_shape(mesh)) // shard_count(spec, mesh)


def local_shape(spec: SpecLike, shape: Sequence[int], mesh: MeshLike) -> tuple[int, ...]:
    """The shape of one device's block; a spec that does not fit is an error.

    >>> local_shape(PartitionSpec("dp", "tp"), (8, 16, 3), "dp=2,tp=4")
    (4, 4, 3)
    """
    sizes = dict(mesh_shape(mesh))
    given = tuple(fit(spec, shape, mesh).spec)
    padded = (*given, *([None] * (len(shape) - len(given))))
    return tuple(
        size // math.prod(sizes[axis] for axis in axes_of(entry))
        for size, entry in zip(shape, padded[: len(shape)], strict=True)
    )


def known_spec(spec: SpecLike, mesh: MeshLike) -> PartitionSpec:
    """The spec, if the mesh has every axis that it names; else one error that lists those it has not.

    >>> known_spec(PartitionSpec("dp"), "dp=2,tp=4")
    P('dp',)
    """
    sizes = dict(mesh_shape(mesh))
    asked = as_spec(spec)
    unknown = [axis for axis in axes_in(asked) if axis not in sizes]
    if unknown:
        raise UnknownAxisError(
            f"{asked} names axes that the mesh {tuple(sizes)} does not have",
            [Offence(repr(axis), f"is no mesh axis{did_you_mean(axis, sizes)}") for axis in unknown],
        )
    return asked


def entries_of(spec: SpecLike, rank: int) -> Iterator[Any]:
    """Exactly `rank` entries: a spec is as if padded with None."""
    given = tuple(as_spec(spec))
    yield from (*given, *([None] * (rank - len(given))))
