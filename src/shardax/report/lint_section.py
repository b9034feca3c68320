"""What is wrong with rules, as report values."""

from __future__ import annotations

from shardax.errors import plural
from shardax.names.lint import LintReport
from shardax.report.values import Cell, Column, Grid, Section, Words

FINDINGS = (
    Column("kind", keep=10, cut="never"),
    Column("where", code=True, keep=9, cut="middle", least=14),
    Column("problem", keep=8, cut="wrap", least=28),
    Column("would work", keep=4, cut="wrap", least=16),
    Column("rule", code=True, keep=3, least=8),
)


def lint_section(report: LintReport) -> Section:
    """Every finding, or that there is none."""
    over = f"mesh {report.mesh}" if report.mesh else "no mesh given: axes are not checked"
    checked = f"{plural(report.leaves, 'leaf', 'leaves')}, {plural(report.rules, 'rule')}; {over}"
    if report.ok:
        return Section("Rules", (Words(("no problem",), "good"),), checked)
    rows = tuple(
        (
            Cell(f.kind, tone="bad"),
            Cell(f.offence.where),
            Cell(f.offence.problem),
            Cell(f.offence.remedy or ""),
            Cell(f.offence.rule or ""),
        )
        for f in report.findings
    )
    return Section(f"Rules: {plural(len(rows), 'problem')}", (Grid("", FINDINGS, rows, most=40),), checked)
