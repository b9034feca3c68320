"""Every Python block of the README runs, in order, and prints (or raises) exactly what the block after it shows."""

import contextlib
import io
import re
from pathlib import Path

import shardax as sx
from shardax.tables import show_bytes

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCKS = re.findall(r"^```(python|text|console)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, names: dict) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, str(README), "exec"), names)
        except sx.ShardaxError as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return printed.getvalue()


def outputs(names: dict) -> list[tuple[str, str]]:
    """(what a block printed, what the README shows after it)"""
    found = []
    for place, (kind, text) in enumerate(BLOCKS):
        if kind == "python":
            shown = BLOCKS[place + 1][1] if place + 1 < len(BLOCKS) and BLOCKS[place + 1][0] == "text" else ""
            found.append((run(text, names), shown))
    return found


def test_every_block_prints_what_the_readme_shows_and_the_picture_is_of_that_program():
    names: dict = {}
    blocks = outputs(names)
    assert len(blocks) >= 2
    for printed, shown in blocks:
        assert printed == shown
    picture = (ROOT / "docs" / "images" / "proof.svg").read_text(encoding="utf-8")  # drawn by docs/picture.py
    proof = names["proof"]
    assert f"loss on tpu:v5e:4x4, mesh {proof.mesh} (16 devices)" in picture
    assert f"arguments {show_bytes(proof.memory.arguments)} " in picture
    assert "docs/images/proof.svg" in README.read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_saved_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import _front_page

    shown = README.read_text(encoding="utf-8").partition(_front_page.BEGIN)[2].partition(_front_page.END)[0]
    assert shown.strip() == _front_page.table(), "run: python -m benchmarks --readme"
    assert len(shown.splitlines()) > 5


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links and [link for link in links if not (ROOT / link).exists()] == []
