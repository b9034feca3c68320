"""The pytest half of sharding locks: the fixture `sharding_lock`, and `--shardax-update` to write locks anew."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import shardax
from shardax.proving.rewriting import rewriting

WRITTEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("shardax").addoption(
        "--shardax-update",
        action="store_true",
        help="write sharding locks anew instead of comparing with them; look at the diff before you commit it",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not item.config.getoption("--shardax-update"):
        return (yield)
    with rewriting() as written:
        try:
            return (yield)
        finally:
            item.config.stash.setdefault(WRITTEN, []).extend(written)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for path in dict.fromkeys(config.stash.get(WRITTEN, [])):
        terminalreporter.write_line(f"shardax: wrote {path}")


@pytest.fixture
def sharding_lock(request: pytest.FixtureRequest) -> SharedLock:
    """Compare a proof with the lock of this test: `sharding_lock(sx.prove(…))`."""
    return SharedLock(Path(request.path).parent / "locks", request.node.name)


class SharedLock:
    """The lock files of one test, in the folder `locks` beside it, named after the test."""

    def __init__(self, folder: Path, test: str) -> None:
        self.folder, self.test = folder, test

    def path(self, name: str | None = None) -> Path:
        """The file; a test with several proofs names each."""
        whole = self.test if name is None else f"{self.test}.{name}"
        return self.folder / f"{re.sub(r'[^a-zA-Z0-9_.=,-]+', '-', whole).replace('-.', '.').strip('-')}.json"

    def __call__(self, proof: Any, name: str | None = None, **options: Any) -> None:
        """Fail when a proof is not what its lock says; options are those of `sx.check_lock`."""
        __tracebackhide__ = True
        shardax.check_lock(proof, self.path(name), **options)
