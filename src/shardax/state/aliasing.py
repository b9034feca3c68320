"""flax's tree mode (`graph=False`): arguments and results are trees, so no cell is found twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardax.errors import Offence, StateError
from shardax.state.effects import Recipe
from shardax.state.graph import Graph, Record, Ref, step

_REMEDY = "drop the duplicate, pass a copy of it (nnx.clone), or leave graph=False out: then sharing is kept"


def refuse_shared(graph: Graph, names: Sequence[str], title: str) -> None:
    """Refuse arguments in which one cell is found twice, or a node below itself."""
    first: dict[Ref, str] = {}
    offences: list[Offence] = []
    for ref, path in _visits(graph.records, graph.roots, names):
        if ref in first:
            what = "one cell" if ref[0] == "c" else "a node below itself"
            offences.append(Offence(f"{first[ref]} and {path}", what))
        first.setdefault(ref, path)
    if offences:
        _refuse(title, "one cell found at paths", offences)


def refuse_returned(recipe: Recipe, name_of: Callable[[int], str], title: str) -> None:
    """Refuse a result that holds a cell of the arguments, or one cell twice."""
    if recipe.out is None:
        return
    first: dict[Ref, str] = {}
    offences: list[Offence] = []
    for ref, path in _visits(recipe.records, (recipe.out,), ("result",)):
        before = name_of(ref[1]) if ref[0] == "c" else first.get(ref)
        if before is not None:
            offences.append(Offence(f"{before} and {path}", "one cell"))
        first[ref] = path
    if offences:
        _refuse(title, "a cell of the arguments is returned, or one cell twice, found at paths", offences)


def _refuse(title: str, what: str, offences: Sequence[Offence]) -> None:
    raise StateError(f"{title} with graph=False does not support Variable aliasing: {what}", offences, _REMEDY)


def _visits(records: Sequence[Record], roots: Sequence[Ref], names: Sequence[str]) -> Iterator[tuple[Ref, str]]:
    """Every way to every cell, and the second visit of a node on the way to itself."""
    start = zip(roots, names, strict=True)
    stack: list[tuple[Ref, str, tuple[tuple[int, str], ...]]] = [(ref, name, ()) for ref, name in start][::-1]
    while stack:
        ref, path, above = stack.pop()
        tag, number = ref
        if tag in "cb":
            yield ref, path
        elif tag == "n":
            before = dict(above).get(number)
            if before is not None:
                yield from ((ref, before), (ref, path))
                continue
            record, here = records[number], (*above, (number, path))
            below = [
                (child, path + step(record, key), here) for child, key in zip(record.refs, record.keys, strict=True)
            ]
            stack += below[::-1]
