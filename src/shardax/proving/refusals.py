"""What to do with operations that an Explicit mesh refuses: the least that must be gathered until it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from shardax.proving.moves import Entries, replicated, used, without
from shardax.proving.outcomes import Laid, Outcome, Sizes, bring, joined, shards

Accepts = Callable[[Sequence[Entries]], "tuple[Entries, ...] | None"]
_MOST_TRIED = 60


def agree(operands: Sequence[Laid], shape: Sequence[int], sizes: Sizes) -> Outcome:
    """Operands of one shape that lie differently: all go the way of the one that is cut finest."""
    full = [operand for operand in operands if operand.shape]
    order = sorted(full, key=lambda operand: (-shards(operand.entries, sizes), -operand.itemsize))
    out = replicated(len(shape))
    for operand in order:
        out = joined(out, operand.entries, shape, sizes)
    travels = [
        travel
        for number, operand in enumerate(operands)
        if operand.shape
        for travel in bring(number, operand, out, sizes)
    ]
    why = "the operands lie differently" if travels else ""
    return Outcome((out,), tuple(travels), why, ambiguous=bool(travels))


def least_gathered(operands: Sequence[Laid], accepts: Accepts, why: str, sizes: Sizes) -> Outcome | None:
    """Gather the fewest bytes after which the operation is accepted; None when even whole operands are refused."""
    for chosen in _candidates(operands, sizes):
        entries = [operand.entries for operand in operands]
        for number, axes in chosen.items():
            entries[number] = without(entries[number], axes)
        results = accepts(entries)
        if results is not None:
            travels = [
                travel for number in chosen for travel in bring(number, operands[number], entries[number], sizes)
            ]
            return Outcome(results, tuple(travels), why, ambiguous=bool(travels))
    return None


def _candidates(operands: Sequence[Laid], sizes: Sizes) -> Iterator[dict[int, tuple[str, ...]]]:
    """Axes to gather, by operand: the cheapest first, at last all of them."""
    single = [(number, axis) for number, operand in enumerate(operands) for axis in used(operand.entries)]
    found: list[dict[int, tuple[str, ...]]] = []
    for count in range(1, min(len(single), 4)):
        if len(found) > _MOST_TRIED:
            break
        for pairs in combinations(single, count):
            chosen: dict[int, tuple[str, ...]] = {}
            for number, axis in pairs:
                chosen[number] = (*chosen.get(number, ()), axis)
            found.append(chosen)

    def cost(chosen: dict[int, tuple[str, ...]]) -> int:
        return sum(operands[number].bytes_on(sizes, axes) for number, axes in chosen.items())

    yield from sorted(found, key=cost)[:_MOST_TRIED]
    yield {number: operand.axes for number, operand in enumerate(operands) if operand.axes}
