"""Every block of a report as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from shardax.report.charts import chart_svg, roofline_svg, short
from shardax.report.draw import Drawing
from shardax.report.markup import Markup, join, tag
from shardax.report.mesh_drawing import MeshDrawing
from shardax.report.palette import kind
from shardax.report.values import (
    Bar,
    Bars,
    Block,
    Cell,
    Chart,
    CodeSite,
    CodeSites,
    Column,
    Drawn,
    Grid,
    Pictures,
    Roofline,
    Section,
    Stats,
    Verdict,
    Words,
    show_seconds,
)
from shardax.tables import show_bytes, show_flops

SEARCHED_FROM = 20  # rows from which on a table can be searched
WHOLE, WHOLE_CODE = 18, 32  # characters up to which a cell never breaks
BARELY = 5  # rows more than a grid would show are shown too


class Anchors:
    """The names that sections of one page are linked by: readable, and each given once."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self.top: list[tuple[str, str]] = []

    def name(self, title: str) -> str:
        """A new name for a section at the top."""
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        number = self._given[slug] = self._given.get(slug, 0) + 1
        name = slug if number == 1 else f"{slug}-{number}"
        self.top.append((name, title))
        return name


def section_markup(section: Section, anchors: Anchors | None = None, level: int = 2, folded: bool = False) -> Markup:
    """A section with its heading; those at the top (with anchors) can be linked to, long ones may be folded."""
    name = anchors.name(section.title) if anchors else None
    heading = tag(f"h{min(level, 6)}", section.title)
    lead = [tag("p", section.lead, class_="lead")] if section.lead else []
    inner = (
        section_markup(block, None, level + 1, folded) if isinstance(block, Section) else block_markup(block, level + 1)
        for block in section.blocks
    )
    if folded and section.page_only:
        return tag("details", tag("summary", section.title), *lead, *inner)
    return tag("section", heading, *lead, *inner, id=name)


def part_markup(part: Block | Section, anchors: Anchors | None) -> Markup:
    """What stands at the top of a page, or (without anchors) in another's: a section, or a block as its own."""
    if isinstance(part, Section):
        return section_markup(part, anchors, folded=anchors is None)
    title = getattr(part, "title", "")
    return tag("section", block_markup(part, 2), id=anchors.name(title) if anchors and title else None)


def block_markup(block: Block, level: int) -> Markup:
    """One block, its title as a heading of that level."""
    title = getattr(block, "title", "")
    heading = tag(f"h{min(level, 6)}", title) if title else ""
    return join(heading, WRITTEN[type(block)](block), *(tag("p", note, class_="note") for note in _notes(block)))


def _notes(block: Block) -> tuple[str, ...]:
    notes: tuple[str, ...] = getattr(block, "notes", ())
    if isinstance(block, Grid) and block.total is not None and block.total > len(block.rows):
        return (f"the first {len(block.rows):,} of {block.total:,}", *notes)
    return notes


def _legend_of(named: list[tuple[str, str]]) -> Markup:
    entries = (tag("li", tag("i", style=f"background:{colour}"), label) for label, colour in named)
    return tag("ul", *entries, class_="legend")


# ---- tables ---------------------------------------------------------------------------------------------------------


def _grid(whole: Grid) -> Markup:
    grid = whole.without_empty_columns
    head = tag("tr", *map(_head, grid.columns))
    full = [max((row[place].share or 0.0 for row in grid.rows), default=0.0) for place in range(len(grid.columns))]
    most = grid.most if len(grid.rows) > grid.most + BARELY else len(grid.rows)
    body = (
        tag("tr", *map(_cell, row, grid.columns, full), class_="more" if place >= most else None)
        for place, row in enumerate(grid.rows)
    )
    table = tag("table", tag("thead", head), tag("tbody", *body))
    cut = most if most < len(grid.rows) else None
    return tag("div", table, class_="grid", data_most=cut, data_search=len(grid.rows) >= SEARCHED_FROM)


def _head(column: Column) -> Markup:
    return tag("th", column.name, scope="col", class_=_classes(column))


