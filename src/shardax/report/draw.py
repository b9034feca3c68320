"""`draw`: an array or sharding of any rank, or a mesh, as text for a terminal and as SVG for a page or notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardax.names.mesh import MeshSpec
from shardax.report.blocks import Blocks, blocks_of, devices_in_words
from shardax.report.mesh_drawing import MeshDrawing, draw_mesh
from shardax.report.svg import Svg, colour

MOST_ROWS, MOST_COLUMNS, MOST_PANELS = 16, 16, 8


@dataclass(frozen=True)
class Panel:
    """A two-dimensional cut through an array: rows × columns of blocks; None stands for blocks left out."""

    label: str
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]
    cells: tuple[tuple[tuple[int, ...] | None, ...], ...]


@dataclass(frozen=True)
class Drawing:
    """An array as panels of blocks. `str()` draws it in a terminal, a notebook shows it as SVG."""

    blocks: Blocks
    row_dim: int | None
    column_dim: int | None
    panels: tuple[Panel, ...]
    left_out: int

    def __str__(self) -> str:
        parts = [self.caption]
        for panel in self.panels:
            parts += [panel.label] if panel.label else []
            parts += list(_boxes([[_cell_text(cell) for cell in row] for row in panel.cells]))
        if self.left_out:
            parts.append(f"… and {self.left_out} more panels")
        return "\n".join(parts)

    @property
    def caption(self) -> str:
        """Shape, spec and mesh, and which dimension runs which way."""
        ways = [
            f"dim {dim} {arrow}{f' ({self.blocks.axes[dim]})' if self.blocks.axes[dim] else ''}"
            for dim, arrow in ((self.row_dim, "↓"), (self.column_dim, "→"))
            if dim is not None
        ]
        return f"{list(self.blocks.shape)} {self.blocks.title}" + (f"   {', '.join(ways)}" if ways else "")

    def svg(self) -> str:
        """The drawing as one SVG element; a device set has one colour wherever it appears."""
        sets = sorted({cell for panel in self.panels for row in panel.cells for cell in row if cell})
        shade = {cell: colour(place, len(sets)) for place, cell in enumerate(sets)}
        picture = Svg(self.caption)
        picture.text(0, 14, self.caption, size=13)
        top = 30.0
        for panel in self.panels:
            if panel.label:
                picture.text(0, top + 10, panel.label, size=11)
                top += 18
            width = max(46.0, 8.0 + 6.5 * max((len(_cell_text(c)) for row in panel.cells for c in row), default=0))
            for y, row in enumerate(panel.cells):
                for x, cell in enumerate(row):
                    fill = shade[cell] if cell else "none"
                    picture.box(x * width, top + y * 26, width, 26, fill, _cell_text(cell), self._hover(panel, y, x))
            top += 26 * len(panel.cells) + 12
        return picture.render()

    def _hover(self, panel: Panel, y: int, x: int) -> str:
        cell = panel.cells[y][x]
        return "left out" if cell is None else f"devices {devices_in_words(cell, 60)}"

    def _repr_html_(self) -> str:
        return self.svg()


def draw(value: Any, shape: Sequence[int] | None = None) -> Drawing | MeshDrawing:
    """Draw which device holds which block of an array or sharding (any rank), or where a mesh's devices stand.

    >>> import jax, shardax as sx
    >>> print(draw(jax.NamedSharding(sx.make_mesh("dp=2,tp=4"), jax.P("dp", "tp")), (8, 16)))
    [8, 16] P('dp', 'tp') on dp=2, tp=4   dim 0 ↓ (dp), dim 1 → (tp)
    ┌─────┬─────┬─────┬─────┐
    │  0  │  1  │  2  │  3  │
    ├─────┼─────┼─────┼─────┤
    │  4  │  5  │  6  │  7  │
    └─────┴─────┴─────┴─────┘
    """
    if isinstance(value, (Mesh, AbstractMesh, MeshSpec)):
        return draw_mesh(value)
    blocks = blocks_of(value, shape)
    row_dim, column_dim = _two_dims(blocks.counts)
    outer = [dim for dim, count in enumerate(blocks.counts) if dim not in (row_dim, column_dim) and count > 1]
    places = list(product(*(range(blocks.counts[dim]) for dim in outer)))
    panels = tuple(
        _panel(blocks, row_dim, column_dim, dict(zip(outer, at, strict=True))) for at in places[:MOST_PANELS]
    )
    return Drawing(blocks, row_dim, column_dim, panels, max(0, len(places) - MOST_PANELS))


def _two_dims(counts: tuple[int, ...]) -> tuple[int | None, int | None]:
    """The dimensions drawn as rows and columns: the two that are cut most, in their own order."""
    if not counts:
        return None, None
    if len(counts) == 1:
        return None, 0
    first, second = sorted(sorted(range(len(counts)), key=lambda dim: (-counts[dim], dim))[:2])
    return first, second


def _panel(blocks: Blocks, row_dim: int | None, column_dim: int | None, outer: dict[int, int]) -> Panel:
    rows = _elided(blocks.counts[row_dim], MOST_ROWS) if row_dim is not None else (0,)
    columns = _elided(blocks.counts[column_dim], MOST_COLUMNS) if column_dim is not None else (0,)

    def cell(row: int | None, column: int | None) -> tuple[int, ...] | None:
        if row is None or column is None:
            return None
        place = [outer.get(dim, 0) for dim in range(len(blocks.counts))]
        for dim, at in ((row_dim, row), (column_dim, column)):
            if dim is not None:
                place[dim] = at
        return blocks.holders[tuple(place)]

    label = ", ".join(f"block {at} of dim {dim}" for dim, at in outer.items())
    return Panel(label, rows, columns, tuple(tuple(cell(row, column) for column in columns) for row in rows))


def _elided(count: int, most: int) -> tuple[int | None, ...]:
    if count <= most:
        return tuple(range(count))
    return (*range(most // 2), None, *range(count - most // 2 + 1, count))


def _cell_text(cell: tuple[int, ...] | None) -> str:
    return "…" if cell is None else devices_in_words(cell)


def _boxes(cells: list[list[str]]) -> Iterator[str]:
    """A grid of box characters around centred texts, all of one width."""
    width = max(5, max(len(text) for row in cells for text in row) + 2)
    bars = ["─" * width] * len(cells[0])
    yield f"┌{'┬'.join(bars)}┐"
    for place, row in enumerate(cells):
        if place:
            yield f"├{'┼'.join(bars)}┤"
        yield f"│{'│'.join(text.center(width) for text in row)}│"
    yield f"└{'┴'.join(bars)}┘"
