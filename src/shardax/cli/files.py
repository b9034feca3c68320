"""Files of a command: what cannot be read or written is said in a line, and before a compiler works for minutes."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shardax.errors import CommandError, Offence, did_you_mean


def require_file(path: Path) -> None:
    """A Python file that is there; else one whose name is close."""
    if path.is_dir():
        raise CommandError(f"{path} is a folder", remedy="name a file in it, like train.py")
    if not path.is_file():
        near = [str(found) for found in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise CommandError(f"there is no file {path}{did_you_mean(path, near)}")


def require_writable(*paths: Path | None) -> None:
    """Every file that cannot be written, in one error; folders that are missing can be made."""
    problems = [Offence(str(path), problem) for path in paths if path is not None and (problem := _problem(path))]
    if problems:
        raise CommandError(" and ".join(f"cannot write {each.where}" for each in problems), problems)


def _problem(path: Path) -> str:
    if path.is_dir():
        return "is a folder"
    near = next(folder for folder in path.absolute().parents if folder.exists())
    if not near.is_dir():
        return f"{near} is no folder"
    held = path if path.exists() else near
    return "" if os.access(held, os.W_OK) else f"{held} may not be written to"


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Make its folder; what the system has against the file is an error of the command line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CommandError(f"cannot write {path}", [Offence(str(path), error.strerror or str(error))]) from None
