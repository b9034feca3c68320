"""How arrays are cut, in words and pictures: the cells and drawings that layouts, proofs and checks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardax.errors import plural
from shardax.names.spec import canonical
from shardax.report.draw import draw_spec
from shardax.report.values import Cell, Pictures

MOST_DRAWN = 6


def array_cell(dtype: str, shape: Sequence[int], nbytes: int) -> Cell:
    """An array in short, sorted by its size."""
    return Cell(f"{dtype}[{','.join(map(str, shape))}]", float(nbytes))


def spec_text(spec: PartitionSpec) -> str:
    """A spec as it is written, without the comma of a single entry.

    >>> spec_text(PartitionSpec("tp")), spec_text(PartitionSpec(("dp", "tp"))), spec_text(PartitionSpec())
    ("P('tp')", "P(('dp', 'tp'))", 'P()')
    """
    text = str(spec)
    return f"{text[:-2]})" if text.endswith(",)") else text


def drawings(arrays: Iterable[tuple[str, tuple[int, ...], PartitionSpec, int]], mesh: Any) -> Pictures:
    """One drawing per way of cutting (spec and rank), of its largest array; the most bytes first."""
    ways: dict[tuple[PartitionSpec, int], list[tuple[int, str, tuple[int, ...], PartitionSpec]]] = {}
    for path, shape, spec, nbytes in arrays:
        if shape:
            key = (canonical(spec, mesh), len(shape))
            ways.setdefault(key, []).append((nbytes, path, shape, spec))
    ordered = sorted(ways.values(), key=lambda found: -sum(nbytes for nbytes, *_ in found))
    drawn = []
    for found in ordered[:MOST_DRAWN]:
        _, path, shape, spec = max(found, key=lambda entry: entry[0])
        others = f"{path} and {plural(len(found) - 1, 'other')}" if len(found) > 1 else path
        drawn.append(draw_spec(spec, mesh, shape, name=others))
    left = (f"… and {len(ordered) - MOST_DRAWN} more ways of cutting",) if len(ordered) > MOST_DRAWN else ()
    return Pictures(tuple(drawn), left)
