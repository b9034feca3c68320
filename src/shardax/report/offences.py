"""Offences in rows."""

from __future__ import annotations

from collections.abc import Sequence

from shardax.errors import Offence
from shardax.report.values import Cell, Column, Grid

OFFENCES = (
    Column("where", code=True, keep=10, cut="middle", least=14),
    Column("problem", keep=9, cut="wrap", least=28),
    Column("shape", code=True, keep=5),
    Column("spec", code=True, keep=6),
    Column("rule", code=True, keep=4),
    Column("would work", keep=7, cut="wrap", least=16),
)


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
