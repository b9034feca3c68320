"""What a report is made of: plain frozen values that `text.py` prints and `html.py` turns into a page.

A room's value (a layout, a proof) becomes a `Section` of these blocks once; both renderers show the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from shardax.tables import Table, show_bytes, show_count

Tone = Literal["plain", "good", "warn", "bad", "quiet"]


@dataclass(frozen=True)
class Cell:
    """One cell of a grid: what is read, what it is sorted by (the text where None), and how it is meant."""

    text: str
    sort: float | str | None = None
    tone: Tone = "plain"
    share: float | None = None  # of the whole, drawn as a small bar where there is room


@dataclass(frozen=True)
class Column:
    """A column of a grid. In a narrow terminal those with the least `keep` leave first."""

    name: str
    right: bool = False
    code: bool = False
    keep: int = 5
    cut: Literal["end", "middle", "never", "wrap"] = "end"
    least: int = 8  # characters it may be cut or wrapped down to before a column leaves


@dataclass(frozen=True)
class Grid:
    """A table whose columns can be sorted and, where it is long, searched. A terminal shows the first `most` rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    most: int = 12
    total: int | None = None  # of the rows there would be, when not all were kept

    @property
    def without_empty_columns(self) -> Grid:
        """The same grid without columns in which no row has a word (all of them, where that is none)."""
        kept = [place for place in range(len(self.columns)) if any(row[place].text for row in self.rows)]
        if not kept or len(kept) == len(self.columns):
            return self
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in kept), rows=rows)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"grid {self.title!r}: a row of {len(row)} cells under {len(self.columns)} columns")

    @classmethod
    def of(cls, table: Table) -> Grid:
        """A plain table as a grid.

        >>> Grid.of(Table("sizes", ("path", "bytes"), (("w", "64 B"),), right=("bytes",))).columns[1].right
        True
        """
        columns = tuple(Column(name, name in table.right, cut="middle" if name == "path" else "end")
                        for name in table.columns)  # fmt: skip
        rows = tuple(tuple(Cell(text) for text in row) for row in table.rows)
        return cls(table.title, columns, rows, table.notes, most=40)


@dataclass(frozen=True)
class Part:
    """A piece of a bar: its name, its size, the words for its size, and the number of its colour."""

    label: str
    size: float
    text: str
    colour: int = 0


@dataclass(frozen=True)
class Bar:
    """One bar: a name before it, its parts, and words after it."""

    label: str
    parts: tuple[Part, ...]
    text: str
    detail: str = ""
    tone: Tone = "plain"

    @property
    def size(self) -> float:
        """All parts together."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Bars:
    """Bars on one scale; `limit` draws the line that they should stay below."""

    title: str
    bars: tuple[Bar, ...]
    limit: float | None = None
    limit_text: str = ""
    legend: bool = False  # are the parts of a bar explained below it?
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What the full width stands for."""
        return max([bar.size for bar in self.bars] + [self.limit or 0.0]) or 1.0


@dataclass(frozen=True)
class Stat:
    """One number worth reading from afar."""

    label: str
    text: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Stats:
    """A row of such numbers."""

    stats: tuple[Stat, ...]


@dataclass(frozen=True)
class Verdict:
    """The answer in a word, and its reason."""

    tone: Tone
    word: str
    reason: str


@dataclass(frozen=True)
class Words:
    """Sentences, each of its own."""

    lines: tuple[str, ...]
    tone: Tone = "plain"


@dataclass(frozen=True)
class CodeSite:
    """What one Python line costs, with the line and its neighbours as they were when the report was made."""

    place: str
    function: str
    size: int
    times: int
    details: tuple[tuple[str, str], ...]  # per kind of operation its size and words
    code: tuple[tuple[int, str], ...]  # line number, text; empty where the file is not here
    line: int
    axes: str

    @property
    def text(self) -> str:
        """The line itself."""
        return next((text.strip() for number, text in self.code if number == self.line), "")


@dataclass(frozen=True)
class CodeSites:
    """Lines of the program by what they cost, the dearest first."""

    title: str
    sites: tuple[CodeSite, ...]
    whole: int
    unit: str = "sent by each device"
    most: int = 8


@dataclass(frozen=True)
class Roof:
    """One resource of a roofline: FLOPs per byte that it moves, and FLOP/s it allows at that."""

    name: str
    bandwidth: float  # bytes per second; 0: this is the compute roof
    intensity: float
    rate: float
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """Which resource bounds a step: the lowest of the points on the roofs."""

    peak: float
    roofs: tuple[Roof, ...]
    bound_by: str


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name and its points."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """Something over time, such as losses by step.

    >>> Chart.of("training", {"loss": [4.2, 3.1]}, "step", "loss").lines[0].points
    ((0, 4.2), (1, 3.1))
    """

    title: str
    lines: tuple[Line, ...]
    across: str = ""
    up: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        lines: Mapping[str, Iterable[float] | Iterable[tuple[float, float]]],
        across: str = "",
        up: str = "",
        notes: tuple[str, ...] = (),
    ) -> Chart:
        """A chart of named lines, each of heights or of (place, height)."""
        found = tuple(
            Line(label, tuple(point if isinstance(point, tuple) else (at, point) for at, point in enumerate(points)))
            for label, points in lines.items()
        )
        return cls(title, found, across, up, notes)


@dataclass(frozen=True)
class Span:
    """Characters with the colours they stand in ("" for those of the terminal)."""

    text: str
    fill: str = ""
    ink: str = ""


class Drawn(Protocol):
    """Something that is a picture in a page and characters in a terminal."""

    def svg(self, caption: bool = True) -> str:
        """One SVG element."""
        ...

    def spans(self, width: int = 100) -> list[list[Span]]:
        """Lines of characters, no wider than that where there is a way."""
        ...

    @property
    def caption(self) -> str:
        """What is to be seen."""
        ...


@dataclass(frozen=True)
class Pictures:
    """Drawings beside each other."""

    drawings: tuple[Drawn, ...]
    notes: tuple[str, ...] = ()


Block = Grid | Bars | Stats | Verdict | Words | CodeSites | Roofline | Chart | Pictures


@dataclass(frozen=True)
class Section:
    """A titled sequence of blocks and sections; `page_only` ones are too long for a terminal."""

    title: str
    blocks: tuple[Block | Section, ...]
    lead: str = ""
    page_only: bool = False

    def walk(self) -> Iterable[Block]:
        """Every block below, in order."""
        for block in self.blocks:
            if isinstance(block, Section):
                yield from block.walk()
            else:
                yield block


# ---- cells ----------------------------------------------------------------------------------------------------------


def bytes_cell(count: float, tone: Tone = "plain", whole: float | None = None) -> Cell:
    """Bytes, sorted by their number."""
    return Cell(show_bytes(count), float(count), tone, None if not whole else count / whole)


def count_cell(count: float, tone: Tone = "plain") -> Cell:
    """A number, sorted by its value."""
    return Cell(f"{count:,}" if isinstance(count, int) else show_count(count), float(count), tone)


def show_seconds(seconds: float) -> str:
    """A time for people.

    >>> show_seconds(0.00835), show_seconds(2.5e-6), show_seconds(0), show_seconds(90)
    ('8.35 ms', '2.5 µs', '0 s', '90 s')
    """
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if 0 < seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
