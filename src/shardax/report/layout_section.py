"""A layout as report values: totals, what lies on several devices, how arrays are cut, every leaf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardax.errors import plural
from shardax.names.analysis import LayoutAnalysis
from shardax.names.decision import Decision
from shardax.names.layout import Layout
from shardax.names.layout_file import LayoutDiff
from shardax.names.lint import LintReport
from shardax.names.spec import canonical
from shardax.report.draw import draw_spec
from shardax.report.mesh_drawing import draw_mesh
from shardax.report.values import (
    Bar,
    Bars,
    Block,
    Cell,
    Column,
    Grid,
    Part,
    Pictures,
    Section,
    Stat,
    Stats,
    Words,
    bytes_cell,
    count_cell,
)
from shardax.tables import show_bytes

MOST_DRAWN = 6
MOST_LEAVES = 2000  # of which a page keeps a row each: it should open at once

LEAVES = (
    Column("path", code=True, keep=10, cut="middle", least=28),
    Column("array", code=True, keep=7, cut="middle", least=16),
    Column("spec", code=True, keep=9, least=16),
    Column("per device", right=True, keep=8),
    Column("copies", right=True, keep=5),
    Column("rule", code=True, keep=4, least=20),
)
CORRECTIONS = (
    Column("path", code=True, keep=10, cut="middle", least=20),
    Column("dim", right=True, keep=4),
    Column("loses", code=True, keep=9),
    Column("why", keep=8, cut="wrap", least=20),
    Column("costs each device", right=True, keep=7),
    Column("would work", keep=5, cut="wrap", least=14),
)
OFFENDERS = (
    Column("path", code=True, keep=10, cut="middle", least=24),
    Column("spec", code=True, keep=5, least=14),
    Column("copies", right=True, keep=6),
    Column("per device", right=True, keep=9),
    Column("could be sharded", keep=8, cut="wrap", least=24),
)
FINDINGS = (
    Column("kind", keep=10, cut="never"),
    Column("where", code=True, keep=9, cut="middle", least=14),
    Column("problem", keep=8, cut="wrap", least=28),
    Column("would work", keep=4, cut="wrap", least=16),
    Column("rule", code=True, keep=3, least=8),
)
DIFFERENCES = (
    Column("path", code=True, keep=10, cut="middle", least=16),
    Column("before", code=True, keep=8, least=12),
    Column("after", code=True, keep=8, least=12),
    Column("change", right=True, keep=9),
)


def layout_section(layout: Layout, title: str = "") -> Section:
    """Everything worth seeing of a layout."""
    analysis = layout.analysis()
    blocks: list[Block | Section] = [_totals(layout, analysis)]
    if lost := corrections_grid(layout.decisions):
        blocks.append(Section("Corrections", (lost,), "what could not be as it was asked"))
    blocks.append(_by_part(layout.decisions))
    if analysis.offenders:
        blocks.append(Section("Copies", (offenders_grid(analysis),), "arrays that stand on several devices"))
    pictures = drawings([(d.path, d.shape, d.spec, d.nbytes) for d in layout.decisions], layout.mesh)
    blocks += [
        Section("Mesh", (Pictures((draw_mesh(layout.mesh),)),), page_only=True),
        Section("How arrays are cut", (pictures,), "which device holds which block", page_only=True),
        Section("Every leaf", (leaves_grid(layout.decisions),)),
    ]
    return Section(title or f"Layout on mesh {layout.mesh_spec}", tuple(blocks))


def analysis_section(analysis: LayoutAnalysis) -> Section:
    """The worst offenders with the totals."""
    return Section(
        f"What is replicated on mesh {analysis.mesh}",
        (_analysis_stats(analysis), offenders_grid(analysis) if analysis.offenders else Words(("nothing",), "good")),
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


def layout_diff_section(diff: LayoutDiff) -> Section:
    """The leaves that differ."""
    before, after = diff.mesh
    title = f"Layouts on mesh {before}" if before == after else f"Layouts: mesh {before} → {after}"
    if not diff.rows:
        return Section(title, (Words(("no leaf differs",), "good"),))
    rows = tuple(tuple(Cell(text) for text in row) for row in diff.rows)
    leaves = plural(len(rows), "leaf differs", "leaves differ")
    return Section(title, (Grid("", DIFFERENCES, rows, most=40),), leaves)


# ---- parts ----------------------------------------------------------------------------------------------------------


def _totals(layout: Layout, analysis: LayoutAnalysis) -> Stats:
    return Stats(
        (
            Stat("on every device", show_bytes(layout.bytes_per_device), f"of {show_bytes(layout.nbytes)} in all"),
            Stat("leaves", f"{len(layout.decisions):,}", f"mesh {layout.mesh_spec}"),
            *_analysis_stats(analysis).stats[1:],
        )
    )


def _analysis_stats(analysis: LayoutAnalysis) -> Stats:
    corrected = analysis.corrected_leaves
    return Stats(
        (
            Stat("on every device", show_bytes(analysis.bytes_per_device), f"of {show_bytes(analysis.total_bytes)}"),
            Stat("also elsewhere", show_bytes(analysis.replicated_bytes), "bytes that another device holds too"),
            Stat("corrected", f"{corrected:,}", "leaves not as asked", "warn" if corrected else "good"),
        )
    )


def _by_part(decisions: Sequence[Decision]) -> Bars:
    """Bytes per device by the first key of the path, copies apart."""
    parts: dict[str, list[Decision]] = {}
    for decision in decisions:
        parts.setdefault(decision.path.partition("/")[0] or "(root)", []).append(decision)
    bars: list[Bar] = []
    for name, found in parts.items():
        alone = sum(d.bytes_per_device for d in found if d.copies == 1)
        copied = sum(d.bytes_per_device for d in found if d.copies > 1)
        pieces = (("here alone", alone, 0), ("in copies", copied, 1))
        drawn = tuple(Part(label, size, show_bytes(size), colour) for label, size, colour in pieces if size)
        bars.append(Bar(name, drawn, show_bytes(alone + copied)))
    bars.sort(key=lambda bar: -bar.size)
    left = (f"… and {len(bars) - 12} more, smaller",) if len(bars) > 12 else ()
    return Bars("Held by every device", tuple(bars[:12]), legend=True, notes=left)


def corrections_grid(decisions: Iterable[Decision]) -> Grid | None:
    """Every correction of some decisions; None where there is none."""
    rows = tuple(
        (
            Cell(d.path or "(root)"),
            count_cell(c.dim),
            Cell("+".join(c.axes) or "nothing", tone="warn"),
            Cell(f"{c.reason}: {c.detail}"),
            bytes_cell(c.bytes_per_device),
            Cell(c.remedy),
        )
        for d in decisions
        for c in d.fit.corrections
    )
    return Grid("", CORRECTIONS, tuple(sorted(rows, key=lambda row: -float(row[4].sort or 0)))) if rows else None


def offenders_grid(analysis: LayoutAnalysis) -> Grid:
    """The leaves whose copies cost most."""
    rows = tuple(
        (
            Cell(o.path or "(root)"),
            Cell(spec_text(o.spec)),
            count_cell(o.copies),
            bytes_cell(o.bytes_per_device),
            Cell(o.suggestion or "no unused axis divides", tone="plain" if o.suggestion else "quiet"),
        )
        for o in analysis.offenders
    )
    return Grid("", OFFENDERS, rows, most=5)


def leaves_grid(decisions: Sequence[Decision]) -> Grid:
    """One row per leaf, the largest on a device first; the smallest of very many are left out."""
    ordered = sorted(decisions, key=lambda d: (-d.bytes_per_device, d.path))
    whole = sum(d.bytes_per_device for d in decisions) or 1
    rows = tuple(
        (
            Cell(d.path or "(root)"),
            array_cell(d.dtype, d.shape, d.nbytes),
            Cell(spec_text(d.spec), tone="warn" if d.fit.corrections else "plain"),
            bytes_cell(d.bytes_per_device, whole=whole),
            count_cell(d.copies),
            Cell(d.rule),
        )
        for d in ordered[:MOST_LEAVES]
    )
    return Grid("", LEAVES, rows, total=len(ordered))


def array_cell(dtype: str, shape: Sequence[int], nbytes: int) -> Cell:
    """An array in short, sorted by its size."""
    return Cell(f"{dtype}[{','.join(map(str, shape))}]", float(nbytes))


def spec_text(spec: PartitionSpec) -> str:
    """A spec as it is written, without the comma of a single entry.

    >>> spec_text(PartitionSpec("tp")), spec_text(PartitionSpec(("dp", "tp"))), spec_text(PartitionSpec())
    ("P('tp')", "P(('dp', 'tp'))", 'P()')
    """
    text = str(spec)
    return f"{text[:-2]})" if text.endswith(",)") else text


def drawings(arrays: Iterable[tuple[str, tuple[int, ...], PartitionSpec, int]], mesh: Any) -> Pictures:
    """One drawing per way of cutting (spec and rank), of its largest array; the most bytes first."""
    ways: dict[tuple[PartitionSpec, int], list[tuple[int, str, tuple[int, ...], PartitionSpec]]] = {}
    for path, shape, spec, nbytes in arrays:
        if shape:
            key = (canonical(spec, mesh), len(shape))
            ways.setdefault(key, []).append((nbytes, path, shape, spec))
    ordered = sorted(ways.values(), key=lambda found: -sum(nbytes for nbytes, *_ in found))
    drawn = []
    for found in ordered[:MOST_DRAWN]:
        _, path, shape, spec = max(found, key=lambda entry: entry[0])
        others = f"{path} and {plural(len(found) - 1, 'other')}" if len(found) > 1 else path
        drawn.append(draw_spec(spec, mesh, shape, name=others))
    left = (f"… and {len(ordered) - MOST_DRAWN} more ways of cutting",) if len(ordered) > MOST_DRAWN else ()
    return Pictures(tuple(drawn), left)
