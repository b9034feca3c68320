"""`shardax prove`: what real compilers say of a step, on one target or on several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardax.cli.answer import Answer, Code
from shardax.cli.comparison import comparison
from shardax.cli.files import require_writable, writing
from shardax.cli.program import load
from shardax.cli.screen import waiting
from shardax.errors import CommandError
from shardax.names.mesh import MeshSpec
from shardax.proving.case import Case
from shardax.proving.proof import Proof
from shardax.proving.target import Target
from shardax.report.html import write_report


def prove(
    program: str,
    meshes: Sequence[str],
    targets: Sequence[str],
    *,
    report: Path | None,
    save: Path | None,
    timeout: float,
    cache: bool,
) -> Answer:
    """One proof, or one for every mesh on every target and a table of them."""
    case = load(program)
    pairs = [(goal_of(case, target, mesh), mesh) for target in (targets or [None]) for mesh in (meshes or [None])]
    if save is not None and len(pairs) > 1:
        raise CommandError("--save keeps one proof", remedy="one --mesh and one --target, or --json > proofs.json")
    require_writable(report, save)
    for goal, _ in pairs:
        goal.require()
    specs = [(goal, case.mesh_on(goal, mesh)) for goal, mesh in pairs]  # wrong ones are said before anything compiles
    proofs = [prove_one(case, goal, spec, timeout, cache) for goal, spec in specs]
    if save is not None:
        with writing(save):
            proofs[0].save(save)
    table = comparison(proofs) if len(proofs) > 1 else None
    if report is not None:
        title = f"{case.name}: what compilers say" if table else f"{case.name} on {proofs[0].target}"
        with writing(report):
            write_report(report, *([table] if table else []), *proofs, title=title)
    code = Code.NO if any(proof.fits is False for proof in proofs) else Code.YES
    written = [f"wrote {path}" for path in (report, save) if path is not None]
    shown = (table or proofs[0], *(["\n".join(written)] if written else []))
    data = {"proofs": [proof.to_json() for proof in proofs], "report": None if report is None else str(report)}
    return Answer(shown, data, code)


def goal_of(case: Case, target: str | None, mesh: str | None) -> Target:
    """The target that is asked for, or the case's own; else as many simulated devices as the mesh has."""
    if target is not None or case.target is not None:
        return Target.of(target if target is not None else case.target or "")
    return Target.of(f"cpu:{case.mesh_on(mesh=mesh).size}")


def prove_one(case: Case, target: Target, mesh: MeshSpec, timeout: float, cache: bool = True) -> Proof:
    """A proof, with a spinner while the compiler works."""
    with waiting(f"compiling {case.name} for {target} …"):
        return case.prove(mesh, target, timeout=timeout, cache=cache)
