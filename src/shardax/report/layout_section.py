"""A layout as report values: totals, what lies on several devices, how arrays are cut, every leaf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardax.names.alike import alike
from shardax.names.analysis import LayoutAnalysis, suggestion_for
from shardax.names.decision import Decision
from shardax.names.layout import Layout
from shardax.names.mesh import MeshSpec
from shardax.report.cutting import array_cell, drawings, spec_text
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

MOST_LEAVES = 2000  # of which a page keeps a row each: it should open at once

LEAVES = (
    Column("path", code=True, keep=10, cut="middle", least=24),
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
LEAVES_ALIKE = Column("leaves", right=True, keep=8)
ALIKE = (LEAVES[0], LEAVES_ALIKE, *LEAVES[1:])
COPIES = (
    Column("path", code=True, keep=10, cut="middle", least=24),
    Column("spec", code=True, keep=5, least=14),
    Column("copies", right=True, keep=6),
    Column("per device", right=True, keep=9),
    Column("could be sharded", keep=8, cut="wrap", least=24),
)


def layout_section(layout: Layout, title: str = "") -> Section:
    """Everything worth seeing of a layout."""
    analysis = layout.analysis()
    blocks: list[Block | Section] = [_totals(layout, analysis)]
    if lost := corrections_grid(layout.decisions):
        blocks.append(Section("Corrections", (lost,), "what could not be as it was asked"))
    blocks.append(_by_part(layout.decisions))
    if copies := copies_grid(layout.decisions, layout.mesh_spec):
        blocks.append(Section("Copies", (copies,), "arrays that stand on several devices"))
    pictures = drawings([(d.path, d.shape, d.spec, d.nbytes) for d in layout.decisions], layout.mesh)
    blocks += [
        Section("Mesh", (Pictures((draw_mesh(layout.mesh),)),), page_only=True),
        Section("How arrays are cut", (pictures,), "which device holds which block", page_only=True),
        *_leaves(layout.decisions),
    ]
    return Section(title or f"Layout on mesh {layout.mesh_spec}", tuple(blocks))


def _leaves(decisions: Sequence[Decision]) -> list[Section]:
    """Leaves that are alike added up, then each; where none are alike, each is enough."""
    added_up, each = alike_grid(decisions), leaves_grid(decisions, MOST_LEAVES)
    if len(added_up.rows) == len(decisions):
        return [Section("Leaves", (each,))]
    lead = "those that are alike are added up"
    return [Section("Leaves", (added_up,), lead), Section("Every leaf", (each,), page_only=True)]


def analysis_section(analysis: LayoutAnalysis) -> Section:
    """The worst offenders with the totals."""
    return Section(
        f"What is replicated on mesh {analysis.mesh}",
        (_analysis_stats(analysis), offenders_grid(analysis) if analysis.offenders else Words(("nothing",), "good")),
    )


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
    return Grid("", COPIES, rows, most=5)


def leaves_grid(decisions: Sequence[Decision], keep: int | None = None) -> Grid:
    """One row per leaf (or of the first `keep`), the largest on a device first."""
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
        for d in ordered[:keep]
    )
    return Grid("", LEAVES, rows, total=len(ordered))


def alike_grid(decisions: Sequence[Decision]) -> Grid:
    """One row for all leaves that are alike, their bytes added up, the largest sum first."""
    groups = alike(decisions, lambda d: d.path, lambda d: (d.shape, d.dtype, d.spec, d.rule))
    whole = sum(d.bytes_per_device for d in decisions) or 1
    sized = sorted(groups.items(), key=lambda item: -sum(d.bytes_per_device for d in item[1]))
    rows = tuple(
        (
            Cell(path or "(root)"),
            count_cell(len(found)),
            array_cell(found[0].dtype, found[0].shape, found[0].nbytes),
            Cell(spec_text(found[0].spec), tone="warn" if found[0].fit.corrections else "plain"),
            bytes_cell(sum(d.bytes_per_device for d in found), whole=whole),
            count_cell(found[0].copies),
            Cell(found[0].rule),
        )
        for path, found in sized
    )
    return Grid("", ALIKE, rows)


def copies_grid(decisions: Sequence[Decision], mesh: MeshSpec) -> Grid | None:
    """What stands on several devices, leaves that are alike added up; None where nothing does."""
    copied = [d for d in decisions if d.copies > 1]
    groups = alike(copied, lambda d: d.path, lambda d: (d.shape, d.dtype, d.spec))
    sized = sorted(groups.items(), key=lambda item: -sum(d.bytes_per_device for d in item[1]))
    rows = tuple(
        (
            Cell(path or "(root)"),
            count_cell(len(found)),
            Cell(spec_text(found[0].spec)),
            count_cell(found[0].copies),
            bytes_cell(sum(d.bytes_per_device for d in found)),
            _suggestion(found, mesh),
        )
        for path, found in sized
    )
    return Grid("", (COPIES[0], LEAVES_ALIKE, *COPIES[1:]), rows, most=6) if rows else None


def _suggestion(found: Sequence[Decision], mesh: MeshSpec) -> Cell:
    words = suggestion_for(found[0], mesh, len(found))
    return Cell(words) if words else Cell("no unused axis divides", tone="quiet")
