"""Several proofs of one step side by side: a column for each, a row for each thing worth comparing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardax.proving.proof import Proof
from shardax.report.values import show_seconds
from shardax.tables import Table, show_bytes, show_flops


def comparison(proofs: Sequence[Proof]) -> Table:
    """The table; what differs between them heads the columns."""
    one_mesh = len({str(proof.mesh) for proof in proofs}) == 1
    one_target = len({proof.target for proof in proofs}) == 1
    heads = [str(proof.mesh) if one_target else str(proof.target) for proof in proofs]
    if not one_mesh and not one_target:
        heads = [f"{proof.target} {proof.mesh}" for proof in proofs]
    fixed = [f"on {proofs[0].target}"] if one_target else [f"on mesh {proofs[0].mesh}"] if one_mesh else []
    rows = [(name, *cells) for name, cells in _rows(proofs) if any(cell not in ("", "-") for cell in cells)]
    title = " ".join([proofs[0].name, *fixed])
    return Table(title, ("", *_distinct(heads)), tuple(rows), tuple(_distinct(heads)))


def _distinct(heads: Sequence[str]) -> list[str]:
    """Columns have names of their own, also where the same was asked for twice."""
    return [head if heads.index(head) == place else f"{head} ({place + 1})" for place, head in enumerate(heads)]


def _rows(proofs: Sequence[Proof]) -> Iterator[tuple[str, list[str]]]:
    def row(name: str, cells: Iterator[str]) -> tuple[str, list[str]]:
        return name, list(cells)

    yield row("verdict", (verdict(proof) for proof in proofs))
    yield row("peak per device", (show_bytes(proof.memory.peak) for proof in proofs))
    yield row("  of the device's", (show_bytes(proof.memory.hbm) if proof.memory.hbm else "-" for proof in proofs))
    yield row("  arguments", (show_bytes(proof.memory.arguments) for proof in proofs))
    yield row("  temporaries", (show_bytes(proof.memory.temporaries) for proof in proofs))
    yield row("work per device", (_unless_refused(proof, show_flops(proof.flops)) for proof in proofs))
    yield row("time at least", (_time(proof) for proof in proofs))
    yield row("  bound by", (proof.estimate.bottleneck if proof.estimate else "-" for proof in proofs))
    yield row("sent by each device", (_unless_refused(proof, show_bytes(proof.ledger.wire_bytes)) for proof in proofs))
    for op, axes in sorted({(found.op, found.axes) for proof in proofs for found in proof.ledger}):
        yield row(f"  {op} over {'×'.join(axes) or 'no axis'}", (_times(proof, op, axes) for proof in proofs))
    yield row("donations lost", (str(len(proof.lost_donations) or "") for proof in proofs))
    yield row("not as asked", (str(len(proof.not_as_asked) or "") for proof in proofs))
    yield row("compiled in", (f"{proof.compile_seconds:.1f} s{' (kept)' * proof.cached}" for proof in proofs))


def verdict(proof: Proof) -> str:
    """The answer in a word or three."""
    return {True: "fits", False: "does not fit", None: "partitions"}[proof.fits]


def _unless_refused(proof: Proof, text: str) -> str:
    return "-" if proof.refusal else text


def _time(proof: Proof) -> str:
    return show_seconds(proof.estimate.seconds) if proof.estimate else "-"


def _times(proof: Proof, op: str, axes: tuple[str, ...]) -> str:
    found = [row for row in proof.ledger if (row.op, row.axes) == (op, axes)]
    count, sent = sum(row.count for row in found), sum(row.wire_bytes for row in found)
    return f"{count:,}× {show_bytes(sent)}" if found else "-"
