"""The lines of source around a place, read when a report is made: the page shows them wherever it is opened later."""

from __future__ import annotations

import ast
import linecache
import textwrap
from functools import lru_cache
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


def still_in(file: str, line: int, function: str) -> bool:
    """Does that line still stand in that function? A proof may be older than its source.

    >>> [still_in(__file__, *place) for place in ((20, "code_around"), (20, "Model.__call__"), (3, "<module>"))]
    [True, False, True]
    """
    name = function.rpartition(".")[2]
    if not name.isidentifier():  # "<lambda>", "<genexpr>": they have no name in the source
        return True
    linecache.checkcache(file)
    return name in _functions_around("".join(linecache.getlines(file)), line)


@lru_cache(maxsize=512)
def _functions_around(source: str, line: int) -> tuple[str, ...]:
    """The names of all functions whose lines include that one."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return ()
    found = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return tuple(node.name for node in found if node.lineno <= line <= (node.end_lineno or node.lineno))


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
