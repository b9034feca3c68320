"""A grid in the width there is: cells are cut to what their column can bear, then the least kept columns leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardax.report.values import Cell, Column, Grid

GAP = 2
TONES = {"plain": "", "good": "green", "warn": "yellow", "bad": "red", "quiet": "dim"}


@dataclass(frozen=True)
class GridText:
    """A grid that rich can print; how many rows and which columns are missing is said below it."""

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.grid.rows[: self.grid.most]
        widths = fit_columns(self.grid.columns, rows, options.max_width)
        shown = [place for place, width in enumerate(widths) if width]
        yield _row([self.grid.columns[place].name for place in shown], self._style(shown, widths), "dim")
        for row in rows:
            yield self._cells([row[place] for place in shown], shown, widths)
        total = self.grid.total or len(self.grid.rows)
        if total > len(rows):
            yield Text(f"… and {total - len(rows):,} more", "dim")
        yield from (Text(note, "dim") for note in self.grid.notes)

    def _style(self, shown: list[int], widths: Sequence[int]) -> list[tuple[Column, int]]:
        return [(self.grid.columns[place], widths[place]) for place in shown]

    def _cells(self, cells: list[Cell], shown: list[int], widths: Sequence[int]) -> Text:
        line = Text(no_wrap=True)
        for number, (cell, (column, width)) in enumerate(zip(cells, self._style(shown, widths), strict=True)):
            line.append(" " * GAP if number else "").append(_set(cell.text, column, width), TONES[cell.tone])
        line.rstrip()
        return line


def _row(texts: list[str], columns: list[tuple[Column, int]], style: str) -> Text:
    line = (" " * GAP).join(_set(text, *column) for text, column in zip(texts, columns, strict=True))
    return Text(line.rstrip(), style, no_wrap=True)


def _set(text: str, column: Column, width: int) -> str:
    """A text cut and padded to its column."""
    shown = cut(text, width, "middle" if column.cut == "middle" else "end")
    pad = " " * (width - cell_len(shown))
    return pad + shown if column.right else shown + pad


def fit_columns(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], room: int) -> list[int]:
    """The width of every column, 0 where it has to leave.

    >>> wide = (Column("path", keep=9, least=4), Column("rule", keep=1), Column("bytes", keep=8, cut="never"))
    >>> rows = [(Cell("a/long/path"), Cell("rule 0 'a'"), Cell("64 KiB"))]
    >>> fit_columns(wide, rows, 40), fit_columns(wide, rows, 28), fit_columns(wide, rows, 14)
    ([11, 10, 6], [9, 9, 6], [6, 0, 6])
    """
    natural = [
        max([cell_len(column.name), *(cell_len(row[place].text) for row in rows)])
        for place, column in enumerate(columns)
    ]
    empty = [not any(row[place].text for row in rows) for place in range(len(columns))]
    kept = [place for place in range(len(columns)) if not empty[place]] or list(range(len(columns)))
    least = [
        width if column.cut == "never" or column.right else min(width, max(column.least, cell_len(column.name)))
        for width, column in zip(natural, columns, strict=True)
    ]

    def needed(widths: Sequence[int]) -> int:
        return sum(widths[place] for place in kept) + GAP * (len(kept) - 1)

    while len(kept) > 1 and needed(least) > room:
        kept.remove(min(reversed(kept), key=lambda place: columns[place].keep))
    widths = list(natural)
    while needed(widths) > room:
        able = [place for place in kept if widths[place] > least[place]]
        if not able:
            break
        widths[max(able, key=lambda place: (widths[place], -columns[place].keep))] -= 1
    return [width if place in kept else 0 for place, width in enumerate(widths)]


def cut(text: str, width: int, where: Literal["end", "middle"] = "end") -> str:
    """A text in no more than `width` characters.

    >>> cut("params/layers/attention/kernel", 16, "middle"), cut("a long text", 8), cut("short", 8)
    ('params…on/kernel', 'a long …', 'short')
    """
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    if where == "end":
        return f"{text[: width - 1]}…"
    tail = (width - 1) * 3 // 5
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
