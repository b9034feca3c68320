"""`shardax check`: what travels between devices, without devices and without a compiler, on a mesh of any size."""

from __future__ import annotations

from typing import Any

from shardax.cli.answer import Answer, Code
from shardax.cli.program import load
from shardax.cli.screen import Listed
from shardax.errors import Offence, plural
from shardax.proving.check import Check
from shardax.report.values import Verdict
from shardax.tables import show_bytes


def check(program: str, mesh: str | None) -> Answer:
    """The check of a program; places where the compiler chooses what travels are exit code 1."""
    found = load(program).check(mesh)
    shown: list[Any] = [_verdict(found)]
    if len(found.ledger):
        shown.append(found.ledger)
    doubts = [Offence(site.place or site.operation, f"{site.operation}, {site.why}") for site in found.ambiguous]
    if doubts:
        shown.append(Listed("where the compiler chooses what travels", doubts))
    if found.unknown:
        shown.append(Listed("what nobody can see into", [Offence("", words) for words in found.unknown]))
    shown.append(found.how_far)
    return Answer(tuple(shown), found.to_json() | {"seconds": found.seconds}, Code.YES if found.ok else Code.NO)


def _verdict(found: Check) -> Verdict:
    held = f"{found.name} on mesh {found.mesh} ({plural(found.mesh.size, 'device')})"
    held += f"; arguments {show_bytes(found.argument_bytes)} per device"
    if found.ok:
        return Verdict("good", "Clear", held)
    word = plural(len(found.ambiguous), "place is", "places are") if found.ambiguous else "Opaque"
    return Verdict("warn", f"{word} ambiguous" if found.ambiguous else word, held)
