"""Layouts and proofs side by side, as report values."""

from __future__ import annotations

from shardax.errors import plural
from shardax.names.layout_file import LayoutDiff
from shardax.proving.diff import ProofDiff
from shardax.report.offences import offences_grid
from shardax.report.values import Block, Cell, Column, Grid, Section, Words

DIFFERENCES = (
    Column("path", code=True, keep=10, cut="middle", least=16),
    Column("before", code=True, keep=8, least=12),
    Column("after", code=True, keep=8, least=12),
    Column("change", right=True, keep=9),
)


def layout_diff_section(diff: LayoutDiff) -> Section:
    """The leaves that differ."""
    before, after = diff.mesh
    title = f"Layouts on mesh {before}" if before == after else f"Layouts: mesh {before} → {after}"
    if not diff.rows:
        return Section(title, (Words(("no leaf differs",), "good"),))
    rows = tuple(tuple(Cell(text) for text in row) for row in diff.rows)
    leaves = plural(len(rows), "leaf differs", "leaves differ")
    return Section(title, (Grid("", DIFFERENCES, rows, most=40),), leaves)


def proof_diff_section(difference: ProofDiff) -> Section:
    """The numbers before and after, and every difference."""
    before, after = difference.names
    numbers = Grid.of(difference.table())
    blocks: list[Block | Section] = [Grid("", numbers.columns, numbers.rows, most=40)]
    if difference.changes:
        blocks.append(Section("What else differs", (offences_grid(difference.changes),)))
    same = "nothing differs" if not difference else ""
    return Section(f"{before} → {after}", tuple(blocks), same)
