"""The terminal: values shown, a spinner while a compiler works, and every error in one screen."""

from __future__ import annotations

import linecache
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

import shardax
from shardax.errors import Offence, ShardaxError

WIDTH_OF_A_FILE, LINES_OF_A_FILE = 118, 40
PACKAGE = str(Path(shardax.__file__).parent)
_SHOWN = 3  # so many places are named, of more only the first


class Screen(Console):
    """A console whose reader may leave, as `head` does: rich would make it exit code 1, which means "no" here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@cache
def console(stderr: bool = False) -> Console:
    """Standard output or error; one that is no terminal is as wide as our text."""
    found = Screen(stderr=stderr, highlight=False)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Screen(stderr=stderr, highlight=False, width=WIDTH_OF_A_FILE)


def show(*values: Any) -> None:
    """Each value in its own form, an empty line between them."""
    from shardax.report.text import print_report  # with it comes JAX, which help and usage errors do without

    for number, value in enumerate(values):
        if number:
            console().print()
        if isinstance(value, Listed):
            console().print(value)
        else:
            print_report(value, console=console())


@contextmanager
def waiting(words: str) -> Generator[None]:
    """A spinner with words on standard error, where that is a terminal."""
    where = console(stderr=True)
    if not where.is_terminal:
        yield
        return
    with where.status(Text(words)):
        yield


# ---- errors ---------------------------------------------------------------------------------------------------------


def error_as_data(error: BaseException) -> dict[str, Any]:
    """An error for a machine: everything it carries."""
    if isinstance(error, ShardaxError):
        offences = [
            {"where": each.where, "problem": each.problem}
            | {
                name: str(value)
                for name in ("shape", "spec", "rule", "remedy")
                if (value := getattr(each, name)) is not None
            }
            for each in error.offences
        ]
        said = {"headline": error.headline, "offences": offences, "remedy": error.remedy}
    else:
        said = {"headline": str(error), "offences": [], "remedy": ""}
    return {"type": type(error).__name__, **said}


def show_error(error: BaseException) -> None:
    """An error on standard error, in one screen."""
    where = console(stderr=True)
    if isinstance(error, ShardaxError):
        where.print(Listed(error.headline, error.offences, error.remedy, mark="error: "))
        return
    first, *lines = _unknown(error)
    where.print(Text.assemble(("error: ", "bold red"), (first, "bold")))
    for line in lines:
        where.print(*indented(line, where.width), sep="\n")


def indented(words: str, width: int) -> list[Text]:
    """Words two places in, in lines that break between words only: a path or a command can be copied.

    >>> [line.plain for line in indented("params/up: no rule", 14)]
    ['  params/up:', '  no rule']
    """
    lines = [
        textwrap.wrap(line, max(width - 2, 8), break_long_words=False, break_on_hyphens=False, subsequent_indent=margin)
        for line in words.splitlines()
        for margin in [line[: len(line) - len(line.lstrip())]]
    ]
    return [Text(f"  {part}", overflow="fold") for line in lines for part in line or [""]]


@dataclass(frozen=True)
class Listed:
    """A headline and offences below it, as many as one screen holds; those that say the same stand together."""

    headline: str
    offences: Sequence[Offence]
    remedy: str = ""
    mark: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(console.height - 8, 6) if console.is_terminal else LINES_OF_A_FILE
        yield Text.assemble((self.mark, "bold red"), (self.headline, "bold"))
        listed = grouped(self.offences)
        for number, (offence, _) in enumerate(listed):
            lines = indented(str(offence), options.max_width)
            room -= len(lines)
            if room < 0:
                left = sum(count for _, count in listed[number:])
                yield Text(f"  … and {left:,} more: --json lists all", "dim")
                break
            yield from lines
        if self.remedy:
            yield from indented(self.remedy, options.max_width)


def grouped(offences: Sequence[Offence]) -> list[tuple[Offence, int]]:
    """Offences that differ only in their place, as one with the places, or the first of many; and their number.

    >>> [(str(one), count) for one, count in grouped([Offence(name, "no rule") for name in "ab"])]
    [('a, b: no rule', 2)]
    >>> [(str(one), count) for one, count in grouped([Offence(name, "no rule") for name in "abcd"])]
    [('a and 3 more: no rule', 4)]
    """
    found: dict[str, list[Offence]] = {}
    for offence in offences:
        found.setdefault(str(replace(offence, where="")), []).append(offence)
    return [(_with_others(alike), len(alike)) for alike in found.values()]


def _with_others(alike: Sequence[Offence]) -> Offence:
    places = [offence.where for offence in alike]
    few = len(places) <= _SHOWN
    return replace(alike[0], where=", ".join(places) if few else f"{places[0]} and {len(places) - 1} more")


def _unknown(error: BaseException) -> Iterator[str]:
    """An exception of the program's own: where in its code, and what was said."""
    said = str(error).strip().splitlines() or [""]
    yield f"{type(error).__name__}: {said[0]}" if said[0] else type(error).__name__
    yield from said[1:10]
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not frame.filename.startswith(PACKAGE) and "site-packages" not in frame.filename
    ]
    own = [frame for frame in own if not frame.filename.startswith("<") and Path(frame.filename).is_file()]
    for frame in own[-1:]:
        yield f"at {short_path(frame.filename)}:{frame.lineno}, in {frame.name}"
        if source := linecache.getline(frame.filename, frame.lineno or 0).strip():
            yield f"    {source}"
    yield "--debug shows the whole traceback"


def short_path(path: str) -> str:
    """A path from here, where it lies below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def own_command() -> str:
    """How to call this program again from here: `make demo` runs one that is on no PATH."""
    beside = Path(sys.executable).with_name("shardax")
    found = shutil.which("shardax")
    if not beside.exists() or (found is not None and Path(found).absolute() == beside):
        return "shardax"
    return short_path(str(beside))
