"""A mesh as a picture: devices on their physical grid, coloured along one axis, hosts and slices outlined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from shardax.errors import UnknownAxisError, did_you_mean
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.names.mesh_build import describe
from shardax.report.svg import Svg, colour

MOST_SHOWN = 1024


@dataclass(frozen=True)
class Seat:
    """One device: its id, where it stands in its slice, its host and slice, and its mesh coordinate."""

    device: int
    slice_index: int
    host: int
    at: tuple[int, int]  # column, row on the paper
    coordinate: tuple[int, ...]


@dataclass(frozen=True)
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
        return MeshDrawing(self.spec, self.seats, axis, self.words)

    def _along(self, seat: Seat) -> int:
        return seat.coordinate[self.spec.names.index(self.axis)]

    def __str__(self) -> str:
        lines = [f"mesh {self.spec}: each device shows its place along {self.axis!r}"]
        for slice_index in sorted({seat.slice_index for seat in self.seats}):
            seats = [seat for seat in self.seats if seat.slice_index == slice_index]
            if slice_index or any(seat.slice_index for seat in self.seats):
                lines.append(f"slice {slice_index}")
            lines += self._rows(seats)
        return "\n".join([*lines, self.words])

    def _rows(self, seats: Sequence[Seat]) -> list[str]:
        """Rows of places; a double space or an empty line is the border of a host."""
        by_place = {seat.at: seat for seat in seats}
        columns, rows = (1 + max(place[side] for place in by_place) for side in (0, 1))
        width = max(len(str(self._along(seat))) for seat in seats)
        lines: list[str] = []
        for row in range(min(rows, 32)):
            text, above = "", row > 0
            for column in range(min(columns, 64)):
                seat = by_place.get((column, row))
                left = by_place.get((column - 1, row))
                gap = "  │ " if seat and left and seat.host != left.host else " " if column else "  "
                text += gap + (str(self._along(seat)) if seat else "").rjust(width)
            first, over = by_place.get((0, row)), by_place.get((0, row - 1))
            if above and first and over and first.host != over.host:
                lines.append("  " + "─" * (len(text) - 2))
            lines.append(text + (" …" if columns > 64 else ""))
        return [*lines, "  …"] if rows > 32 else lines

    def svg(self) -> str:
        """The drawing as one SVG element: colour is the place along the axis, frames are hosts, dashes slices."""
        size, gap = (26.0, 14.0) if len(self.seats) <= 256 else (14.0, 8.0)
        picture = Svg(f"mesh {self.spec} coloured by {self.axis}")
        picture.text(0, 14, f"{self.spec} — colour: place along {self.axis!r}; frame: host", size=13)
        count, left = self.spec.shape[self.axis], 0.0
        for slice_index in sorted({seat.slice_index for seat in self.seats}):
            seats = [seat for seat in self.seats if seat.slice_index == slice_index]
            for seat in seats:
                x, y = left + 6 + seat.at[0] * size, 34 + seat.at[1] * size
                label = str(self._along(seat)) if size > 20 else ""
                hover = f"device {seat.device}, host {seat.host}, slice {seat.slice_index}, {self._named(seat)}"
                picture.box(x, y, size - 3, size - 3, colour(self._along(seat), count), label, hover)
            self._frames(picture, seats, left, size)
            wide = 1 + max(seat.at[0] for seat in seats)
            tall = 1 + max(seat.at[1] for seat in seats)
            if len({seat.slice_index for seat in self.seats}) > 1:
                picture.outline(left, 26, wide * size + 10, tall * size + 14, f"slice {slice_index}", dashed=True)
            left += wide * size + gap + 12
        return picture.render()

    def _frames(self, picture: Svg, seats: Sequence[Seat], left: float, size: float) -> None:
        for host in sorted({seat.host for seat in seats}):
            places = [seat.at for seat in seats if seat.host == host]
            (x0, y0), (x1, y1) = (tuple(pick(p[side] for p in places) for side in (0, 1)) for pick in (min, max))
            if len(places) == (x1 - x0 + 1) * (y1 - y0 + 1):  # a host whose devices form a rectangle on the paper
                x, y = left + 6 + x0 * size - 2, 34 + y0 * size - 2
                picture.outline(x, y, (x1 - x0 + 1) * size + 1, (y1 - y0 + 1) * size + 1, f"host {host}")

    def _named(self, seat: Seat) -> str:
        return ", ".join(f"{name} {at}" for name, at in zip(self.spec.names, seat.coordinate, strict=True))

    def _repr_html_(self) -> str:
        return self.svg()


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
    words = describe(real).devices if real is not None else f"{spec.size} abstract devices"
    seats = _real_seats(real) if real is not None else _plain_seats(spec)
    if len(seats) > MOST_SHOWN:
        words = f"{words}; the first {MOST_SHOWN} are drawn"
    return MeshDrawing(spec, tuple(seats[:MOST_SHOWN]), chosen, words).coloured_by(chosen)


def _plain_seats(spec: MeshSpec) -> list[Seat]:
    columns = spec.sizes[-1] if 1 < spec.sizes[-1] <= 32 else min(16, spec.size)
    return [
        Seat(place, 0, 0, (place % columns, place // columns), coordinate)
        for place, coordinate in enumerate(np.ndindex(*spec.sizes))
    ]


def _real_seats(mesh: Mesh) -> list[Seat]:
    """Devices by physical coordinates where they have them (a torus is cut into planes), else host by host."""
    found = [(device, coordinate) for coordinate, device in np.ndenumerate(mesh.devices)]
    hosts = sorted({_host(device) for device, _ in found})
    lane: dict[int, int] = dict.fromkeys(hosts, 0)
    seats: list[Seat] = []
    for device, coordinate in found:
        host, slice_index = _host(device), getattr(device, "slice_index", 0) or 0
        physical = getattr(device, "coords", None)
        if physical is None or device.platform != "tpu":
            at = (lane[host], hosts.index(host))
            lane[host] += 1
        else:
            at = _on_paper(physical, getattr(device, "core_on_chip", 0), mesh)
        seats.append(Seat(device.id, slice_index, host, at, coordinate))
    return seats


def _host(device: Any) -> int:
    return int(device.process_index)


def _on_paper(coords: Sequence[int], core: int, mesh: Mesh) -> tuple[int, int]:
    """x and y as they are, planes of z side by side, the cores of a chip side by side."""
    cores = 1 + max(getattr(device, "core_on_chip", 0) or 0 for device in mesh.devices.flat)
    wide = 1 + max(device.coords[0] for device in mesh.devices.flat)
    x, y, z = (*coords, 0, 0)[:3]
    return ((x + z * wide) * cores + (core or 0), y)
