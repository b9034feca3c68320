"""What a layout costs: bytes per device, what stands there in copies, and how the worst could be sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardax.errors import LayoutError, LeafError, Offence
from shardax.names.alike import alike
from shardax.names.decision import Decision, itemsize_of
from shardax.names.mesh import MeshLike, MeshSpec, required_mesh
from shardax.names.paths import flatten, rebuild
from shardax.names.spec import FREE, as_spec, axes_in, axes_of, canonical, entries_of, fit_cached, shard_count_of
from shardax.tables import Reported, Table, show_bytes


@dataclass(frozen=True)
class Offender:
    """What stands on several devices: leaves that are alike, their cost on each, and what would shard them further."""

    path: str
    spec: PartitionSpec
    copies: int
    bytes_per_device: int
    suggestion: str
    leaves: int = 1


@dataclass(frozen=True)
class LayoutAnalysis(Reported):
    """Totals of a layout and its worst offenders, largest first."""

    mesh: MeshSpec
    total_bytes: int
    bytes_per_device: int
    replicated_bytes: int
    corrected_leaves: int
    offenders: tuple[Offender, ...]

    def table(self) -> Table:
        """The offenders as a table, the totals below it."""
        rows = tuple(
            (
                o.path or "(root)",
                str(o.leaves),
                str(o.spec),
                str(o.copies),
                show_bytes(o.bytes_per_device),
                o.suggestion,
            )
            for o in self.offenders
        )
        notes = (
            f"{show_bytes(self.total_bytes)} in all; every device holds {show_bytes(self.bytes_per_device)}, "
            f"{show_bytes(self.replicated_bytes)} of it also stands on another device",
        )
        columns = ("path", "leaves", "spec", "copies", "per device", "could be sharded")
        title = f"what is replicated on mesh {self.mesh}" if rows else f"nothing is replicated on mesh {self.mesh}"
        return Table(title, columns if rows else (), rows, ("leaves", "copies", "per device"), notes)

    def __str__(self) -> str:
        return str(self.table())


def analyse(decisions: Sequence[Decision], mesh: MeshSpec, most: int = 10) -> LayoutAnalysis:
    """The analysis of a layout's decisions."""
    copied = [decision for decision in decisions if decision.copies > 1]
    groups = alike(copied, lambda d: d.path, lambda d: (d.shape, d.dtype, d.spec))
    offenders = sorted(
        (_offender(path, found, mesh) for path, found in groups.items()), key=lambda o: (-o.bytes_per_device, o.path)
    )[:most]
    return LayoutAnalysis(
        mesh,
        sum(d.nbytes for d in decisions),
        sum(d.bytes_per_device for d in decisions),
        sum(d.bytes_per_device for d in copied),
        sum(1 for d in decisions if d.fit.corrections),
        tuple(offenders),
    )


def _offender(path: str, found: Sequence[Decision], mesh: MeshSpec) -> Offender:
    first, held = found[0], sum(decision.bytes_per_device for decision in found)
    suggestion = suggestion_for(first, mesh, len(found))
    return Offender(path, first.spec, first.copies, held, suggestion, len(found))


