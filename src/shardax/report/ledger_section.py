"""A ledger as report values: who sends how much over which axis, from which line of Python."""

from __future__ import annotations

from collections.abc import Sequence

from shardax.errors import plural
from shardax.proving.collectives import Collective
from shardax.proving.ledger import Ledger
from shardax.report.code_lines import code_around, short_file, still_in
from shardax.report.values import (
    Bar,
    Bars,
    Block,
    Cell,
    CodeSite,
    CodeSites,
    Column,
    Grid,
    Part,
    Section,
    Words,
    bytes_cell,
    count_cell,
)
from shardax.tables import show_bytes

OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")  # their colours, in order
MOST_SITES = 40

COLUMNS = (
    Column("operation", keep=9, cut="never"),
    Column("over", keep=8, cut="never"),
    Column("times", right=True, keep=6),
    Column("type", keep=3, code=True),
    Column("each", right=True, keep=4),
    Column("sent", right=True, keep=10),
    Column("phase", keep=3),
    Column("asked by", keep=2),
    Column("where", keep=7, code=True, cut="middle", least=14),
    Column("what", keep=1, cut="end", least=6),
)


def ledger_section(ledger: Ledger) -> Section:
    """Totals by axis, lines with their code, and every site."""
    if not len(ledger):
        said = [*ledger.notes, *ledger.warnings]
        return Section("Collectives", (Words(("none: no device sends anything", *said), "good"),))
    lead = f"{plural(ledger.executions, 'collective')} a step; each device sends {show_bytes(ledger.wire_bytes)}"
    blocks: list[Block | Section] = [by_axis(ledger), by_line(ledger)]
    warned = (*ledger.notes, *ledger.warnings)
    if warned:
        blocks.append(Words(warned, "warn"))
    blocks.append(Section("Every collective", (sites(ledger),), page_only=True))
    return Section("Collectives", tuple(blocks), lead)


def by_axis(ledger: Ledger) -> Bars:
    """One bar per set of axes, cut by operation."""
    bars: list[Bar] = []
    for axes, group in ledger.by_axis().items():
        rows = [row for row in ledger if row.axes == axes]
        parts = [
            Part(op, size, show_bytes(size), _colour(op))
            for op in sorted({row.op for row in rows}, key=_colour)
            if (size := sum(row.wire_bytes for row in rows if row.op == op))
        ]
        times = plural(group.executions, "collective")
        bars.append(Bar(over(axes, rows), tuple(parts), show_bytes(group.wire_bytes), times))
    return Bars("Sent by each device, by mesh axis", tuple(bars), legend=True)


def _colour(op: str) -> int:
    return OPS.index(op) if op in OPS else len(OPS)


def over(axes: Sequence[str], rows: Sequence[Collective]) -> str:
    """The axes of some rows in words."""
    return "×".join(axes) if axes else f"{rows[0].group_size} devices"


def by_line(ledger: Ledger) -> CodeSites:
    """One entry per Python line, the dearest first, with its code."""
    found: dict[tuple[str, int], list[Collective]] = {}
    for row in ledger:
        found.setdefault((row.file, row.line), []).append(row)
    ordered = sorted(found.items(), key=lambda item: -sum(row.wire_bytes for row in item[1]))
    made = tuple(_site(file, line, rows) for (file, line), rows in ordered[:MOST_SITES])
    return CodeSites("Lines that send most", made, ledger.wire_bytes)


def _site(file: str, line: int, rows: Sequence[Collective]) -> CodeSite:
    kinds: dict[tuple[str, str, str, str], list[Collective]] = {}
    for row in rows:
        kinds.setdefault((row.op, over(row.axes, [row]), row.phase, row.dtype), []).append(row)
    sized = sorted(kinds.items(), key=lambda item: -sum(row.wire_bytes for row in item[1]))
    details = tuple(
        (
            show_bytes(sum(row.wire_bytes for row in alike)),
            f"{sum(row.count for row in alike):,} × {op} over {axes}, {phase}, {dtype}",
        )
        for (op, axes, phase, dtype), alike in sized
    )
    function = rows[0].function.rpartition("<locals>.")[2]
    near = "~" if all(row.nearest for row in rows) else ""
    return CodeSite(
        place=f"{near}{short_file(file)}:{line}" if file else "no known line",
        function=function,
        size=sum(row.wire_bytes for row in rows),
        times=sum(row.count for row in rows),
        details=details,
        code=code_around(file, line) if still_in(file, line, function) else (),
        line=line,
        axes=", ".join(dict.fromkeys(over(row.axes, [row]) for _, alike in sized for row in alike)),
    )


def sites(ledger: Ledger) -> Grid:
    """The rows of the ledger, sites alike added up."""
    alike = ledger.group_by(_look)
    rows = tuple(
        (
            Cell(look[0]),
            Cell(look[1]),
            count_cell(group.executions),
            Cell(look[2]),
            bytes_cell(look[3]),
            bytes_cell(group.wire_bytes, whole=ledger.wire_bytes or None),
            Cell(look[4]),
            Cell(look[5]),
            Cell(look[6]),
            Cell(look[7]),
        )
        for look, group in alike.items()
    )
    return Grid("", COLUMNS, rows)


_Look = tuple[str, str, str, int, str, str, str, str]


def _look(row: Collective) -> _Look:
    what = "; ".join([*([row.path] if row.path else []), *row.notes])
    return (row.op, over(row.axes, [row]), row.dtype, row.payload_bytes, row.phase, row.origin, row.place, what)
