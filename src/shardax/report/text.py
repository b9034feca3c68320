"""A report for a terminal of any width: the same blocks as on a page, with rich's colours where there are any."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from shardax.report.grid_text import TONES, GridText, cut
from shardax.report.palette import kind
from shardax.report.sections import shown_as
from shardax.report.values import (
    Bars,
    Block,
    Chart,
    CodeSites,
    Grid,
    Pictures,
    Roofline,
    Section,
    Span,
    Stats,
    Verdict,
    Words,
    show_seconds,
)
from shardax.tables import show_bytes, show_flops

MARKS = "█▓▒░▚▞▤"  # where there is no colour, the kinds of a bar are told apart by these
MOST_BAR = 48
SPARKS = "▁▂▃▄▅▆▇█"


def renderable(value: object) -> RenderableType:
    """What `rich.print` needs to show a value: a layout, proof, ledger, diff, mesh, error, table, drawing or text."""
    return Shown(shown_as(value))


def print_report(*values: object, console: Console | None = None) -> None:
    """Print values after each other, an empty line between them."""
    where = console or Console(highlight=False)
    for number, value in enumerate(values):
        if number:
            where.print()
        where.print(renderable(value))


@dataclass(frozen=True)
class Shown:
    """A block or section that rich can print."""

    part: Block | Section
    level: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        part, width = self.part, options.max_width
        if isinstance(part, Section):
            yield from _section(part, self.level)
            return
        title = getattr(part, "title", "")
        if title:
            yield Text(title, "bold")
        match part:
            case Grid():
                yield GridText(part)
            case Bars():
                yield from _bars(part, width, console.color_system is not None)
            case Stats():
                yield from _stats(part, width)
            case Verdict():
                yield Text.assemble((part.word, f"bold {TONES[part.tone]}".strip()), f"  {part.reason}")
            case Words():
                yield from (Text(line, TONES[part.tone]) for words in part.lines for line in wrapped(words, width))
            case CodeSites():
                yield from _code_sites(part, width)
            case Roofline():
                yield from _roofline(part)
            case Chart():
                yield from _chart(part, width)
            case Pictures():
                yield from _pictures(part, width)


def _section(section: Section, level: int) -> Iterator[RenderableType]:
    """Heading, lead, blocks with air between them; what is meant for pages only is left out below the top."""
    yield Text(section.title, "bold" if level else "bold underline")
    if section.lead:
        yield Text(section.lead, "dim")
    shown = [block for block in section.blocks if not (isinstance(block, Section) and block.page_only)]
    for number, block in enumerate(shown):
        if number or not level:
            yield Text()
        yield Shown(block, level + 1)


# ---- bars and numbers -----------------------------------------------------------------------------------------------


def _bars(bars: Bars, width: int, coloured: bool) -> Iterator[Text]:
    labels = min(max((cell_len(bar.label) for bar in bars.bars), default=0), max(12, width // 3))
    amounts = max((cell_len(bar.text) for bar in bars.bars), default=0)
    details = max((cell_len(bar.detail) + 2 for bar in bars.bars if bar.detail), default=0)
    if width - labels - amounts - details < MOST_BAR // 2:
        details = 0
    room = max(8, min(MOST_BAR, width - labels - amounts - details - 4))
    for bar in bars.bars:
        line = Text.assemble((cut(bar.label, labels, "middle").ljust(labels), TONES[bar.tone]), "  ")
        line.append_text(_track(bars, bar.parts, room, coloured))
        line.append(f"  {cut(bar.text, max(8, width - labels - room - 4)):>{amounts}}")
        yield line.append(f"  {bar.detail}", "dim") if details and bar.detail else line
    if bars.limit is not None and bars.limit_text:
        at = labels + 2 + min(room, round(room * bars.limit / bars.scale))
        yield Text(f"{f'{bars.limit_text} ┘':>{max(at, len(bars.limit_text) + 2)}}", "dim")
    if bars.legend:
        yield _legend(bars, coloured)
    yield from (Text(note, "dim") for note in bars.notes)


def _track(bars: Bars, parts: Sequence[Any], room: int, coloured: bool) -> Text:
    """Parts in whole characters; rounding at the running total keeps the sum right, and what is there is seen."""
    track, total, drawn = Text(), 0.0, 0
    for part in parts:
        total += part.size
        end = max(round(room * total / bars.scale), drawn + (1 if part.size and drawn < room else 0))
        mark = "█" if coloured else MARKS[part.colour % len(MARKS)]
        track.append(mark * (end - drawn), Style(color=kind(part.colour)) if coloured else "")
        drawn = end
    return track.append("·" * (room - drawn), "dim")


def _legend(bars: Bars, coloured: bool) -> Text:
    found: dict[str, tuple[int, str]] = {}
    for bar in bars.bars:
        for part in bar.parts:
            found.setdefault(part.label, (part.colour, part.text if len(bars.bars) == 1 else ""))
    line = Text()
    for label, (colour, amount) in found.items():
        mark = "█" if coloured else MARKS[colour % len(MARKS)]
        line.append(mark, Style(color=kind(colour)) if coloured else "")
        line.append(f" {label}{f' {amount}' if amount else ''}   ", "dim")
    line.rstrip()
    return line


def _stats(stats: Stats, width: int) -> Iterator[Text]:
    labels = max(cell_len(stat.label) for stat in stats.stats)
    texts = max(cell_len(stat.text) for stat in stats.stats)
    for stat in stats.stats:
        line = Text.assemble((stat.label.ljust(labels), "dim"), "  ")
        line.append(stat.text.ljust(texts), f"bold {TONES[stat.tone]}".strip())
        line.append(f"  {cut(stat.detail, max(8, width - labels - texts - 4))}", "dim")
        line.rstrip()
        yield line


# ---- lines of code, times, pictures ---------------------------------------------------------------------------------


def _code_sites(sites: CodeSites, width: int) -> Iterator[Text]:
    sizes = [show_bytes(site.size) for site in sites.sites[: sites.most]]
    wide = max(map(len, sizes), default=0)
    for size, site in zip(sizes, sites.sites, strict=False):
        share = f"{site.size / sites.whole:.0%}" if sites.whole else ""
        inside = f" in {site.function}" if site.function else ""
        words = f"{inside}, over {site.axes}"
        head = Text.assemble(
            (f"{size:>{wide}} ", "bold"), (f"{share:>4}  ", "dim"), (site.place, "cyan"), (words, "dim")
        )
        head.truncate(width, overflow="ellipsis")
        yield head
        indent = " " * (wide + 7)
        if site.text:
            yield Text(indent + cut(site.text, width - len(indent)))
        sized = site.details[:3]
        for amount, words in sized:
            line = f"{amount:>{max(len(amount) for amount, _ in sized)}}  {words}"
            yield Text(indent + cut(line, width - len(indent)), "dim")
    if len(sites.sites) > sites.most:
        rest = sum(site.size for site in sites.sites[sites.most :])
        yield Text(f"… and {len(sites.sites) - sites.most} more lines, {show_bytes(rest)}", "dim")


def _roofline(roofline: Roofline) -> Iterator[Text]:
    yield Text(f"peak {show_flops(roofline.peak)}/s, bound by {roofline.bound_by}")
    for roof in roofline.roofs:
        speed = f"{show_bytes(roof.bandwidth)}/s × {roof.intensity:.3g} FLOP per byte"
        yield Text(f"{roof.name}: {speed} = {show_flops(roof.rate)}/s, {show_seconds(roof.seconds)}")


def _chart(chart: Chart, width: int) -> Iterator[Text]:
    """A line of blocks for each line of the chart, all on one scale, with its first and last height."""
    heights = [height for line in chart.lines for _, height in line.points]
    labels = max((cell_len(line.label) for line in chart.lines), default=0)
    low, span = (min(heights), max(heights) - min(heights)) if heights else (0.0, 0.0)
    for line in chart.lines:
        if not line.points:
            yield Text(f"{line.label.ljust(labels)}  no points", "dim")
            continue
        ends = f"{line.points[0][1]:.4g} → {line.points[-1][1]:.4g}"
        room = max(8, min(60, width - labels - len(ends) - 4))
        chosen = [line.points[at * len(line.points) // room][1] for at in range(room)]
        sparks = "".join(SPARKS[round((height - low) / (span or 1.0) * (len(SPARKS) - 1))] for height in chosen)
        yield Text(f"{line.label.ljust(labels)}  ").append(sparks, "cyan").append(f"  {ends}", "bold")
    if chart.up or chart.across:
        yield Text(f"{chart.up} by {chart.across}", "dim")
    yield from (Text(note, "dim") for note in chart.notes)


def _pictures(pictures: Pictures, width: int) -> Iterator[Text]:
    for number, drawing in enumerate(pictures.drawings):
        if number:
            yield Text()
        for spans in drawing.spans(width):
            yield _line(spans)
    yield from (Text(note, "dim") for note in pictures.notes)


def _line(spans: Iterable[Span]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for span in spans:
        line.append(span.text, Style(color=span.ink, bgcolor=span.fill) if span.fill else "")
    return line


def wrapped(words: str, width: int) -> list[str]:
    """Words in lines that break between words only, further ones a little further in.

    >>> wrapped("  lost: rule 1", 10), wrapped("", 10)
    (['  lost:', '    rule 1'], [''])
    """
    indent = words[: len(words) - len(words.lstrip())]
    lines = textwrap.wrap(
        words.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  " if indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]
