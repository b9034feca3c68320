"""`shardax lock` and `shardax verify`: the facts of a proof in a small file, and the proof again against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardax.cli.answer import Answer, Code
from shardax.cli.files import require_writable, writing
from shardax.cli.program import Program
from shardax.cli.proofs import goal_of, prove_one
from shardax.errors import CommandError, Offence, ProofFailure, plural
from shardax.names.mesh import MeshSpec
from shardax.proving.lock import lock_differences, lock_of, read_lock, write_lock
from shardax.proving.proof import Proof
from shardax.proving.target import Target
from shardax.tables import show_bytes


def lock(program: str, output: Path, mesh: str | None, target: str | None, timeout: float) -> Answer:
    """Prove the program and write its lock; the file says which program, mesh and target it is about."""
    named = Program.of(program)
    case = named.load()
    goal = goal_of(case, target, mesh)
    require_writable(output)
    goal.require()
    proof = prove_one(case, goal, case.mesh_on(goal, mesh), timeout)
    made = _lock_of(proof, named, output)
    existed = output.exists()
    with writing(output):
        write_lock(made, output)
    shown = f"{'rewrote' if existed else 'wrote'} {output}: {in_words(proof)}"
    return Answer((shown, f"check it with: shardax verify {output}"), {"path": str(output), "lock": made})


def verify(path: Path, tolerance: float, *, update: bool, program: str | None, timeout: float) -> Answer:
    """Prove the locked program again and compare: what differs is the answer."""
    old = _read(path)
    named = _program_of(old, path) if program is None else Program.of(program)
    case = named.load()
    goal = Target.of(old["target"])
    goal.require()
    proof = prove_one(case, goal, MeshSpec.of(old["mesh"]), timeout)
    new = json.loads(json.dumps(_lock_of(proof, named, path)))
    differences = list(lock_differences(old, new, tolerance))
    data = {
        "path": str(path),
        "ok": not differences,
        "updated": update and bool(differences),
        "differences": [{"where": each.where, "problem": each.problem} for each in differences],
    }
    if not differences:
        return Answer((f"{path} holds: {in_words(proof)}",), data)
    listed = [_headline(path, proof, differences), *(f"  {each}" for each in differences)]
    if update:
        with writing(path):
            write_lock(new, path)
        return Answer(("\n".join([*listed, f"rewrote {path}"]),), data)
    listed.append(f"if this is meant: shardax verify {path} --update, and look at the diff of the file")
    return Answer(("\n".join(listed),), data, Code.NO)


def _headline(path: Path, proof: Proof, differences: list[Offence]) -> str:
    return f"{proof.name} is not what {path} says: {plural(len(differences), 'difference')}"


def _lock_of(proof: Proof, named: Program, path: Path) -> dict[str, Any]:
    made = lock_of(proof)
    head = {name: made.pop(name) for name in ("shardax", "version")}
    return head | {"program": str(named.seen_from(path.parent))} | made


def _read(path: Path) -> dict[str, Any]:
    """The lock; a file that is none is a wrong command line, not a difference."""
    if path.is_dir():
        raise CommandError(f"{path} is a folder", remedy=f"the lock in it: {path / 'sharding.lock'}")
    try:
        return read_lock(path)
    except ProofFailure as error:
        place = "sharding.lock" if path.exists() else path  # what is there is something else: it stays
        raise CommandError(error.headline, error.offences, f"write one: shardax lock MODULE:FN -o {place}") from None


def _program_of(lock: dict[str, Any], path: Path) -> Program:
    if "program" not in lock:
        raise CommandError(f"{path} does not say which program it locks", remedy="--program MODULE:FN, or lock anew")
    return Program.of(lock["program"]).below(path.parent)


def in_words(proof: Proof) -> str:
    """A proof in a line."""
    count = plural(proof.ledger.executions, "collective")
    return f"{proof.name} on {proof.target}, mesh {proof.mesh}; {count}, peak {show_bytes(proof.memory.peak)}"
