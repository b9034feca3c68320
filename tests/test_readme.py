"""Every Python block of the README runs, in order, and prints (or raises) exactly what the block after it shows."""

import contextlib
import io
import re
from pathlib import Path

import shardax as sx

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(python|text|console)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, names: dict) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, str(README), "exec"), names)
        except sx.ShardaxError as error:
            print(f"{type(error).__module__}.{type(error).__name__}: {error}")
    return printed.getvalue()


def outputs() -> list[tuple[str, str]]:
    """(what a block printed, what the README shows after it)"""
    names: dict = {}
    found = []
    for place, (kind, text) in enumerate(BLOCKS):
        if kind == "python":
            shown = BLOCKS[place + 1][1] if place + 1 < len(BLOCKS) and BLOCKS[place + 1][0] == "text" else ""
            found.append((run(text, names), shown))
    return found


def test_every_block_prints_what_the_readme_shows():
    blocks = outputs()
    assert blocks
    for printed, shown in blocks:
        assert printed == shown
