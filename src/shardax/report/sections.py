"""From any value of shardax to what a report shows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardax.errors import Offence, ShardaxError, plural
from shardax.names.analysis import LayoutAnalysis
from shardax.names.layout import Layout
from shardax.names.layout_file import LayoutDiff
from shardax.names.lint import LintReport
from shardax.names.mesh import MeshSpec
from shardax.names.mesh_build import describe
from shardax.proving.check import Check
from shardax.proving.diff import ProofDiff
from shardax.proving.ledger import Ledger
from shardax.proving.proof import Proof
from shardax.report.check_section import check_section
from shardax.report.draw import Drawing, draw
from shardax.report.layout_section import analysis_section, layout_diff_section, layout_section, lint_section
from shardax.report.ledger_section import ledger_section
from shardax.report.mesh_drawing import MeshDrawing, draw_mesh
from shardax.report.proof_section import proof_section
from shardax.report.values import (
    Bars,
    Block,
    Cell,
    Chart,
    CodeSites,
    Column,
    Grid,
    Pictures,
    Roofline,
    Section,
    Stats,
    Verdict,
    Words,
)
from shardax.tables import Table

BLOCKS = (Grid, Bars, Stats, Verdict, Words, CodeSites, Roofline, Chart, Pictures, Section)
OFFENCES = (
    Column("where", code=True, keep=10, cut="middle", least=14),
    Column("problem", keep=9, cut="wrap", least=28),
    Column("shape", code=True, keep=5),
    Column("spec", code=True, keep=6),
    Column("rule", code=True, keep=4),
    Column("would work", keep=7, cut="wrap", least=16),
)


def shown_as(value: object) -> Block | Section:
    """What a report shows of a value: a section of blocks, or one block.

    >>> shown_as("plain words")
    Words(lines=('plain words',), tone='plain')
    """
    if isinstance(value, BLOCKS):
        return value
    for kinds, made in SHOWN:
        if isinstance(value, kinds):
            return made(value)
    table = getattr(value, "table", None)
    found = table() if callable(table) else None
    return Grid.of(found) if isinstance(found, Table) else Words(tuple(str(value).splitlines()))


def mesh_section(mesh: Mesh | AbstractMesh | MeshSpec) -> Section:
    """A mesh: its picture, and which axis crosses which boundary where its devices are known."""
    drawing = Pictures((draw_mesh(mesh),))
    blocks: tuple[Block, ...] = (drawing, Grid.of(describe(mesh).table())) if isinstance(mesh, Mesh) else (drawing,)
    return Section(f"Mesh {MeshSpec.of(mesh)}", blocks)


def proof_diff_section(difference: ProofDiff) -> Section:
    """The numbers before and after, and every difference."""
    before, after = difference.names
    numbers = Grid.of(difference.table())
    blocks: list[Block | Section] = [Grid("", numbers.columns, numbers.rows, most=40)]
    if difference.changes:
        blocks.append(Section("What else differs", (offences_grid(difference.changes),)))
    same = "nothing differs" if not difference else ""
    return Section(f"{before} → {after}", tuple(blocks), same)


def error_section(error: ShardaxError) -> Section:
    """Everything that an error says, each offender in a row."""
    many = len(error.offences)
    blocks: list[Block] = [Verdict("bad", plural(many, "problem") if many else "Error", error.headline)]
    if many:
        blocks.append(offences_grid(error.offences))
    if error.remedy:
        blocks.append(Words((error.remedy,)))
    return Section(type(error).__name__, tuple(blocks))


def offences_grid(offences: Sequence[Offence]) -> Grid:
    """Offences in rows; facts that none of them has make no column."""
    rows = [
        (each.where, each.problem, _text(each.shape), _text(each.spec), _text(each.rule), each.remedy or "")
        for each in offences
    ]
    cells = tuple(tuple(map(Cell, row)) for row in rows)
    return Grid("", OFFENCES, cells, most=40).without_empty_columns


def _text(fact: object) -> str:
    return "" if fact is None else str(fact)


SHOWN: tuple[tuple[type | tuple[type, ...], Callable[[Any], Block | Section]], ...] = (
    (Layout, layout_section),
    (LayoutAnalysis, analysis_section),
    (LintReport, lint_section),
    (LayoutDiff, layout_diff_section),
    (Proof, proof_section),
    (Check, check_section),
    (ProofDiff, proof_diff_section),
    (Ledger, ledger_section),
    (ShardaxError, error_section),
    ((Mesh, AbstractMesh, MeshSpec), mesh_section),
    ((Drawing, MeshDrawing), lambda value: Pictures((value,))),
    ((jax.Array, jax.ShapeDtypeStruct, Sharding), lambda value: Pictures((draw(value),))),
    (Table, Grid.of),
)
