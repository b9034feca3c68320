"""A grid in the width there is: cells are cut to what their column can bear, then the least kept columns leave."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shardax.report.values import Cell, Column, Grid, Tone

GAP = 2
WORD = re.compile(r"[^/.\[\]']+")
TONES: dict[Tone, str] = {"plain": "", "good": "green", "warn": "yellow", "bad": "red", "quiet": "dim"}


@dataclass(frozen=True)
class GridText:
    """A grid that rich can print; how many rows and which columns are missing is said below it."""

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = self.grid.without_empty_columns
        rows = grid.rows[: grid.most]
        widths = fit_columns(grid.columns, rows, options.max_width)
        shown = [place for place, width in enumerate(widths) if width]
        columns = [(grid.columns[place], widths[place]) for place in shown]
        paths = {
            place: cut_apart([row[place].text for row in rows], widths[place])
            for place in shown
            if grid.columns[place].cut == "middle"
        }
        yield from _lines([Cell(column.name, tone="quiet") for column, _ in columns], columns)
        for row in rows:
            cells = [
                replace(row[place], text=paths[place][row[place].text]) if place in paths else row[place]
                for place in shown
            ]
            yield from _lines(cells, columns)
        total = self.grid.total or len(self.grid.rows)
        if total > len(rows):
            yield Text(f"… and {total - len(rows):,} more", "dim")
        yield from (Text(note, "dim") for note in self.grid.notes)


def _lines(cells: Sequence[Cell], columns: Sequence[tuple[Column, int]]) -> Iterator[Text]:
    """A row: one line, or as many as its longest wrapped cell needs."""
    parts = [_parts(cell.text, column, width) for cell, (column, width) in zip(cells, columns, strict=True)]
    for number in range(max(map(len, parts))):
        line = Text(no_wrap=True)
        for place, (cell, (column, width)) in enumerate(zip(cells, columns, strict=True)):
            text = parts[place][number] if number < len(parts[place]) else ""
            pad = " " * (width - cell_len(text))
            line.append(" " * GAP if place else "").append(pad + text if column.right else text + pad, TONES[cell.tone])
        line.rstrip()
        yield line


def _parts(text: str, column: Column, width: int) -> list[str]:
    if column.cut == "wrap":
        return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    return [cut(text, width)]


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
    kept = list(range(len(columns)))
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


def cut_apart(texts: Sequence[str], width: int) -> dict[str, str]:
    """Paths in no more than `width` characters; those that would look the same keep the word that tells them apart.

    >>> cut_apart(["opt/state/0/mu/blocks/up/kernel", "opt/state/0/nu/blocks/up/kernel"], 16).values()
    dict_values(['…/mu…s/up/kernel', '…/nu…s/up/kernel'])
    """
    shown = {text: cut(text, width, "middle") for text in texts}
    groups: dict[str, list[str]] = {}
    for text, short in shown.items():
        groups.setdefault(short, []).append(text)
    for alike in groups.values():
        words = [list(WORD.finditer(text)) for text in alike]
        column = next((found for found in zip(*words, strict=False) if len({word[0] for word in found}) > 1), ())
        for text, word in zip(alike, column, strict=False):
            shown[text] = _around(text, word.start(), word.end(), width)
    return shown


def _around(text: str, start: int, end: int, width: int) -> str:
    """A word of a text, with the mark before it, and as much of the end as there is room for."""
    head = f"…{text[max(start - 1, 0) : end]}" if start > 1 else text[:end]
    tail = width - len(head) - 1
    if end >= len(text) - tail:
        return f"…{text[len(text) - width + 1 :]}"
    return cut(head, width) if tail < 1 else f"{head}…{text[len(text) - tail :]}"
