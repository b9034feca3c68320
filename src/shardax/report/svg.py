"""A picture as SVG text: boxes, words and lines that grow the canvas; works in light and dark, needs no network."""

from __future__ import annotations

import html


def colour(place: int, count: int) -> str:
    """The place-th of `count` well separated colours, readable under dark text and light text alike.

    >>> colour(0, 4) != colour(1, 4)
    True
    """
    hue = (place * 360 / max(count, 1) + 210) % 360 if count <= 12 else (place * 137.508 + 210) % 360
    return f"hsl({hue:.0f} 62% {68 if place % 2 == 0 else 76}%)"


class Svg:
    """Collects elements; `render` wraps them in a canvas just large enough."""

    def __init__(self, title: str) -> None:
        self._title, self._parts = title, [f"<title>{html.escape(title)}</title>"]
        self._width = self._height = 0.0

    def _grow(self, right: float, bottom: float) -> None:
        self._width, self._height = max(self._width, right), max(self._height, bottom)

    def box(self, x: float, y: float, width: float, height: float, fill: str, label: str = "", hover: str = "") -> None:
        """A rectangle with a centred label and a hover text."""
        self._grow(x + width, y + height)
        tip = f"<title>{html.escape(hover)}</title>" if hover else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="currentColor" stroke-opacity=".45">{tip}</rect>'
        )
        if label:
            ink = "currentColor" if fill == "none" else "#14171f"
            self._parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" font-size="11" text-anchor="middle" '
                f'fill="{ink}" pointer-events="none">{html.escape(label)}</text>'
            )

    def outline(self, x: float, y: float, width: float, height: float, hover: str, dashed: bool = False) -> None:
        """An empty frame around other elements."""
        self._grow(x + width, y + height)
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="none" '
            f'stroke="currentColor" stroke-width="1.6"{dash}><title>{html.escape(hover)}</title></rect>'
        )

    def text(
        self, x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal"
    ) -> None:
        """Words with their baseline at y."""
        width = len(words) * size * 0.62
        self._grow(x + (width if anchor == "start" else 0), y + 4)
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="currentColor">{html.escape(words)}</text>'
        )

    def line(self, points: list[tuple[float, float]], stroke: str = "currentColor", width: float = 1.5) -> None:
        """A line through points."""
        for x, y in points:
            self._grow(x, y)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str, hover: str) -> None:
        """A filled circle."""
        self._grow(x + radius, y + radius)
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="currentColor">'
            f"<title>{html.escape(hover)}</title></circle>"
        )

    def render(self) -> str:
        """The whole element; it scales down with its container."""
        width, height = self._width + 2, self._height + 2
        body = "".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(self._title, quote=True)}" '
            f'viewBox="-1 -1 {width:.0f} {height:.0f}" width="{width:.0f}" style="max-width:100%;height:auto" '
            f'font-family="ui-sans-serif,system-ui,sans-serif">{body}</svg>'
        )
