"""A picture as SVG text: boxes, words and lines that grow the canvas; works in light and dark, needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Literal

from shardax.report.palette import DARK_INK

Anchor = Literal["start", "middle", "end"]


class Svg:
    """Collects elements; `render` wraps them in a canvas just large enough.

    Words take the colour of the page around (`currentColor`), so that a picture reads on white and on black.
    """

    def __init__(self, title: str) -> None:
        self._title, self._parts = title, [f"<title>{html.escape(title)}</title>"]
        self._left = self._top = self._right = self._bottom = 0.0

    def _grow(self, left: float, top: float, right: float, bottom: float) -> None:
        self._left, self._top = min(self._left, left), min(self._top, top)
        self._right, self._bottom = max(self._right, right), max(self._bottom, bottom)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        label: str = "",
        hover: str = "",
        *,
        ink: str = DARK_INK,
        data: Mapping[str, str] | None = None,
    ) -> None:
        """A rectangle with a centred label and a hover text; `data` becomes its data- attributes."""
        self._grow(x, y, x + width, y + height)
        tip = f"<title>{html.escape(hover)}</title>" if hover else ""
        extra = "".join(f' data-{name}="{html.escape(value)}"' for name, value in (data or {}).items())
        edge = ' stroke="currentColor" stroke-opacity=".3" stroke-dasharray="3 3"' if fill == "none" else ""
        self._parts.append(
            f'<g{extra}>{tip}<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="3" '
            f'fill="{fill}"{edge}/>'
        )
        if label:
            words = "currentColor" if fill == "none" else ink
            self._parts.append(
                f'<text x="{_n(x + width / 2)}" y="{_n(y + height / 2 + 4)}" font-size="11" text-anchor="middle" '
                f'fill="{words}" pointer-events="none">{html.escape(label)}</text>'
            )
        self._parts.append("</g>")

    def frame(self, x: float, y: float, width: float, height: float, hover: str, *, dashed: bool = False) -> None:
        """An empty frame around other elements."""
        self._grow(x - 1, y - 1, x + width + 1, y + height + 1)
        line = 'stroke-dasharray="5 4" stroke-opacity=".55"' if dashed else 'stroke-opacity=".5"'
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="6" fill="none" '
            f'stroke="currentColor" stroke-width="1.25" {line}><title>{html.escape(hover)}</title></rect>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        anchor: Anchor = "start",
        weight: str = "normal",
        quiet: bool = False,
        turned: float = 0.0,
    ) -> None:
        """Words with their baseline at y, turned around its start by degrees."""
        width = len(words) * size * 0.58
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        self._grow(left, y - size, left + width, y + size * 0.35)
        faint = ' fill-opacity=".68"' if quiet else ""
        faint += f' transform="rotate({_n(turned)} {_n(x)} {_n(y)})"' if turned else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="currentColor"{faint}>{html.escape(words)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str = "currentColor",
        width: float = 1.5,
        *,
        opacity: float = 1.0,
        dashed: bool = False,
    ) -> None:
        """A line through points."""
        for x, y in points:
            self._grow(x, y, x, y)
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}" '
            f'stroke-opacity="{opacity:g}"{dash}/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str, hover: str) -> None:
        """A filled circle."""
        self._grow(x - radius, y - radius, x + radius, y + radius)
        self._parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}" stroke="currentColor" '
            f'stroke-width="1.5"><title>{html.escape(hover)}</title></circle>'
        )

    def render(self) -> str:
        """The whole element; it scales down with its container."""
        left, top = self._left - 2, self._top - 2
        width, height = self._right - left + 2, self._bottom - top + 2
        body = "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(self._title, quote=True)}" '
            f'viewBox="{_n(left)} {_n(top)} {_n(width)} {_n(height)}" width="{width:.0f}" '
            f'style="max-width:100%;height:auto" '
            f'font-family="ui-sans-serif,system-ui,sans-serif">{body}</svg>'
        )


def _n(number: float) -> str:
    """A coordinate without needless digits: pages hold thousands of them."""
    return f"{number:.1f}".removesuffix(".0")
