"""From any value of shardax to what a report shows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, Sharding

from shardax.errors import ShardaxError, plural
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
from shardax.report.differences import layout_diff_section, proof_diff_section
from shardax.report.draw import Drawing, draw
from shardax.report.layout_section import analysis_section, layout_section
from shardax.report.ledger_section import ledger_section
from shardax.report.lint_section import lint_section
from shardax.report.mesh_drawing import MeshDrawing, draw_mesh
from shardax.report.offences import offences_grid
from shardax.report.proof_section import proof_section
from shardax.report.values import (
    Bars,
    Block,
    Chart,
    CodeSites,
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


def error_section(error: ShardaxError) -> Section:
    """Everything that an error says, each offender in a row."""
    many = len(error.offences)
    blocks: list[Block] = [Verdict("bad", plural(many, "problem") if many else "Error", error.headline)]
    if many:
        blocks.append(offences_grid(error.offences))
    if error.remedy:
        blocks.append(Words((error.remedy,)))
    return Section(type(error).__name__, tuple(blocks))


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
