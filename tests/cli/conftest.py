"""The command as a user runs it, in a folder with programs."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardax.cli.app import app
from shardax.cli.screen import console

SHARDAX = str(Path(sys.executable).with_name("shardax"))


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def data(self):
        """Its JSON: all of standard output."""
        return json.loads(self.out)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with programs."""
    place = tmp_path_factory.mktemp("programs")
    for program in (Path(__file__).parent / "programs").glob("*.py"):
        shutil.copy(program, place)
    (place / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (place / "broken.py").write_text("def case(:\n")
    (place / "imports.py").write_text("import not_there_at_all\n")
    return place


@pytest.fixture(scope="session")
def command(folder, tmp_path_factory):
    """`shardax …` as its own process, in that folder, without the simulated devices of the tests."""
    kept = tmp_path_factory.mktemp("cache")

    def run(*arguments, **environment):
        clean = {
            name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "COLUMNS")
        }
        env = clean | {"SHARDAX_CACHE": str(kept)} | environment
        done = subprocess.run(
            [SHARDAX, *map(str, arguments)], cwd=folder, env=env, capture_output=True, text=True, timeout=280
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def quickly(folder, monkeypatch):
    """The same command inside this process: for what needs no process of its own."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.delenv("COLUMNS", raising=False)
        console.cache_clear()  # as wide as a fresh process finds it
        done = CliRunner().invoke(app, list(map(str, arguments)), prog_name="shardax")
        return Ran(done.exit_code, done.stdout, done.stderr)

    return run
