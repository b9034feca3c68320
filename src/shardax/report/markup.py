"""HTML that cannot be broken by what is written in it: text is escaped, only `Markup` is not."""

from __future__ import annotations

import html

VOID = frozenset({"meta", "link", "input", "br", "wbr", "hr"})


class Markup(str):
    """HTML that is meant as such."""

    __slots__ = ()


def tag(element: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element; `class_` is class, `data_at` is data-at, None and False leave an attribute out.

    >>> tag("p", "1 < 2", tag("br"), class_="quiet", hidden=True)
    '<p class="quiet" hidden>1 &lt; 2<br></p>'
    """
    words = "".join(_attribute(name, value) for name, value in attributes.items())
    if element in VOID:
        return Markup(f"<{element}{words}>")
    return Markup(f"<{element}{words}>{join(*children)}</{element}>")


def join(*children: str) -> Markup:
    """Children after each other.

    >>> join("a & ", Markup("<b>b</b>"))
    'a &amp; <b>b</b>'
    """
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def _attribute(name: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    written = name.rstrip("_").replace("_", "-")
    return f" {written}" if value is True else f' {written}="{html.escape(str(value), quote=True)}"'