def _classes(column: Column) -> str | None:
    found = (("right", column.right), ("code", column.code), ("minor", column.keep <= 4))
    return " ".join(name for name, on in found if on) or None


def _cell(cell: Cell, column: Column, full: float) -> Markup:
    """A cell; the bar below a share is full for the largest share of its column."""
    tone = cell.tone if cell.tone != "plain" else ""
    short = "whole" if len(cell.text) <= (WHOLE_CODE if column.code else WHOLE) else ""
    names = " ".join(filter(None, (_classes(column), tone, short, "share" if cell.share is not None else "")))
    style = f"--share:{cell.share / (full or 1.0):.3f}" if cell.share is not None else None
    return tag("td", _breakable(cell.text) if column.code else cell.text, class_=names or None, style=style,
               data_sort=cell.sort)  # fmt: skip


def _breakable(text: str) -> Markup:
    """Paths may break after their separators, nowhere else."""
    parts = re.split(r"(?<=[/.,])(?=[^\s/.,\d])", text)
    return join(*(part for place, found in enumerate(parts) for part in ((tag("wbr"), found) if place else (found,))))


# ---- bars, numbers --------------------------------------------------------------------------------------------------


def _bars(bars: Bars) -> Markup:
    detailed = any(bar.detail for bar in bars.bars)
    at = None if bars.limit is None else 100 * bars.limit / bars.scale
    limit = Markup("") if at is None else _limit(at, bars.limit_text)
    rows = [tag("div", *_bar(bar, bars.scale, limit, detailed)) for bar in bars.bars]
    if at is not None:
        side = f"padding-right:{100 - at:.2f}%" if at > 50 else f"padding-left:{at:.2f}%;text-align:left"
        rows.append(tag("div", tag("span", bars.limit_text, class_="limit-text", style=side)))
    legend = [_legend_of(_parts(bars))] if bars.legend else []
    return join(tag("div", *rows, class_="bars detailed" if detailed else "bars"), *legend)


def _limit(at: float, words: str) -> Markup:
    """The line that bars should stay below, and what lies beyond it."""
    over = [tag("i", class_="over", style=f"left:{at:.2f}%")] if at < 100 else []
    return join(*over, tag("i", class_="limit", style=f"left:{at:.2f}%", title=words))


def _bar(bar: Bar, scale: float, limit: Markup, detailed: bool) -> Iterator[Markup]:
    parts = (
        tag(
            "b",
            style=f"width:{100 * part.size / scale:.3f}%;background:{kind(part.colour)}",
            title=f"{part.label} {part.text}",
        )
        for part in bar.parts
    )
    yield tag("span", bar.label, class_=f"label {bar.tone}")
    yield tag("span", *parts, limit, class_="track")
    yield tag("span", bar.text, class_="amount")
    if detailed:
        yield tag("span", bar.detail, class_="detail")


def _parts(bars: Bars) -> list[tuple[str, str]]:
    """Label and colour of every kind of part; sizes too where one bar is explained."""
    found: dict[str, tuple[str, int]] = {}
    for bar in bars.bars:
        for part in bar.parts:
            found.setdefault(
                part.label, (f"{part.label} {part.text}" if len(bars.bars) == 1 else part.label, part.colour)
            )
    return [(text, kind(colour)) for text, colour in found.values()]


def _stats(stats: Stats) -> Markup:
    shown = (
        (tag("dt", stat.label), tag("dd", stat.text, class_=stat.tone), tag("dd", stat.detail, class_="detail"))
        for stat in stats.stats
    )
    return tag("dl", *(tag("div", *each) for each in shown), class_="stats")


def _verdict(verdict: Verdict) -> Markup:
    return tag("p", tag("strong", verdict.word), " ", tag("span", verdict.reason), class_=f"verdict {verdict.tone}")


def _words(words: Words) -> Markup:
    return join(*(tag("p", line, class_=words.tone) for line in words.lines))


# ---- code -----------------------------------------------------------------------------------------------------------


