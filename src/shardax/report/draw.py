"""`draw`: an array or sharding of any rank, or a mesh, as text for a terminal and as SVG for a page or notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from shardax.names.mesh import AnyMesh, MeshSpec
from shardax.names.spec import SpecLike
from shardax.report.blocks import Blocks, blocks_of, blocks_of_spec, devices_in_words
from shardax.report.mesh_drawing import MeshDrawing, draw_mesh
from shardax.report.palette import ink, ramp
from shardax.report.svg import Svg
from shardax.report.values import Span

MOST_ROWS, MOST_COLUMNS, MOST_PANELS = 16, 16, 8
PAPER, CELL = 460.0, 26.0


@dataclass(frozen=True)
class Panel:
    """A two-dimensional cut through an array: rows × columns of blocks; None stands for blocks left out."""

    label: str
    rows: tuple[int | None, ...]
    columns: tuple[int | None, ...]
    cells: tuple[tuple[tuple[int, ...] | None, ...], ...]


@dataclass(frozen=True, repr=False)
class Drawing:
    """An array as panels of blocks. `str()` draws it in a terminal, a notebook shows it as SVG."""

    blocks: Blocks
    row_dim: int | None
    column_dim: int | None
    panels: tuple[Panel, ...]
    left_out: int
    name: str = ""

    def __str__(self) -> str:
        return "\n".join("".join(span.text for span in line) for line in self.spans())

    __repr__ = __str__  # at a prompt, asking for a drawing draws it

    @property
    def words(self) -> str:
        """Shape, spec and mesh."""
        return f"{list(self.blocks.shape)} {self.blocks.title}"

    @property
    def caption(self) -> str:
        """The name, if there is one, and the words."""
        return f"{self.name}: {self.words}" if self.name else self.words

    def _way(self, dim: int | None, arrow: str) -> str:
        if dim is None:
            return ""
        axes = self.blocks.axes[dim]
        return f"dim {dim} {arrow}{f' {axes}' if axes else ''}"

    @property
    def _ways(self) -> str:
        """Which dimensions are drawn in which direction."""
        return ", ".join(way for way in (self._way(self.row_dim, "↓"), self._way(self.column_dim, "→")) if way)

    @property
    def _shades(self) -> dict[tuple[int, ...], tuple[str, str]]:
        """Fill and ink of every device set: a set has one colour wherever it appears."""
        sets = sorted({cell for panel in self.panels for row in panel.cells for cell in row if cell})
        return {cell: (ramp(place, len(sets)), ink(place, len(sets))) for place, cell in enumerate(sets)}

    def spans(self, width: int = 100) -> list[list[Span]]:
        """Lines of characters with the colours of the blocks; columns that have no room are left out in the middle."""
        heads = [self.caption, self._ways] if self._ways else [self.caption]
        line = "   ".join(heads)
        lines = [[Span(line)]] if len(line) <= width else [[Span(head)] for head in heads]
        shades = self._shades
        for panel in self.panels:
            lines += [[Span(panel.label)]] if panel.label else []
            lines += _boxes(panel, shades, width)
        if self.left_out:
            lines.append([Span(f"… and {self.left_out} more panels")])
        return lines

    def svg(self, caption: bool = True) -> str:
        """The drawing as one SVG element; panels flow beside each other."""
        picture, shades = Svg(self.caption), self._shades
        top = 8.0
        if caption:
            picture.text(0, 13, self.caption, size=13)
            top = 34.0
        picture.text(0, top + 2, self._ways or "one block", size=11, quiet=True)
        top += 12
        left, below = 0.0, top
        for panel in self.panels:
            width = max(34.0, 10.0 + 6.6 * max(len(_cell_text(cell)) for row in panel.cells for cell in row))
            wide = width * len(panel.columns)
            if left and left + wide > PAPER:
                left, top = 0.0, below + 14
            start = top
            if panel.label:
                picture.text(left, top + 11, panel.label, size=11, quiet=True)
                start += 18
            for y, row in enumerate(panel.cells):
                for x, cell in enumerate(row):
                    fill, words = shades[cell] if cell else ("none", "")
                    tip = f"devices {devices_in_words(cell, 60)}" if cell else "left out"
                    at = (left + x * width, start + y * CELL)
                    picture.box(*at, width - 2, CELL - 2, fill, _cell_text(cell), tip, ink=words)
            left, below = left + wide + 18, max(below, start + CELL * len(panel.rows))
        if self.left_out:
            picture.text(0, below + 16, f"… and {self.left_out} more panels", size=11, quiet=True)
        return picture.render()

    def _repr_html_(self) -> str:
        return self.svg()


def draw_spec(spec: SpecLike, mesh: AnyMesh, shape: tuple[int, ...], name: str = "") -> Drawing:
    """The drawing of an array that does not exist: a spec, a mesh of any kind, a shape.

    >>> draw_spec(["tp"], MeshSpec.of("dp=2,tp=2").abstract(), (4,)).blocks.holders
    {(0,): (0, 2), (1,): (1, 3)}
    """
    return _drawing(blocks_of_spec(spec, mesh, shape), name)


def draw(value: Any, shape: Sequence[int] | None = None) -> Drawing | MeshDrawing:
    """Draw which device holds which block of an array or sharding (any rank), or where a mesh's devices stand.

    >>> import jax, shardax as sx
    >>> print(draw(jax.NamedSharding(sx.make_mesh("dp=2,tp=4"), jax.P("dp", "tp")), (8, 16)))
    [8, 16] P('dp', 'tp') on dp=2, tp=4   dim 0 ↓ dp, dim 1 → tp
    ┌─────┬─────┬─────┬─────┐
    │  0  │  1  │  2  │  3  │
    ├─────┼─────┼─────┼─────┤
    │  4  │  5  │  6  │  7  │
    └─────┴─────┴─────┴─────┘
    """
    if isinstance(value, (Mesh, AbstractMesh, MeshSpec)):
        return draw_mesh(value)
    return _drawing(blocks_of(value, shape))


def _drawing(blocks: Blocks, name: str = "") -> Drawing:
    row_dim, column_dim = _two_dims(blocks.counts)
    outer = [dim for dim, count in enumerate(blocks.counts) if dim not in (row_dim, column_dim) and count > 1]
    places = list(product(*(range(blocks.counts[dim]) for dim in outer)))
    panels = tuple(
        _panel(blocks, row_dim, column_dim, dict(zip(outer, at, strict=True))) for at in places[:MOST_PANELS]
    )
    return Drawing(blocks, row_dim, column_dim, panels, max(0, len(places) - MOST_PANELS), name)


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


def _boxes(panel: Panel, shades: Mapping[tuple[int, ...], tuple[str, str]], room: int) -> Iterator[list[Span]]:
    """A grid of box characters around centred texts, all of one width."""
    width = max(5, max(len(_cell_text(cell)) for row in panel.cells for cell in row) + 2)
    places = _elided(len(panel.columns), max(3, (room - 1) // (width + 1)))
    bars = ["─" * width] * len(places)
    yield [Span(f"┌{'┬'.join(bars)}┐")]
    for number, row in enumerate(panel.cells):
        if number:
            yield [Span(f"├{'┼'.join(bars)}┤")]
        line = [Span("│")]
        for cell in (None if place is None else row[place] for place in places):
            fill, words = shades[cell] if cell else ("", "")
            line += [Span(_cell_text(cell).center(width), fill, words), Span("│")]
        yield line
    yield [Span(f"└{'┴'.join(bars)}┘")]
