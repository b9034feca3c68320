"""`shardax check`: what travels between devices, without devices and without a compiler, on a mesh of any size."""

from __future__ import annotations

from shardax.cli.answer import Answer, Code
from shardax.cli.program import load


def check(program: str, mesh: str | None) -> Answer:
    """The check of a program; places where the compiler chooses what travels are exit code 1."""
    found = load(program).check(mesh)
    return Answer((found,), found.to_json() | {"seconds": found.seconds}, Code.YES if found.ok else Code.NO)
