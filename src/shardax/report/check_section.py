"""A check as report values: where the compiler would have to choose, and what travels, without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

from shardax.errors import plural
from shardax.proving.check import Check
from shardax.proving.site import Site
from shardax.report.cutting import drawings
from shardax.report.ledger_section import ledger_section
from shardax.report.mesh_drawing import draw_mesh
from shardax.report.proof_section import replicated_grid
from shardax.report.values import (
    Block,
    Cell,
    Column,
    Grid,
    Pictures,
    Section,
    Stat,
    Stats,
    Verdict,
    Words,
    bytes_cell,
    count_cell,
)
from shardax.tables import show_bytes

AMBIGUOUS = (
    Column("where", code=True, keep=10, cut="middle", least=14),
    Column("operation", code=True, keep=8),
    Column("times", right=True, keep=6),
    Column("why", keep=9, cut="wrap", least=28),
    Column("sent at least", right=True, keep=7),
)


def check_section(check: Check) -> Section:
    """Everything a check says."""
    blocks: list[Block | Section] = [verdict_of(check), _stats(check)]
    if check.ambiguous:
        lead = "the compiler chooses what travels; on an Explicit mesh JAX refuses"
        blocks.append(Section("Ambiguous", (ambiguous_grid(check.ambiguous),), lead))
    if check.unknown:
        blocks.append(Section("Opaque", (Words(check.unknown, "warn"),), "operations that nobody can see into"))
    if check.replicated:
        blocks.append(Section("Copies", (replicated_grid("", check.replicated),), "arrays on several devices"))
    mesh = check.mesh.abstract()
    cut = drawings([(leaf.path, leaf.shape, leaf.spec, leaf.bytes) for leaf in check.inputs], mesh)
    blocks += [
        ledger_section(check.ledger),
        Section("Mesh", (Pictures((draw_mesh(mesh),)),), page_only=True),
        Section("How arrays are cut", (cut,), "which device holds which block of the arguments", page_only=True),
        Words((check.how_far,), "quiet"),
    ]
    return Section(f"{check.name} on mesh {check.mesh}", tuple(blocks))


def verdict_of(check: Check) -> Verdict:
    """Is there one way to do everything?"""
    if check.ok:
        return Verdict("good", "Clear", "there is one way to do everything")
    places, opaque = len(check.ambiguous), len(check.unknown)
    parts = [plural(places, "place is ambiguous", "places are ambiguous")] if places else []
    parts += [plural(opaque, "operation cannot be seen into", "operations cannot be seen into")] if opaque else []
    return Verdict("warn", "Not clear", ", ".join(parts))


def _stats(check: Check) -> Stats:
    ledger = check.ledger
    times = plural(ledger.executions, "collective")
    return Stats(
        (
            Stat("sent by each device", show_bytes(ledger.wire_bytes), times),
            Stat("arguments", show_bytes(check.argument_bytes), "on each device"),
            Stat("operations", f"{check.operations:,}", "walked, none compiled"),
        )
    )


def ambiguous_grid(sites: Sequence[Site]) -> Grid:
    """Ambiguous places, those alike added up, the dearest first."""
    alike: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        alike.setdefault((site.place, site.operation, site.why), []).append(site)
    ordered = sorted(alike.items(), key=lambda item: -sum(site.wire_bytes for site in item[1]))
    rows = tuple(
        (
            Cell(place),
            Cell(operation),
            count_cell(sum(site.count for site in found)),
            Cell(why),
            bytes_cell(sum(site.wire_bytes for site in found)),
        )
        for (place, operation, why), found in ordered
    )
    return Grid("", AMBIGUOUS, rows)
