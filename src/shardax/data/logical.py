"""Logical axis names → a PartitionSpec, by a sharder's rules. A name that nothing knows is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from jax.sharding import PartitionSpec

from shardax.data.sharder_config import ShardingRules
from shardax.errors import Offence, SpecError, UnknownAxisError, did_you_mean
from shardax.names.spec import axes_of


def physical_spec(logical: Any, rules: ShardingRules | None, mesh_axes: Iterable[str] | None) -> PartitionSpec:
    """Map every logical name by the first rule that knows it; names of mesh axes stay themselves.

    `mesh_axes` are the axes of the mesh at hand; without a mesh the axes that the rules lead to are taken as known,
    and without rules every name is taken as it is.

    >>> rules = (("batch", ("data", "fsdp")), ("embed", "tp"), ("seq", None))
    >>> tuple(physical_spec(("batch", "seq", ("embed", "sp")), rules, ("data", "fsdp", "tp", "sp")))
    (('data', 'fsdp'), None, ('tp', 'sp'))
    """
    if isinstance(logical, PartitionSpec):
        return logical
    entries = [logical] if isinstance(logical, str) else [] if logical is None else _entries(logical)
    targets = _first_match(rules or ())
    known = set(mesh_axes) if mesh_axes is not None else None
    if known is None and rules:
        known = {axis for _, entry in rules for axis in axes_of(entry)}
    resolved = [list(_resolve(entry, targets)) for entry in entries]
    _check(resolved, entries, targets, known)
    return PartitionSpec(*(_entry(entry, axes) for entry, axes in zip(entries, resolved, strict=True)))


def _entries(logical: Any) -> list[Any]:
    """One entry per dimension, each a name, several, or None."""
    if not isinstance(logical, (tuple, list)):
        raise SpecError(
            f"a logical spec is a tuple of names, not a {type(logical).__name__}", remedy="such as ('batch', None)"
        )
    entries = list(cast("Any", logical))
    odd = [
        Offence(f"dim {dim}", f"{entry!r} is neither a name nor several nor None")
        for dim, entry in enumerate(entries)
        if not _is_entry(entry)
    ]
    if odd:
        raise SpecError("this spec is not made of names", odd)
    return entries


def _is_entry(entry: Any) -> bool:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED or isinstance(entry, str):
        return True
    return isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in cast("Any", entry))


def _first_match(rules: ShardingRules) -> dict[str, tuple[str, ...]]:
    targets: dict[str, tuple[str, ...]] = {}
    for name, entry in rules:
        targets.setdefault(name, axes_of(entry))
    return targets


def _resolve(entry: Any, targets: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name in (entry,) if isinstance(entry, str) else entry if isinstance(entry, (tuple, list)) else ():
        yield from targets.get(name, (name,))


def _entry(asked: Any, axes: list[str]) -> Any:
    if asked is PartitionSpec.UNCONSTRAINED:
        return asked
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _named(asked: Any, axis: str) -> str:
    return repr(axis) if asked == axis else f"{asked!r}: {axis!r}"


def _check(resolved: list[list[str]], entries: list[Any], targets: Mapping[str, Any], known: set[str] | None) -> None:
    strange = [
        Offence(
            f"dim {dim}", f"{_named(entries[dim], axis)} is unknown{did_you_mean(axis, [*targets, *sorted(known)])}"
        )
        for dim, axes in enumerate(resolved)
        for axis in axes
        if known is not None and axis not in known
    ]
    if strange:
        names = f"logical names {', '.join(targets) or 'none'}; mesh axes {', '.join(sorted(known or ()))}"
        raise UnknownAxisError("this spec names axes that nothing knows", strange, f"known: {names}")
    twice = [axis for axis, times in Counter(axis for axes in resolved for axis in axes).items() if times > 1]
    if twice:
        offences = [
            Offence(repr(axis), f"shards dims {', '.join(str(d) for d, axes in enumerate(resolved) if axis in axes)}")
            for axis in twice
        ]
        raise SpecError("one mesh axis would shard several dimensions", offences, "let a rule lead one of them to None")
