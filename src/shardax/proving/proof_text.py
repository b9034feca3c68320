"""A proof as one screen of text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardax.errors import plural
from shardax.tables import Table, show_bytes, show_flops

Proof = Any  # proof.py stands above this file: a proof knows how to print itself
WIDTH = 118
MOST = 6  # rows of every list
_LONG_PATH = re.compile(r"^[\w.]+(?:\[[^\]]*\])+?((?:\[[^\]]*\]){2})(?=;|$)")


def proof_text(proof: Proof) -> str:
    """Verdict, memory, time, collectives, and what is not as it was meant to be."""
    parts = (
        _verdict(proof),
        _memory(proof),
        _work(proof),
        _collectives(proof),
        _worries(proof),
        _fine_print(proof),
    )
    return "\n".join(line for part in parts for line in part)


def _verdict(proof: Proof) -> Iterator[str]:
    mesh = f"mesh {proof.mesh} ({plural(proof.mesh.size, 'device')})"
    head = f"{proof.name} on {proof.target}, {mesh}"
    memory = proof.memory
    if memory.hbm is None or memory.margin is None:
        yield f"{head}: partitions; about {show_bytes(memory.peak)} per device"
    elif proof.fits:
        yield f"{head}: FITS, {show_bytes(memory.peak)} of {show_bytes(memory.hbm)} ({show_bytes(memory.margin)} free)"
    else:
        missing = show_bytes(-memory.margin)
        yield f"{head}: DOES NOT FIT, {show_bytes(memory.peak)} of {show_bytes(memory.hbm)} ({missing} too much)"


def _memory(proof: Proof) -> Iterator[str]:
    memory = proof.memory
    groups = ", ".join(f"{name} {show_bytes(size)}" for name, size in memory.groups[:MOST])
    more = f", … {len(memory.groups) - MOST} more" if len(memory.groups) > MOST else ""
    detail = f" ({groups}{more})" if len(memory.groups) > 1 else ""
    text = f"memory      arguments {show_bytes(memory.arguments)}{detail}"
    if not proof.refusal:
        text += f", new outputs {show_bytes(memory.outputs - memory.aliased)}"
    if memory.temporaries:
        text += f", temporaries {show_bytes(memory.temporaries)}"
    yield from _wrapped(text)
    large = [buffer for buffer in memory.buffers[:4] if buffer.bytes * 100 >= memory.peak]
    for number, buffer in enumerate(large):
        lead = "  largest   " if number == 0 else " " * 12
        yield _cut(f"{lead}{show_bytes(buffer.bytes):>8}  {buffer.what}  {buffer.place}")


def _work(proof: Proof) -> Iterator[str]:
    if proof.refusal:
        return
    text = f"work        {show_flops(proof.flops)} per device, {show_flops(proof.total_flops)} in all"
    estimate = proof.estimate
    if estimate is not None:
        text += (
            f"; at least {_seconds(estimate.seconds)} per step, bound by {estimate.bottleneck}"
            f" ({_seconds(estimate.serial_seconds)} if nothing overlaps)"
        )
    yield from _wrapped(text)


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.1e} s"


def _collectives(proof: Proof) -> Iterator[str]:
    if proof.refusal:
        return
    if not len(proof.ledger):
        yield "collectives none"
        return
    lines = str(_narrow(proof.ledger.table(MOST))).splitlines()
    yield f"collectives {lines[0]}"
    yield from (_cut(f"  {line}") for line in lines[1:])


def _narrow(table: Table) -> Table:
    """What a screen has room for: no types, not who asked (the ledger's own table has both), the end of long paths."""
    empty = {name for place, name in enumerate(table.columns) if not any(row[place] for row in table.rows)}
    kept = [place for place, name in enumerate(table.columns) if name not in {"dtype", "by", *empty}]
    rows = tuple(tuple(_LONG_PATH.sub(r"…\1", row[place]) for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def _worries(proof: Proof) -> Iterator[str]:
    if proof.refusal:
        yield from _wrapped(f"refused     {proof.refusal.splitlines()[0]}")
    for lost in proof.lost_donations[:MOST]:
        yield _cut(f"donation    lost: {lost.path}, {show_bytes(lost.bytes)} per device held twice")
    yield from _rest("donation", len(proof.lost_donations))
    for each in proof.not_as_asked[:MOST]:
        cost = f", {show_bytes(each.bytes_per_device)} more per device" if each.bytes_per_device else ""
        yield _cut(f"not as asked {each.where} {each.shape}: asked {each.asked}, got {each.got}{cost}")
    yield from _rest("not as asked", len(proof.not_as_asked))
    for each in proof.replicated[:MOST]:
        over = "on every device" if each.whole else f"over {', '.join(each.unused_axes)}"
        yield _cut(
            f"replicated  {each.path} {over}: {show_bytes(each.bytes_per_device)} per device,"
            f" {show_bytes(each.wasted)} could be saved"
        )
    yield from _rest("replicated", len(proof.replicated))


def _rest(word: str, count: int) -> Iterator[str]:
    if count > MOST:
        yield f"{word:11} … and {count - MOST} more"


def _fine_print(proof: Proof) -> Iterator[str]:
    for number, blind in enumerate(proof.blind_spots):
        yield from _wrapped(f"{'cannot see' if number == 0 else '':11} {blind}")
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items() if name != "jaxlib")
    took = f"{proof.compile_seconds:.1f} s ({proof.compile_cpu_seconds:.1f} CPU-s)"
    yield f"compiled in {took}{', kept from then' if proof.cached else ''}; {versions}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)


def _cut(line: str) -> str:
    return line.rstrip() if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
