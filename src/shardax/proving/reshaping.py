"""`reshape` under layouts: which axes stay where they are, in blocks that are whole, and which must be gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardax.proving.moves import used, without
from shardax.proving.outcomes import Laid, Outcome, Sizes, bring

Dims = list[int]


def reshape(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """An axis stays when the blocks that it cuts are runs of rows both before and after."""
    del params
    operand = operands[0]
    out: list[tuple[str, ...]] = [()] * len(result.shape)
    for before, after in groups(operand.shape, result.shape):
        leading = list(_leading(operand, before, sizes))
        _placed(leading, result.shape, after, out, sizes)
    kept = {axis for axes in out for axis in axes}
    lost = [axis for axis in used(operand.entries) if axis not in kept and sizes[axis] > 1]
    travels = bring(0, operand, without(operand.entries, lost), sizes)
    why = f"a reshape across dimensions cuts through the blocks of {', '.join(lost)}" if lost else ""
    return Outcome((tuple(out),), tuple(travels), why, ambiguous=bool(lost))


def groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Dims, Dims]]:
    """The smallest runs of dimensions that hold the same elements; dimensions of size 1 are left out.

    >>> list(groups((6, 4, 1, 5), (2, 3, 20)))
    [([0], [0, 1]), ([1, 3], [2])]
    """
    olds = [dim for dim, size in enumerate(before) if size != 1]
    news = [dim for dim, size in enumerate(after) if size != 1]
    while olds and news:
        one, other = [olds.pop(0)], [news.pop(0)]
        have, want = before[one[0]], after[other[0]]
        while have != want and (olds or news):
            if have < want and olds:
                one.append(olds.pop(0))
                have *= before[one[-1]]
            elif news:
                other.append(news.pop(0))
                want *= after[other[-1]]
            else:
                break
        yield one, other


def _leading(operand: Laid, dims: Dims, sizes: Sizes) -> Iterator[str]:
    """The axes of a run whose blocks are runs of elements: those of the first dimension that is not cut up entirely."""
    for dim in dims:
        yield from operand.entries[dim]
        if math.prod(sizes[axis] for axis in operand.entries[dim]) != operand.shape[dim]:
            return


def _placed(axes: list[str], shape: Sequence[int], dims: Dims, out: list[tuple[str, ...]], sizes: Sizes) -> None:
    """Put axes on the dimensions of a run, major to minor, as long as they divide."""
    waiting = list(axes)
    for dim in dims:
        left = shape[dim]
        while waiting and left % sizes[waiting[0]] == 0:
            left //= sizes[waiting[0]]
            out[dim] = (*out[dim], waiting.pop(0))
        if left != 1:
            return
