"""A report as one HTML page: no network, no files beside it; light and dark, on paper too, and sortable."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from shardax.report.html_blocks import Anchors, part_markup
from shardax.report.markup import Markup, tag
from shardax.report.sections import shown_as

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(path: str | Path, *values: object, title: str = "shardax report", lead: str = "") -> Path:
    """Write one self-contained page that shows values: layouts, proofs, ledgers, diffs, meshes, errors, charts, tables.

    >>> import tempfile, shardax as sx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = sx.write_report(f"{folder}/report/index.html", "One mesh.", sx.MeshSpec.of("dp=2,tp=4"))
    ...     page.read_text().count("<svg")
    1
    """
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(page(*values, title=title, lead=lead), encoding="utf-8")
    return place


def page(*values: object, title: str = "shardax report", lead: str = "") -> str:
    """The page as text."""
    shown = [shown_as(value) for value in values]
    anchors = Anchors()
    body = [part_markup(part, anchors) for part in shown]
    links = [tag("a", words, href=f"#{name}") for name, words in anchors.top]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", _file("page.css")),
    )
    content = tag(
        "body",
        tag("header", tag("h1", title), *([tag("p", lead, class_="lead")] if lead else [])),
        *([tag("nav", *links, aria_label="Sections")] if len(links) > 1 else []),
        tag("main", *body),
        tag("footer", f"shardax {version('shardax')}"),
        tag("script", _file("page.js")),
        class_="shardax page",
    )
    return f"<!doctype html>\n{tag('html', head, content, lang='en')}\n"


def fragment(value: object) -> str:
    """A value inside another page, such as a notebook's: the same blocks, styled for that place only."""
    part = part_markup(shown_as(value), None)
    style = tag("style", _file("page.css"))
    return tag("div", style, part, class_="shardax")


@cache
def _file(name: str) -> Markup:
    """A file of this room, as it is: ours, so it closes no tag."""
    return Markup(files("shardax.report").joinpath(name).read_text(encoding="utf-8"))
