"""Decisions as JSON rows, and the difference between two sets of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from shardax.names.decision import Decision
from shardax.names.spec import FREE, Correction, Fit, MeshShape, axes_of
from shardax.tables import Reported, Table, show_bytes


def spec_to_json(spec: PartitionSpec) -> list[Any]:
    """A spec as a list: None, a name, a list of names, or "*" for a free dimension.

    >>> spec_to_json(PartitionSpec(("fsdp", "dp"), None, FREE))
    [['fsdp', 'dp'], None, '*']
    """
    return ["*" if e is FREE else list(axes_of(e)) if isinstance(e, tuple) else e for e in spec]


def spec_from_json(entries: Iterable[Any]) -> PartitionSpec:
    """The inverse of `spec_to_json`."""
    return PartitionSpec(*(FREE if e == "*" else tuple(e) if isinstance(e, list) else e for e in entries))


def decisions_to_json(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """One plain dict per decision; `asked` and `corrections` only where they say something."""
    rows: list[dict[str, Any]] = []
    for d in decisions:
        row: dict[str, Any] = {"path": d.path, "shape": list(d.shape), "dtype": d.dtype, "spec": spec_to_json(d.spec)}
        if d.fit.corrections:
            row["asked"] = spec_to_json(d.fit.asked)
            row["corrections"] = [
                [c.dim, list(c.axes), c.reason, c.bytes_per_device, c.detail, c.remedy] for c in d.fit.corrections
            ]
        rows.append({**row, "rule": d.rule})
    return rows


def decisions_from_json(rows: Iterable[Any], mesh: MeshShape) -> tuple[Decision, ...]:
    """The inverse of `decisions_to_json`."""
    return tuple(_decision_from_json(row, mesh) for row in rows)


def _decision_from_json(row: Any, mesh: MeshShape) -> Decision:
    shape, spec = tuple(row["shape"]), spec_from_json(row["spec"])
    lost = tuple(
        Correction(dim, tuple(axes), reason, cost, detail, remedy)
        for dim, axes, reason, cost, detail, remedy in row.get("corrections", ())
    )
    asked = spec_from_json(row["asked"]) if "asked" in row else spec
    return Decision(row["path"], shape, row["dtype"], spec, row["rule"], Fit(asked, shape, mesh, spec, lost))


@dataclass(frozen=True)
class LayoutDiff(Reported):
    """Leaf by leaf, what a second layout does otherwise. Falsy when nothing differs."""

    mesh: tuple[str, str]
    rows: tuple[tuple[str, str, str, str], ...]  # path, before, after, what changed

    def __bool__(self) -> bool:
        return bool(self.rows) or self.mesh[0] != self.mesh[1]

    def table(self) -> Table:
        """The differences as a table."""
        one, two = self.mesh
        title = f"mesh {one}" if one == two else f"mesh {one} → {two}"
        return Table(title, ("path", "before", "after", "change"), self.rows)

    def __str__(self) -> str:
        return (
            str(self.table())
            if self.rows
            else ("no difference" if not self else f"mesh {self.mesh[0]} → {self.mesh[1]}")
        )


def diff_decisions(before: Sequence[Decision], after: Sequence[Decision], mesh_one: str, mesh_two: str) -> LayoutDiff:
    """The rows of a `LayoutDiff`, in the order of the first layout; new leaves last."""
    old, new = ({decision.path: decision for decision in side} for side in (before, after))
    rows = [(path, _text(d), "—", "gone") for path, d in old.items() if path not in new]
    for path, one in old.items():
        if path in new and (change := _change(one, new[path])):
            rows.append((path, _text(one), _text(new[path]), change))
    rows += [(path, "—", _text(d), "new") for path, d in new.items() if path not in old]
    return LayoutDiff((mesh_one, mesh_two), tuple(rows))


def _text(decision: Decision) -> str:
    return f"{decision.dtype}[{','.join(map(str, decision.shape))}] {decision.spec}"


def _change(one: Decision, two: Decision) -> str:
    if (one.shape, one.dtype, one.spec) == (two.shape, two.dtype, two.spec):
        return ""
    delta = two.bytes_per_device - one.bytes_per_device
    if not delta:
        return "same bytes per device"
    return f"{'+' if delta > 0 else ''}{show_bytes(delta)} per device"
