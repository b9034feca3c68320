"""`shardax layout`: where every array goes, on a mesh of any size, without devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardax.cli.answer import Answer, Code
from shardax.cli.files import require_writable, writing
from shardax.cli.program import load
from shardax.cli.screen import Listed
from shardax.errors import CommandError, did_you_mean
from shardax.names.analysis import LayoutAnalysis
from shardax.names.layout import Layout
from shardax.names.lint import LintReport
from shardax.proving.case import Case
from shardax.report.layout_section import leaves_grid

MOST_EXPLAINED = 12
POLICIES = ("error", "warn", "adapt")


def layout(
    program: str,
    mesh: str | None,
    target: str | None,
    *,
    explain: list[str],
    lint: bool,
    on_misfit: str | None,
    most: int | None,
    save: Path | None,
) -> Answer:
    """The layout of a program, the explanation of some leaves, or what is wrong with its rules."""
    require_writable(save)
    case = load(program)
    if on_misfit is not None:
        if on_misfit not in POLICIES:
            near = did_you_mean(on_misfit, POLICIES)
            raise CommandError(f"--on-misfit is {' or '.join(POLICIES)}, not {on_misfit!r}{near}")
        case = replace(case, on_misfit=on_misfit)
    spec = case.mesh_on(target, mesh)
    if lint:
        return _linted(case.lint(spec))
    made = case.lay_out(spec)
    if save is not None:
        with writing(save):
            made.save(save)
    answer = _explained(made, explain) if explain else _laid_out(case, made, most)
    return answer if save is None else replace(answer, shown=(*answer.shown, f"wrote {save}"))


def _linted(report: LintReport) -> Answer:
    findings = [
        {"kind": found.kind, "where": found.offence.where, "problem": found.offence.problem}
        | {"rule": found.offence.rule, "would_work": found.offence.remedy}
        for found in report.findings
    ]
    code = Code.YES if report.ok else Code.NO
    if report.ok:
        return Answer((report,), {"ok": True, "findings": findings}, code)
    offences = [replace(found.offence, problem=f"{found.kind}, {found.offence.problem}") for found in report.findings]
    return Answer((Listed(str(report.table().title), offences),), {"ok": False, "findings": findings}, code)


def _explained(made: Layout, wanted: list[str]) -> Answer:
    paths = [path for name in wanted for path in _paths(made, name)]
    texts = {path: made.explain(path) for path in paths}
    more = len(paths) - MOST_EXPLAINED
    rest = (f"… and {more} more: --json explains all",) if more > 0 else ()
    return Answer((*list(texts.values())[:MOST_EXPLAINED], *rest), {"explained": texts})


def _paths(made: Layout, name: str) -> list[str]:
    """The leaf of that path, else every leaf whose path contains the text."""
    found = [name] if name in made.by_path else [path for path in made.by_path if name in path]
    if not found:
        known = [*made.by_path, *{word: None for path in made.by_path for word in path.split("/")}]
        raise CommandError(f"no array of this layout has {name!r} in its path{did_you_mean(name, known)}")
    return found


def _laid_out(case: Case, made: Layout, most: int | None) -> Answer:
    analysis = made.analysis()
    data = made.to_json() | {
        "name": case.name,
        "hash": made.hash,
        "bytes": made.nbytes,
        "bytes_per_device": made.bytes_per_device,
        "replicated_bytes": analysis.replicated_bytes,
        "offenders": _offenders(analysis),
    }
    every = replace(leaves_grid(made.decisions), title=f"Layout on mesh {made.mesh_spec}", most=most or 0)
    return Answer((made if most is None else every,), data)


def _offenders(analysis: LayoutAnalysis) -> list[dict[str, Any]]:
    return [
        {
            "path": each.path,
            "spec": str(each.spec),
            "copies": each.copies,
            "bytes_per_device": each.bytes_per_device,
            "suggestion": each.suggestion,
        }
        for each in analysis.offenders
    ]
