"""A mesh as a picture: devices on their physical grid, coloured along one axis, hosts and slices outlined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardax.errors import UnknownAxisError, did_you_mean, plural
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.names.mesh_build import describe
from shardax.report.palette import ink, ramp
from shardax.report.svg import Svg
from shardax.report.values import Span

MOST_SHOWN = 1024
WIDEST = 32  # columns, and rows before there are more columns
PAPER = 640.0  # sheets are laid beside each other up to this width
TERMINAL = 100
GAP = 4.0  # between devices
Sheet = tuple[int, int]  # slice, plane of the torus


@dataclass(frozen=True)
class Seat:
    """One device: its id, its slice and plane, its host, where it stands there, and its mesh coordinate."""

    device: int
    slice_index: int
    plane: int
    host: int
    at: tuple[int, int]  # column, row on the paper
    coordinate: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class MeshDrawing:
    """Every device of a mesh in its place. `str()` draws it in a terminal, a notebook shows it as SVG."""

    spec: MeshSpec
    seats: tuple[Seat, ...]
    axis: str
    words: str

    def coloured_by(self, axis: str) -> MeshDrawing:
        """The same drawing, coloured along another axis."""
        if axis not in self.spec.names:
            raise UnknownAxisError(f"no axis {axis!r} in mesh {self.spec}{did_you_mean(axis, self.spec.names)}")
        return replace(self, axis=axis)

    @property
    def caption(self) -> str:
        """The mesh, its devices, and what the numbers are."""
        return f"{self.spec}: {self.words}"

    @property
    def sheets(self) -> dict[Sheet, list[Seat]]:
        """The devices by slice and plane, in order."""
        found: dict[Sheet, list[Seat]] = {}
        for seat in sorted(self.seats, key=lambda seat: (seat.slice_index, seat.plane, seat.at[1], seat.at[0])):
            found.setdefault((seat.slice_index, seat.plane), []).append(seat)
        return found

    def _title(self, sheet: Sheet) -> str:
        slices, planes = ({place[side] for place in self.sheets} for side in (0, 1))
        words = [f"slice {sheet[0]}"] if len(slices) > 1 else []
        return ", ".join([*words, *([f"z = {sheet[1]}"] if len(planes) > 1 else [])])

    def _along(self, seat: Seat) -> int:
        return seat.coordinate[self.spec.names.index(self.axis)]

    # ---- characters -------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join("".join(span.text for span in line).rstrip() for line in self.spans())

    __repr__ = __str__  # at a prompt, asking for a drawing draws it

    def spans(self, width: int = TERMINAL) -> list[list[Span]]:
        """Lines of characters: each device shows its place along the axis; bars and rules are borders of hosts."""
        lines = [[Span(f"mesh {self.spec}: each device shows its place along {self.axis!r}")]]
        waiting: list[list[list[Span]]] = []
        for sheet, seats in self.sheets.items():
            rows = self._rows(seats, width)
            if title := self._title(sheet):
                rows.insert(0, [Span(f"  {title}")])
            if waiting and sum(map(_width, [*waiting, rows])) > width:
                lines += _beside(waiting)
                waiting = []
            waiting.append(rows)
        return [*lines, *_beside(waiting), [Span(self.words)]]

    def _rows(self, seats: Sequence[Seat], room: int) -> list[list[Span]]:
        by_place = {seat.at: seat for seat in seats}
        columns, rows = (1 + max(place[side] for place in by_place) for side in (0, 1))
        count = self.spec.shape[self.axis]
        width = len(str(count - 1))
        most = max(4, min(64, (room - 4) // (width + 1)))
        lines: list[list[Span]] = []
        for row in range(min(rows, 32)):
            line, first, over = [Span("  ")], by_place.get((0, row)), by_place.get((0, row - 1))
            for column in range(min(columns, most)):
                seat, left = by_place.get((column, row)), by_place.get((column - 1, row))
                if column:
                    line.append(Span(" │ " if seat and left and seat.host != left.host else " "))
                place = self._along(seat) if seat else 0
                colours = (ramp(place, count), ink(place, count)) if seat else ("", "")
                line.append(Span((str(place) if seat else "").rjust(width), *colours))
            if first and over and first.host != over.host:
                lines.append([Span("  " + "─" * (sum(len(span.text) for span in line) - 2))])
            lines.append([*line, Span(" …")] if columns > most else line)
        return [*lines, [Span("  …")]] if rows > 32 else lines

    # ---- picture ----------------------------------------------------------------------------------------------------

    def svg(self, caption: bool = True) -> str:
        """The drawing as one SVG element: colour is the place along the axis, frames are hosts, dashes slices.

        Every device carries its coordinate, and the picture the colours of every axis, so that a page can recolour it.
        """
        size = 30.0 if len(self.seats) <= 64 else 24.0 if len(self.seats) <= 256 else 13.0
        picture = Svg(f"mesh {self.spec} coloured by {self.axis}")
        top = 6.0
        if caption:
            picture.text(0, 13, f"{self.caption}; colour and number: place along {self.axis!r}", size=13)
            top = 28.0
        titled = any(self._title(sheet) for sheet in self.sheets)
        left, below = 0.0, top
        for sheet, seats in self.sheets.items():
            wide, tall = (1 + max(seat.at[side] for seat in seats) for side in (0, 1))
            if left and left + wide * size > PAPER:
                left, top = 0.0, below + 10
            start = top + (18 if titled else 0)
            if titled:
                picture.text(left + 6, top + 12, self._title(sheet), size=11, quiet=True)
            self._sheet(picture, seats, left + 6, start + 6, size)
            if self.slices > 1:
                picture.frame(left, start, wide * size + 10, tall * size + 10, self._title(sheet), dashed=True)
            left, below = left + wide * size + 26, max(below, start + tall * size + 14)
        return picture.render()

    @property
    def slices(self) -> int:
        """The number of slices."""
        return len({seat.slice_index for seat in self.seats})

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len({seat.host for seat in self.seats})

    def colours(self) -> str:
        """For every axis its fills and inks, as JSON: what a page needs to recolour the drawing."""
        table = {
            name: [[ramp(place, size), ink(place, size)] for place in range(size)]
            for name, size in self.spec.shape.items()
        }
        return json.dumps(table, separators=(",", ":"))

    def _sheet(self, picture: Svg, seats: Sequence[Seat], left: float, top: float, size: float) -> None:
        count = self.spec.shape[self.axis]
        for seat in seats:
            x, y, place = left + seat.at[0] * size, top + seat.at[1] * size, self._along(seat)
            slice_words = f", slice {seat.slice_index}" if self.slices > 1 else ""
            where = f"device {seat.device}, host {seat.host}{slice_words}"
            data = {"at": ",".join(map(str, seat.coordinate))}
            label = str(place) if size > 20 else ""
            colours = ramp(place, count), ink(place, count)
            hover = f"{where}: {self._named(seat)}"
            picture.box(x, y, size - GAP, size - GAP, colours[0], label, hover, ink=colours[1], data=data)
        for host in sorted({seat.host for seat in seats}) if self.hosts > 1 else ():
            places = [seat.at for seat in seats if seat.host == host]
            (x0, y0), (x1, y1) = (tuple(pick(p[side] for p in places) for side in (0, 1)) for pick in (min, max))
            if len(places) >= (x1 - x0 + 1) * (y1 - y0 + 1):  # a host whose devices form a rectangle on the paper
                x, y = left + x0 * size - GAP / 2, top + y0 * size - GAP / 2  # neighbours share a line
                picture.frame(x, y, (x1 - x0 + 1) * size, (y1 - y0 + 1) * size, f"host {host}")

    def _named(self, seat: Seat) -> str:
        return ", ".join(f"{name} {at}" for name, at in zip(self.spec.names, seat.coordinate, strict=True))

    def _repr_html_(self) -> str:
        return self.svg()


def _width(rows: Sequence[Sequence[Span]]) -> int:
    return max(sum(len(span.text) for span in row) for row in rows)


def _beside(sheets: Sequence[Sequence[list[Span]]]) -> list[list[Span]]:
    """Sheets beside each other, each padded to its width."""
    lines: list[list[Span]] = []
    for place in range(max((len(sheet) for sheet in sheets), default=0)):
        line: list[Span] = []
        for sheet in sheets:
            row = sheet[place] if place < len(sheet) else []
            line += [*row, Span(" " * (_width(sheet) - sum(len(span.text) for span in row)))]
        lines.append(line)
    return lines


def draw_mesh(mesh: MeshLike, axis: str | None = None) -> MeshDrawing:
    """The drawing of a mesh; an abstract one is laid out in plain rows.

    >>> print(draw_mesh("dp=2,tp=4"))
    mesh dp=2,tp=4: each device shows its place along 'tp'
      0 1 2 3
      0 1 2 3
    8 abstract devices
    """
    spec = MeshSpec.of(mesh)
    real = mesh if isinstance(mesh, Mesh) else None
    chosen = axis or next((name for name, size in reversed(spec.shape.items()) if size > 1), spec.names[-1])
    words = describe(real).devices if real is not None else plural(spec.size, "abstract device")
    seats = _real_seats(real) if real is not None else _plain_seats(spec)
    if len(seats) > MOST_SHOWN:
        words = f"{words}; the first {MOST_SHOWN:,} are drawn"
    return MeshDrawing(spec, tuple(seats[:MOST_SHOWN]), chosen, words).coloured_by(chosen)


def _plain_seats(spec: MeshSpec) -> list[Seat]:
    columns = _columns(spec)
    return [
        Seat(place, 0, 0, 0, (place % columns, place // columns), coordinate)
        for place, coordinate in enumerate(np.ndindex(*spec.sizes))
    ]


def _columns(spec: MeshSpec) -> int:
    """A row for each run of the last axis, and several runs where those rows would be a ribbon.

    >>> [_columns(MeshSpec.of(text)) for text in ("dp=2,tp=4", "dp=64", "fsdp=64,tp=8", "dp=16,fsdp=64,tp=3")]
    [4, 16, 16, 24]
    """
    columns = spec.sizes[-1] if 1 < spec.sizes[-1] <= WIDEST else min(16, spec.size)
    shown = min(spec.size, MOST_SHOWN)
    while shown > WIDEST * columns and 2 * columns <= WIDEST:
        columns *= 2
    return columns


def _real_seats(mesh: Mesh) -> list[Seat]:
    """Devices by physical coordinates where they have them (a torus is cut into planes), else host by host."""
    found = [(device, coordinate) for coordinate, device in np.ndenumerate(mesh.devices)]
    ids = {device.id: place for place, device in enumerate(sorted(mesh.devices.flat, key=lambda device: device.id))}
    hosts = sorted({_host(device) for device, _ in found})
    alone = len(hosts) == 1
    cores = 1 + max(getattr(device, "core_on_chip", 0) or 0 for device, _ in found)
    lane: dict[int, int] = dict.fromkeys(hosts, 0)
    seats: list[Seat] = []
    for device, coordinate in sorted(found, key=lambda pair: ids[pair[0].id]):
        host, slice_index = _host(device), getattr(device, "slice_index", 0) or 0
        physical = getattr(device, "coords", None)
        if physical is not None and device.platform == "tpu":
            x, y, plane = (*physical, 0, 0)[:3]
            at = (x * cores + (getattr(device, "core_on_chip", 0) or 0), y)
        else:
            place, plane = lane[host], 0
            at = (place % 16, place // 16) if alone else (place, hosts.index(host))
            lane[host] += 1
        seats.append(Seat(device.id, slice_index, plane, host, at, coordinate))
    return seats


def _host(device: Any) -> int:
    return int(device.process_index)
