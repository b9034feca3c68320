"""The colours of every picture: few, told apart without telling red from green, readable on light and on dark."""

from __future__ import annotations

# Ordered things (a coordinate along an axis, a device set): ColorBrewer's YlGnBu, which keeps its order in grey print.
RAMP = ((247, 240, 170), (173, 221, 164), (94, 190, 182), (48, 132, 186), (52, 72, 150))
DARK_INK, LIGHT_INK = "#000000", "#ffffff"  # one of the two has a contrast of 4.5 on any colour

# Kinds of things (arguments, outputs, temporaries, …): Okabe and Ito's, in the order that they are given out.
KINDS = ("#3b7dba", "#e69f00", "#3a9d7c", "#cc79a7", "#7fb8de", "#b8860b", "#8a8f98")


def ramp(place: int, count: int) -> str:
    """The place-th of `count` ordered colours.

    >>> ramp(0, 4), ramp(3, 4), ramp(0, 1)
    ('#f7f0aa', '#344896', '#addda4')
    """
    red, green, blue = _ramp(place, count)
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink(place: int, count: int) -> str:
    """The colour of words on `ramp(place, count)`: whichever contrasts more."""
    light = _luminance(_ramp(place, count))
    dark = _luminance(_rgb(DARK_INK))
    return LIGHT_INK if 1.05 / (light + 0.05) > (light + 0.05) / (dark + 0.05) else DARK_INK


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG counts it, 1 to 21.

    >>> round(contrast("#000000", "#ffffff"))
    21
    """
    high, low = sorted((_luminance(_rgb(one)), _luminance(_rgb(other))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def kind(number: int) -> str:
    """The colour of the number-th kind; they come round again."""
    return KINDS[number % len(KINDS)]


def _ramp(place: int, count: int) -> tuple[int, int, int]:
    if count <= 1:
        return RAMP[1]
    at = place / (count - 1) * (len(RAMP) - 1)
    below = min(int(at), len(RAMP) - 2)
    share = at - below
    low, high = RAMP[below], RAMP[below + 1]
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _luminance(colour: tuple[int, int, int]) -> float:
    red, green, blue = (c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
