"""Rooflines and lines over time as SVG: axes with few ticks, lines that are told apart in grey too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardax.report.palette import kind
from shardax.report.svg import Svg
from shardax.report.values import Chart, Roofline, show_seconds
from shardax.tables import show_bytes, show_flops

WIDE, TALL = 600.0, 260.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """From numbers to places on the paper, along a line or its logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)


def chart_svg(chart: Chart) -> str:
    """A chart as one SVG element."""
    points = [point for line in chart.lines for point in line.points]
    picture = Svg(chart.title or f"{chart.up} by {chart.across}")
    if not points:
        picture.text(0, 12, "no points", quiet=True)
        return picture.render()
    x = Scale(min(p[0] for p in points), max(p[0] for p in points), 0, WIDE)
    ups = ticks(min(p[1] for p in points), max(p[1] for p in points))
    y = Scale(ups[0], ups[-1], TALL, 0)
    for up in ups:
        picture.line([(0, y(up)), (WIDE, y(up))], opacity=0.15, width=1)
        picture.text(-8, y(up) + 4, f"{up:.6g}", anchor="end", size=11, quiet=True)
    for across in ticks(x.low, x.high, inside=True):
        picture.text(x(across), TALL + 18, f"{across:.6g}", anchor="middle", size=11, quiet=True)
    picture.text(WIDE, TALL + 36, chart.across, anchor="end", size=12, quiet=True)
    picture.text(-8, -12, chart.up, anchor="end", size=12, quiet=True)
    for place, line in enumerate(chart.lines):
        drawn = [(x(a), y(b)) for a, b in line.points]
        picture.line(drawn, kind(place), 2.0, dashed=place % 2 == 1)
        if drawn:
            at, height = line.points[-1]
            picture.dot(*drawn[-1], 3.5, kind(place), f"{line.label}: {height:.6g} at {at:.6g}")
    return picture.render()


def ticks(low: float, high: float, *, inside: bool = False, about: int = 5) -> list[float]:
    """Round numbers around (or inside) a range.

    >>> ticks(1.2, 4.3), ticks(1, 60, inside=True), ticks(3, 3)
    ([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], [10, 20, 30, 40, 50, 60], [2.0, 2.5, 3.0, 3.5, 4.0])
    """
    if high <= low:
        low, high = low - 1, high + 1
    rough = (high - low) / about
    unit = 10 ** math.floor(math.log10(rough))
    step = min((unit * size for size in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first, last = (math.ceil, math.floor) if inside else (math.floor, math.ceil)
    return [round(number * step, 12) for number in range(first(low / step), last(high / step) + 1)]


def roofline_svg(roofline: Roofline) -> str:
    """Bandwidths as roofs over a logarithmic floor; a dot is what a step reaches if that resource is its limit."""
    roofs = roofline.roofs
    knees = [roofline.peak / roof.bandwidth for roof in roofs]
    x = Scale(*_decades([*knees, *(roof.intensity for roof in roofs)]), 0, WIDE, log=True)
    rates = [roofline.peak, *(roof.rate for roof in roofs)]
    y = Scale(*_decades(rates), TALL, 0, log=True)
    picture = Svg(f"roofline: bound by {roofline.bound_by}")
    for power in _powers(x):
        picture.line([(x(power), 0), (x(power), TALL)], opacity=0.12, width=1)
        picture.text(x(power), TALL + 18, short(power), anchor="middle", size=11, quiet=True)
    for power in _powers(y):
        picture.line([(0, y(power)), (WIDE, y(power))], opacity=0.12, width=1)
        picture.text(-8, y(power) + 4, f"{show_flops(power)}/s", anchor="end", size=11, quiet=True)
    picture.text(WIDE, TALL + 36, "FLOP per byte moved", anchor="end", size=12, quiet=True)
    picture.line([(0, y(roofline.peak)), (WIDE, y(roofline.peak))], width=2)
    picture.text(WIDE, y(roofline.peak) - 10, f"peak {show_flops(roofline.peak)}/s", anchor="end", size=11)
    dots = [(x(roof.intensity), y(roof.rate)) for roof in roofs]
    for text, bandwidth in {f"{show_bytes(roof.bandwidth)}/s": roof.bandwidth for roof in roofs}.items():
        start, knee = max(x.low, y.low / bandwidth), roofline.peak / bandwidth
        low, high = (x(start), y(start * bandwidth)), (x(knee), y(roofline.peak))
        picture.line([low, high], width=1.5, opacity=0.55)
        beyond = max((roof.intensity for roof in roofs if roof.bandwidth == bandwidth), default=0.0)
        if beyond > knee:  # what lies there is not what limits the step
            picture.line([high, (x(beyond), y(beyond * bandwidth))], opacity=0.35, dashed=True)
        _along(picture, text, low, high, dots)
    for place, roof in enumerate(roofs):
        at = f"{short(roof.intensity)} FLOP per byte, {show_flops(roof.rate)}/s"
        hover = f"{roof.name}: {at}, {show_seconds(roof.seconds)}"
        picture.dot(x(roof.intensity), y(roof.rate), 6.5 if roof.name == roofline.bound_by else 4.5, kind(place), hover)
    return picture.render()


def _along(picture: Svg, text: str, low: Point, high: Point, dots: list[Point]) -> None:
    """Words along a roof, above it, where they are farthest from any dot."""
    wide = len(text) * 6.4
    length = math.dist(low, high) or 1.0
    spots = [share * max(length - wide, 0.0) for share in (0.04, 0.3, 0.6, 0.9)]
    middles = {spot: _between(low, high, (spot + wide / 2) / length) for spot in spots}
    spot = max(spots, key=lambda spot: min(math.dist(middles[spot], dot) for dot in dots))
    across, up = _between(low, high, spot / length)
    turned = math.degrees(math.atan2(high[1] - low[1], high[0] - low[0]))
    picture.text(across, up - 6, text, size=11, quiet=True, turned=turned)


def _between(low: Point, high: Point, share: float) -> Point:
    return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])


def _decades(values: list[float]) -> tuple[float, float]:
    """Whole powers of ten around positive values, at least two apart."""
    low, high = (math.log10(pick(values)) for pick in (min, max))
    return 10.0 ** math.floor(low - 0.1), 10.0 ** math.ceil(high + 0.1)


def _powers(scale: Scale) -> list[float]:
    low, high = round(math.log10(scale.low)), round(math.log10(scale.high))
    every = max(1, round((high - low) / 6))
    return [10.0**power for power in range(low, high + 1, every)]


def short(number: float) -> str:
    """A number in three digits or so.

    >>> short(0.02517), short(243.8), short(17_300), short(4.2e8)
    ('0.0252', '244', '17,300', '4e8')
    """
    if number >= 1e6:
        return f"{number:.0e}".replace("e+0", "e")
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
