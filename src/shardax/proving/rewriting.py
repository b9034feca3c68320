"""Are lock files compared, or written anew? `pytest --shardax-update` asks for the latter, for all of one run.

This file imports nothing of jax: the pytest plugin must not wake it before a test's own settings are in place.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_written: ContextVar[list[str] | None] = ContextVar("shardax-locks-written", default=None)


@contextmanager
def rewriting() -> Generator[list[str]]:
    """While this is open, `check_lock` writes files instead of comparing; the list fills with their paths."""
    paths: list[str] = []
    token = _written.set(paths)
    try:
        yield paths
    finally:
        _written.reset(token)


def is_rewriting() -> bool:
    """Is somebody rewriting?"""
    return _written.get() is not None


def note_written(path: str) -> None:
    """Tell who is rewriting."""
    if (paths := _written.get()) is not None and path not in paths:
        paths.append(path)
