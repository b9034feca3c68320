"""`diff`: what changed between two proofs, and `ProofDiff`, the value that says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardax.errors import Offence
from shardax.proving.lock import lock_differences
from shardax.proving.proof import Proof
from shardax.tables import Reported, Table, show_bytes, show_count, show_flops


@dataclass(frozen=True)
class ProofDiff(Reported):
    """Two proofs side by side, and every difference in words."""

    names: tuple[str, str]
    numbers: tuple[tuple[str, str, str, str], ...]  # what, before, after, change
    changes: tuple[Offence, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def table(self) -> Table:
        """The numbers; the differences below them."""
        notes = tuple(str(change) for change in self.changes) or ("nothing else differs",)
        columns = ("", "before", "after", "change")
        return Table(" → ".join(self.names), columns, self.numbers, ("before", "after", "change"), notes)

    def __str__(self) -> str:
        return str(self.table())


def diff(before: Proof | str | Path, after: Proof | str | Path) -> ProofDiff:
    """What `after` does that `before` did not; proofs, or files that `Proof.save` wrote.

    Differences of the compiler's numbers count whatever their size; `check_lock` is the place for a tolerance.

    >>> import jax, shardax as sx
    >>> x = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> def step(x):
    ...     return x.sum(1)
    >>> rows, columns = (
    ...     sx.prove(step, x, mesh="dp=2", in_specs=spec, target="cpu:2") for spec in (jax.P("dp"), jax.P(None, "dp"))
    ... )
    >>> bool(sx.diff(rows, rows))
    False
    >>> print(sx.diff(rows, columns))  # doctest: +ELLIPSIS
    step on cpu:2, dp=2 → step on cpu:2, dp=2
                           before    after  change
    --------------------  -------  -------  ------
    arguments per device    4 KiB    4 KiB
    ...
    all-reduce over dp (f32, forward) in ...step: is new: 1×, 256 B sent by each device
    """
    for found in (before, after):
        if not isinstance(found, (Proof, str, Path)):
            raise TypeError(f"diff takes proofs, or the files of proofs, not a {type(found).__name__}")
    one, other = (found if isinstance(found, Proof) else Proof.load(found) for found in (before, after))
    old, new = (json.loads(json.dumps(found.lock())) for found in (one, other))
    names = tuple(f"{found.name} on {found.target}, {found.mesh}" for found in (one, other))
    return ProofDiff((names[0], names[1]), tuple(_numbers(one, other)), tuple(lock_differences(old, new, 0.0)))


def _numbers(one: Proof, other: Proof) -> Iterator[tuple[str, str, str, str]]:
    def row(what: str, old: float, new: float, show: Callable[[float], str] = show_bytes) -> tuple[str, str, str, str]:
        return (
            what,
            show(old),
            show(new),
            f"{(new - old) / old:+.1%}" if old and old != new else "" if old == new else "new",
        )

    yield row("arguments per device", one.memory.arguments, other.memory.arguments)
    yield row("peak per device", one.memory.peak, other.memory.peak)
    yield row("sent by each device", one.ledger.wire_bytes, other.ledger.wire_bytes)
    yield row("collectives", one.ledger.executions, other.ledger.executions, show_count)
    yield row("work per device", one.flops, other.flops, show_flops)
    if one.estimate and other.estimate:
        old, new = one.estimate.seconds, other.estimate.seconds
        yield "seconds at least", f"{old:.3g}", f"{new:.3g}", f"{(new - old) / old:+.1%}" if old != new else ""