def _code_sites(sites: CodeSites) -> Markup:
    shown = [_code_site(site, sites.whole) for site in sites.sites[: sites.most]]
    rest = [_code_site(site, sites.whole) for site in sites.sites[sites.most :]]
    if rest:
        shown.append(tag("details", tag("summary", f"{len(rest)} more lines"), *rest))
    return tag("div", *shown, class_="sites")


def _code_site(site: CodeSite, whole: int) -> Markup:
    share = site.size / whole if whole else 0.0
    code = (
        tag("span", tag("i", str(number)), f"{text}\n", class_="here" if number == site.line else None)
        for number, text in site.code
    )
    head = tag(
        "header",
        tag("strong", show_bytes(site.size), class_="amount"),
        tag("span", f"{share:.0%}", class_="percent"),
        tag("code", site.place),
        *([tag("span", f"in {site.function}")] if site.function else []),
        tag("span", f"over {site.axes}", class_="axes"),
    )
    details = tag("ul", *(tag("li", tag("span", size, class_="amount"), words) for size, words in site.details))
    return tag(
        "article", head, *([tag("pre", *code)] if site.code else []), details, style=f"--share:{100 * share:.1f}%"
    )


# ---- pictures -------------------------------------------------------------------------------------------------------


def _pictures(pictures: Pictures) -> Markup:
    return tag("div", *map(_picture, pictures.drawings), class_="pictures")


def _picture(drawing: Drawn) -> Markup:
    picture = tag("div", Markup(drawing.svg(caption=False)), class_="scroll")
    if isinstance(drawing, MeshDrawing):
        return _mesh(drawing, picture)
    if isinstance(drawing, Drawing) and drawing.name:
        caption = tag("strong", _breakable(drawing.name)), tag("br"), drawing.words
        return tag("figure", tag("figcaption", *caption), picture)
    return tag("figure", tag("figcaption", drawing.caption), picture)


def _mesh(drawing: MeshDrawing, picture: Markup) -> Markup:
    """A mesh with a button for every axis that it can be coloured along."""
    choices = (
        tag("button", name, type="button", data_axis=place, aria_pressed="true" if name == drawing.axis else "false")
        for place, name in enumerate(drawing.spec.names)
    )
    group = tag("span", *choices, class_="choices", role="group", aria_label="Colour by axis")
    words = tag("p", "colour and number: place along ", tag("b", drawing.axis), group, class_="way")
    return tag(
        "figure", tag("figcaption", drawing.caption), words, picture, class_="mesh", data_colours=drawing.colours()
    )


def _roofline(roofline: Roofline) -> Markup:
    columns = (
        Column("resource", keep=10),
        Column("bandwidth", right=True, keep=6),
        Column("FLOP per byte", right=True, keep=6),
        Column("allows", right=True, keep=8),
        Column("a step needs", right=True, keep=9),
    )
    rows = tuple(
        (
            Cell(roof.name, tone="warn" if roof.name == roofline.bound_by else "plain"),
            Cell(f"{show_bytes(roof.bandwidth)}/s", roof.bandwidth),
            Cell(short(roof.intensity), roof.intensity),
            Cell(f"{show_flops(roof.rate)}/s", roof.rate),
            Cell(show_seconds(roof.seconds), roof.seconds),
        )
        for roof in roofline.roofs
    )
    named = [(roof.name, kind(place)) for place, roof in enumerate(roofline.roofs)]
    picture = tag("figure", Markup(roofline_svg(roofline)), _legend_of(named))
    return join(picture, _grid(Grid("", columns, rows)))


def _chart(chart: Chart) -> Markup:
    named = [(line.label, kind(place)) for place, line in enumerate(chart.lines)]
    return tag("figure", Markup(chart_svg(chart)), _legend_of(named))


WRITTEN: dict[type, Callable[[Any], Markup]] = {
    Grid: _grid,
    Bars: _bars,
    Stats: _stats,
    Verdict: _verdict,
    Words: _words,
    CodeSites: _code_sites,
    Roofline: _roofline,
    Chart: _chart,
    Pictures: _pictures,
}