def suggestion_for(decision: Decision, mesh: MeshSpec, leaves: int = 1) -> str:
    """The unused axis and dimension that would save most (on so many leaves alike), and why they go together.

    Of dimensions that save the same the largest: the small one is often a stack of layers. Empty when none divides.
    """
    sizes = mesh.shape
    unused = [axis for axis, size in sizes.items() if size > 1 and axis not in axes_in(decision.spec)]
    entries = list(entries_of(decision.spec, len(decision.shape)))
    options: list[tuple[int, int, int, int, str]] = []
    for axis in unused:
        for dim, (size, entry) in enumerate(zip(decision.shape, entries, strict=True)):
            ways = math.prod(sizes[name] for name in axes_of(entry)) * sizes[axis]
            if size and size % ways == 0 and entry is not FREE:
                options.append((-sizes[axis], len(axes_of(entry)), -size, dim, axis))
    if not options:
        return ""
    _, shared, _, dim, axis = min(options)
    saved = leaves * (decision.bytes_per_device - decision.bytes_per_device // sizes[axis])
    beside = f" beside {entries[dim]!r}" if shared else ""
    return f"on {axis!r}{beside}: dim {dim} ({decision.shape[dim]}) divides; saves {show_bytes(saved)}"


# ---- eformer's analysis ---------------------------------------------------------------------------------------------


def analyze_sharding_strategy(pytree: Any, partition_specs: Any, mesh: MeshLike | None = None) -> dict[str, Any]:
    """Totals of a tree under specs: parameters, bytes per device, balance over devices, statistics per spec.

    Leaves may be abstract; specs may be a prefix tree; a dimension that does not divide is counted as JAX would pad
    it, so `balance_score` (mean / max bytes over devices) falls below 1.

    >>> tree = {"w": jax.ShapeDtypeStruct((8, 4), "float32"), "b": jax.ShapeDtypeStruct((4,), "float32")}
    >>> found = analyze_sharding_strategy(tree, {"w": PartitionSpec(("dp", "tp")), "b": PartitionSpec()}, "dp=2,tp=2")
    >>> found["total_parameters"], found["sharded_parameters"], found["memory_per_device"]["total"]
    (36, 32, 48)
    """
    spec_of_mesh = MeshSpec.of(required_mesh(mesh, "analyze_sharding_strategy"))
    sizes = spec_of_mesh.shape
    paths, leaves = flatten(pytree)
    specs = _specs_per_leaf(pytree, partition_specs, paths)
    per_device = np.zeros(spec_of_mesh.sizes, dtype=np.int64)
    memory: dict[str, Any] = {"total": 0, "replicated": 0, "sharded": 0, "by_key": {}}
    stats: dict[PartitionSpec, dict[str, int]] = {}
    total = sharded = 0
    _check_specs(paths, leaves, specs, spec_of_mesh)
    for path, leaf, asked in zip(paths, leaves, specs, strict=True):
        size, itemsize = math.prod(leaf.shape), itemsize_of(leaf.dtype)
        is_sharded = shard_count_of(asked, sizes) > 1
        held = _elements_by_device(leaf.shape, asked, spec_of_mesh) * itemsize
        per_device += held
        total += size
        sharded += size if is_sharded else 0
        _add_memory(memory, path, int(held.max()), is_sharded)
        row = stats.setdefault(canonical(asked), {"leaves": 0, "parameters": 0, "bytes": 0})
        for key, amount in (("leaves", 1), ("parameters", size), ("bytes", size * itemsize)):
            row[key] += amount
    peak = int(per_device.max())
    memory["total"] = peak
    return {
        "total_parameters": total,
        "sharded_parameters": sharded,
        "memory_per_device": memory,
        "balance_score": float(per_device.mean() / peak) if peak else 1.0,
        "partition_stats": stats,
    }


def _specs_per_leaf(pytree: Any, partition_specs: Any, paths: list[str]) -> list[PartitionSpec]:
    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec)

    try:
        full = jax.tree.map(
            lambda spec, part: rebuild(part, [as_spec(spec)] * len(flatten(part)[0])),
            partition_specs,
            pytree,
            is_leaf=is_spec,
        )
    except (ValueError, TypeError) as error:
        if isinstance(error, LeafError):
            raise
        raise LayoutError(f"the specs are not a prefix of the tree: {error}") from None
    found_paths, specs = flatten(full)
    by_path = dict(zip(found_paths, specs, strict=True))
    return [by_path[path] for path in paths]


def _check_specs(paths: list[str], leaves: list[Any], specs: list[PartitionSpec], mesh: MeshSpec) -> None:
    """Names must be known and ranks must agree; divisibility is counted, not refused."""
    if strange := [
        Offence(path, f"is {type(leaf).__name__}, not an array")
        for path, leaf in zip(paths, leaves, strict=True)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    ]:
        raise LeafError("the tree has leaves that are not arrays", strange)
    problems = [
        Offence(path, f"dim {c.dim}: {c.detail}", shape=tuple(leaf.shape), spec=asked, remedy=c.remedy or None)
        for path, leaf, asked in zip(paths, leaves, specs, strict=True)
        for c in fit_cached(asked, tuple(leaf.shape), tuple(mesh.shape.items()), 1, True).corrections
        if c.reason != "indivisible"
    ]
    if problems:
        raise LayoutError(f"the specs do not belong on mesh {mesh}", problems)


def _add_memory(memory: dict[str, Any], path: str, held: int, is_sharded: bool) -> None:
    row = memory["by_key"].setdefault(path.partition("/")[0], {"total": 0, "replicated": 0, "sharded": 0})
    kind = "sharded" if is_sharded else "replicated"
    for place in (memory, row):
        place[kind] += held
    row["total"] += held


def _elements_by_device(shape: Iterable[int], spec: PartitionSpec, mesh: MeshSpec) -> np.ndarray[Any, Any]:
    """How many elements each device of the mesh holds, blocks rounded up as JAX pads them."""
    sizes = tuple(shape)
    held = np.ones(mesh.sizes, dtype=np.int64)
    coordinates = np.indices(mesh.sizes)
    for size, entry in zip(sizes, entries_of(spec, len(sizes)), strict=True):
        index, ways = np.zeros(mesh.sizes, dtype=np.int64), 1
        for axis in axes_of(entry):
            at = mesh.names.index(axis)
            index, ways = index * mesh.sizes[at] + coordinates[at], ways * mesh.sizes[at]
        block = -(-size // ways)
        held *= np.clip(size - index * block, 0, block)
    return held
