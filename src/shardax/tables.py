"""`Table`: rows of text that know how to show themselves, plainly or as HTML.

Rooms return tables; only `report/` adds colour and pages. So a value prints well without importing rich.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass

# What the front door has registered; the last one counts.
_notebook: list[Callable[[object], str]] = []
_terminal: list[Callable[[object], object]] = []


def values_show(in_a_notebook: Callable[[object], str], in_a_terminal: Callable[[object], object]) -> None:
    """Say how values show themselves. Rooms may not reach up to `report/`; the front door hands it down here."""
    _notebook.append(in_a_notebook)
    _terminal.append(in_a_terminal)


class Reported:
    """A value that shows itself as its report does: in a notebook, and where rich prints it."""

    def _repr_html_(self) -> str:
        return _notebook[-1](self) if _notebook else f"<pre>{html.escape(str(self))}</pre>"

    def __rich__(self) -> object:
        return _terminal[-1](self) if _terminal else str(self)


@dataclass(frozen=True)
class Table:
    """A titled grid of strings; columns named in `right` are aligned to the right.

    >>> print(Table("memory", ("leaf", "bytes"), (("w", "64 B"), ("bias", "8 B")), right=("bytes",)))
    memory
    leaf  bytes
    ----  -----
    w      64 B
    bias    8 B
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns: {row}"
                )

    def __str__(self) -> str:
        if not self.columns:
            return "\n".join((self.title, *self.notes))
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        rule = tuple("-" * width for width in widths)
        lines = [self._line(row, widths) for row in (self.columns, rule, *self.rows)]
        return "\n".join(([self.title] if self.title else []) + lines + list(self.notes))

    def _line(self, row: tuple[str, ...], widths: list[int]) -> str:
        cells = (
            cell.rjust(width) if name in self.right else cell.ljust(width)
            for name, cell, width in zip(self.columns, row, widths, strict=True)
        )
        return "  ".join(cells).rstrip()

    def _repr_html_(self) -> str:
        def cells(tag: str, row: tuple[str, ...]) -> str:
            sides = ("right" if name in self.right else "left" for name in self.columns)
            return "".join(
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, row, strict=True)
            )

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        head = f"<thead><tr>{cells('th', self.columns)}</tr></thead>"
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{notes}"


def show_bytes(count: float) -> str:
    """Bytes for people, in binary units.

    >>> show_bytes(0), show_bytes(1536), show_bytes(16 * 2**30), show_bytes(-2048)
    ('0 B', '1.5 KiB', '16 GiB', '-2 KiB')
    """
    size = float(abs(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    number = f"{size:.0f}" if size >= 100 or size == int(size) else f"{size:.1f}"
    return f"{sign}{number.removesuffix('.0')} {unit}"


def parse_bytes(text: str | int) -> int:
    """The inverse for thresholds that people write: binary units, with or without the i.

    >>> parse_bytes("64MB"), parse_bytes("1.5 GiB"), parse_bytes(10)
    (67108864, 1610612736, 10)
    """
    if isinstance(text, int):
        return text
    stripped = text.strip().lower().removesuffix("b").removesuffix("i").strip()
    power = {"k": 1, "m": 2, "g": 3, "t": 4}.get(stripped[-1:], 0)
    digits = stripped[:-1] if power else stripped
    try:
        return int(float(digits) * 1024**power)
    except ValueError:
        raise ValueError(f"not a number of bytes: {text!r}; write it like 4096, '64MB' or '1.5GiB'") from None


def show_count(count: float) -> str:
    """A large count for people.

    >>> show_count(950), show_count(8_030_261_248), show_count(1.5e15)
    ('950', '8.03 B', '1.5e+15')
    """
    for limit, unit in ((1e3, ""), (1e6, " K"), (1e9, " M"), (1e12, " B"), (1e15, " T")):
        if abs(count) < limit:
            scaled = count / (limit / 1e3) if unit else count
            return f"{scaled:.3g}{unit}"
    return f"{count:.3g}"


def show_flops(count: float) -> str:
    """Floating-point operations for people, in decimal units: never to be taken for bytes.

    >>> show_flops(950), show_flops(368_293_445_632), show_flops(6.11e14), show_flops(2.5e19)
    ('950 FLOP', '368 GFLOP', '611 TFLOP', '25 EFLOP')
    """
    size, units = float(count), iter(("", "k", "M", "G", "T", "P", "E"))
    unit = next(units)
    while abs(size) >= 999.5 and unit != "E":
        size, unit = size / 1000, next(units)
    return f"{size:.3g} {unit}FLOP"
