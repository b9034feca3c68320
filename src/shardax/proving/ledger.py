"""`Ledger`: what a compiled step sends between devices, by mesh axis and by Python line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeVar, overload

from shardax.errors import HloParseError, Offence, ProofError, did_you_mean, plural
from shardax.proving.collectives import OPS, Collective, find_collectives, has_collectives
from shardax.proving.hlo import HloModule
from shardax.proving.integrity import consistent
from shardax.proving.remat import attach_messages, remat_messages
from shardax.proving.slices import partitions
from shardax.tables import Reported, Table, show_bytes

Key = TypeVar("Key", bound=Hashable)
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong together, added up."""

    key: object
    sites: int
    executions: int
    payload_bytes: int
    wire_bytes: int

    @classmethod
    def of(cls, key: object, rows: Sequence[Collective]) -> Group:
        return cls(
            key,
            len(rows),
            sum(row.count for row in rows),
            sum(row.payload_bytes * row.count for row in rows),
            sum(row.wire_bytes for row in rows),
        )


@dataclass(frozen=True)
class Ledger(Reported):
    """The collectives of one step, one row per site, in the order of the program.

    `notes` says what could not be resolved; `warnings` are the partitioner's own that belong to no row.
    """

    rows: tuple[Collective, ...]
    mesh_axes: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        module: HloModule,
        mesh_axes: Mapping[str, int],
        *,
        slice_of: Sequence[int] | None = None,
        messages: str = "",
    ) -> Ledger:
        """Read the ledger of a compiled program that ran on a mesh with these axes, major to minor.

        `slice_of` is the slice of every position of `mesh.devices.flat`, for a program on several TPU slices;
        `messages` what the compiler printed while it worked.
        """
        if slice_of is not None and len(set(slice_of)) < 2:
            slice_of = None
        devices = partitions(mesh_axes, slice_of)
        compiled = max(module.num_partitions, 1) * max(module.replica_count, 1)
        if compiled != devices and (compiled != 1 or has_collectives(module)):
            problem = f"compiled for {compiled} devices, read for a mesh of {devices} ({dict(mesh_axes)})"
            raise HloParseError("an HLO module and a mesh that do not belong together", [Offence(module.name, problem)])
        with consistent(module.name):
            rows, notes = find_collectives(module, mesh_axes, slice_of) if devices > 1 else ((), ())
        rows, warnings = attach_messages(rows, remat_messages(messages), module)
        return cls(rows, tuple(mesh_axes.items()), notes, warnings)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Collective, ...]: ...
    def __getitem__(self, index: int | slice) -> Collective | tuple[Collective, ...]:
        return self.rows[index]

    @property
    def wire_bytes(self) -> int:
        """What one device sends in one step."""
        return sum(row.wire_bytes for row in self.rows)

    @property
    def executions(self) -> int:
        """How many collectives run in one step."""
        return sum(row.count for row in self.rows)

    @overload
    def group_by(self, key: str) -> dict[Any, Group]: ...
    @overload
    def group_by(self, key: Callable[[Collective], Key]) -> dict[Key, Group]: ...
    def group_by(self, key: str | Callable[[Collective], Any]) -> dict[Any, Group]:
        """Add up rows by a column ("op", "axes", "phase", …) or by any key, the largest on the wire first."""
        read = _reader(key) if isinstance(key, str) else key
        found: dict[Any, list[Collective]] = {}
        for row in self.rows:
            found.setdefault(read(row), []).append(row)
        groups = {name: Group.of(name, rows) for name, rows in found.items()}
        return dict(sorted(groups.items(), key=lambda item: -item[1].wire_bytes))

    def by_axis(self) -> dict[tuple[str, ...], Group]:
        """By the mesh axes that the collectives run over; one axis is found by its name too."""
        return _ByAxis(self.group_by(lambda row: row.axes))

    def by_line(self) -> dict[str, Group]:
        """By the Python line they come from."""
        return self.group_by(_line_of)

    def by_op(self) -> dict[str, Group]:
        """By kind of collective."""
        return self.group_by(lambda row: row.op)

    def where(
        self,
        op: str | None = None,
        axes: Sequence[str] | str | None = None,
        origin: str | None = None,
        phase: str | None = None,
    ) -> Ledger:
        """The ledger of only those rows; a word that no row could have is an error."""
        known = {"op": sorted(OPS), "origin": ["partitioner", "user"], "phase": ["backward", "forward"]}
        given = {"op": op, "origin": origin, "phase": phase}
        for name, words in known.items():
            if given[name] is not None and given[name] not in words:
                raise ProofError(f"no row has {name}={given[name]!r}{did_you_mean(given[name], words)}")
        wanted = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
        asked = {"op": op, "axes": wanted, "origin": origin, "phase": phase}
        checks = [(name, value) for name, value in asked.items() if value is not None]
        return replace(self, rows=tuple(r for r in self.rows if all(getattr(r, n) == v for n, v in checks)))

    def table(self, limit: int | None = _SHOWN) -> Table:
        """One line per kind of site (sites alike are added up), the largest on the wire first."""
        alike = self.group_by(_appearance)
        lines = [_line(look, group) for look, group in alike.items()]
        shown = lines if limit is None else lines[:limit]
        notes = [*self.notes, *self.warnings]
        if len(shown) < len(lines):
            rest = sum(group.wire_bytes for group in list(alike.values())[len(shown) :])
            notes.insert(0, f"… and {len(lines) - len(shown)} more, {show_bytes(rest)} on the wire")
        title = f"{plural(self.executions, 'collective')}, {show_bytes(self.wire_bytes)} sent by each device"
        columns = ("op", "axes", "times", "dtype", "payload", "on the wire", "phase", "by", "where", "what")
        return Table(title, columns, tuple(shown), ("times", "payload", "on the wire"), tuple(notes))

    def __str__(self) -> str:
        return str(self.table()) if self.rows or self.notes or self.warnings else "no collectives"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `Ledger.from_json` gives the same ledger back."""
        return {
            "mesh_axes": dict(self.mesh_axes),
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        return cls(
            tuple(Collective.from_json(row) for row in data["rows"]),
            tuple((name, int(size)) for name, size in data["mesh_axes"].items()),
            tuple(data["notes"]),
            tuple(data["warnings"]),
        )


class _ByAxis(dict[tuple[str, ...], Group]):
    def __missing__(self, axes: object) -> Group:
        if isinstance(axes, str) and (axes,) in self:
            return self[(axes,)]
        raise KeyError(axes)


def _line_of(row: Collective) -> str:
    return f"{row.file}:{row.line}" if row.file else ""


def _reader(column: str) -> Callable[[Collective], Any]:
    if column == "line":
        return _line_of
    known = [field.name for field in fields(Collective)]
    name = {"axis": "axes"}.get(column, column)
    if name not in known:
        raise ProofError(f"rows of a ledger have no {column!r}{did_you_mean(column, known)}")
    return attrgetter(name)


_Appearance = tuple[str, tuple[str, ...], str, int, str, str, str, tuple[str, ...], str | None, int]


def _appearance(row: Collective) -> _Appearance:
    what = row.notes
    return (
        row.op,
        row.axes,
        row.dtype,
        row.payload_bytes,
        row.phase,
        row.origin,
        row.place,
        what,
        row.path,
        row.group_size,
    )


def _line(look: _Appearance, group: Group) -> tuple[str, ...]:
    op, axes, dtype, payload, phase, origin, place, notes, path, size = look
    over = "×".join(axes) if axes else f"{size} devices"
    what = "; ".join([*([path] if path else []), *notes])
    wire_bytes = show_bytes(group.wire_bytes)
    return op, over, f"{group.executions:,}", dtype, show_bytes(payload), wire_bytes, phase, origin, place, what
