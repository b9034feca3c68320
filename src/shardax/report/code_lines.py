"""The lines of source around a place, read when a report is made: the page shows them wherever it is opened later."""

from __future__ import annotations

import linecache
import textwrap
from pathlib import Path


def code_around(file: str, line: int, around: int = 2) -> tuple[tuple[int, str], ...]:
    """Line numbers and texts, without indentation and blank lines around; empty where the file cannot be read.

    >>> [number for number, _ in code_around(__file__, 3, around=2)], code_around("gone.py", 3)
    ([1, 2, 3, 4, 5], ())
    """
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    if not 1 <= line <= len(lines):
        return ()
    first, last = max(1, line - around), min(len(lines), line + around)
    found = textwrap.dedent("".join(text.rstrip().expandtabs(4) + "\n" for text in lines[first - 1 : last]))
    numbered = list(zip(range(first, last + 1), found.split("\n"), strict=False))
    while numbered and not numbered[-1][1]:
        numbered.pop()
    while numbered and not numbered[0][1]:
        numbered.pop(0)
    return tuple(numbered)


def short_file(file: str) -> str:
    """A file as a reader knows it: below the working folder, else its last two parts.

    >>> short_file("/some/where/models/gpt.py")
    'models/gpt.py'
    """
    path = Path(file)
    if not path.is_absolute():
        return file
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(path.parts[-2:])
