"""`dot_general` under layouts: which operand is gathered, and over which axes partial sums are put together.

An axis may shard one label of the product only. Where the operands disagree, a label of the result wins over a
contracted one, and what is stored is gathered rather than what was computed (that is what ZeRO means); of two equals
the smaller is, and the outcome is ambiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardax.proving.moves import Entries, without
from shardax.proving.outcomes import Laid, Outcome, Sizes, Travel, bring, joined, summed

_Labels = tuple[list[int], list[int]]


def dot_general(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """The layout of a product."""
    (left_contracted, right_contracted), (left_batch, right_batch) = params["dimension_numbers"]
    left, right = operands[0], operands[1]
    contracted = len(left_contracted)
    pairs = [*zip(left_contracted, right_contracted, strict=True), *zip(left_batch, right_batch, strict=True)]
    labels = _labels(left, right, pairs)
    lefts, rights, ambiguous, gathered = _settled(left, right, labels, contracted, sizes)
    lefts, rights = _matched(lefts, rights, left, right, pairs, sizes)
    travels = [*bring(0, left, lefts, sizes), *bring(1, right, rights, sizes)]
    out = _result(lefts, rights, pairs[contracted:], left_contracted, right_contracted)
    partial = tuple(axis for dim in left_contracted for axis in lefts[dim])
    travels += summed((lefts[dim] for dim in left_contracted), Laid(result.shape, result.dtype, out), sizes)
    return Outcome((out,), tuple(travels), _why(travels, partial, gathered), ambiguous)


def convolution(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome | None:
    """A convolution is a product over its features (of gradients: over the batch); None where its window is cut up."""
    numbers = params["dimension_numbers"]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if any(laid.entries[dim] for laid, spec in zip(operands, specs, strict=False) for dim in spec[2:]):
        return None
    if params["feature_group_count"] * params["batch_group_count"] != 1:
        return _grouped(operands, result, params, sizes)
    left, right, out = (
        _matrix(laid, spec) for laid, spec in zip((operands[0], operands[1], result), specs, strict=True)
    )
    plain = {"dimension_numbers": (((1,), (1,)), ((), ()))}
    found = dot_general([left, right], out, plain, sizes)
    entries: list[tuple[str, ...]] = [()] * len(result.shape)
    for dim, axes in zip(numbers.out_spec[:2], found.results[0], strict=True):
        entries[dim] = axes
    return replace(found, results=(tuple(entries),))


def _grouped(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome | None:
    """Groups of features that lie alike in image and filters stay where they are; None where they do not."""
    numbers = params["dimension_numbers"]
    image, filters = operands[0].entries, operands[1].entries
    axes = image[numbers.lhs_spec[1]]
    alike = filters[numbers.rhs_spec[0]] == axes and not filters[numbers.rhs_spec[1]]
    if not alike or params["feature_group_count"] % _count(axes, sizes) or params["batch_group_count"] != 1:
        return None
    out: list[tuple[str, ...]] = [()] * len(result.shape)
    out[numbers.out_spec[0]], out[numbers.out_spec[1]] = image[numbers.lhs_spec[0]], axes
    return Outcome((tuple(out),))


def _matrix(laid: Laid, spec: Sequence[int]) -> Laid:
    """Its first two dimensions, in the order of a convolution; the window belongs to the second."""
    first, second, *window = spec
    size = laid.shape[second] * math.prod(laid.shape[dim] for dim in window)
    return replace(laid, shape=(laid.shape[first], size), entries=(laid.entries[first], laid.entries[second]))


def _labels(left: Laid, right: Laid, pairs: Sequence[tuple[int, int]]) -> _Labels:
    """A number for every dimension of both: those that are paired have the same, contracted ones the lowest."""
    lefts, rights = [-1] * len(left.shape), [-1] * len(right.shape)
    for number, (one, other) in enumerate(pairs):
        lefts[one] = rights[other] = number
    free = iter(range(len(pairs), len(pairs) + len(lefts) + len(rights)))
    return [n if n >= 0 else next(free) for n in lefts], [n if n >= 0 else next(free) for n in rights]


def _settled(
    left: Laid, right: Laid, labels: _Labels, contracted: int, sizes: Sizes
) -> tuple[Entries, Entries, bool, list[str]]:
    """Both layouts once no axis stands at two labels."""
    at_left, at_right = (
        {axis: label for axes, label in zip(laid.entries, numbers, strict=True) for axis in axes}
        for laid, numbers in ((left, labels[0]), (right, labels[1]))
    )
    drop_left: list[str] = []
    drop_right: list[str] = []
    ambiguous = False
    for axis in at_left:
        if axis not in at_right or at_left[axis] == at_right[axis] or sizes[axis] == 1:
            continue
        inner = at_left[axis] < contracted, at_right[axis] < contracted
        stored = left.path is not None, right.path is not None
        if inner[0] != inner[1]:
            from_left = inner[0]
        elif stored[0] != stored[1]:
            from_left = stored[0]
        else:
            from_left = left.bytes_on(sizes, [axis]) < right.bytes_on(sizes, [axis])
            ambiguous = True
        (drop_left if from_left else drop_right).append(axis)
    return without(left.entries, drop_left), without(right.entries, drop_right), ambiguous, drop_left + drop_right


def _matched(
    lefts: Entries, rights: Entries, left: Laid, right: Laid, pairs: Sequence[tuple[int, int]], sizes: Sizes
) -> tuple[Entries, Entries]:
    """Paired dimensions lie alike: the one that is whole is sliced as the other, which costs nothing."""
    one, other = list(lefts), list(rights)
    for mine, theirs in pairs:
        if one[mine] == other[theirs]:
            continue
        (both,) = joined((one[mine],), (other[theirs],), (left.shape[mine],), sizes)
        if one[mine] and other[theirs]:  # two ways to cut one dimension: the finer stays
            both = max(one[mine], other[theirs], key=lambda axes: _count(axes, sizes))
        one[mine] = other[theirs] = both
    return tuple(one), tuple(other)


def _count(axes: Sequence[str], sizes: Sizes) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count


def _result(
    lefts: Entries,
    rights: Entries,
    batch: Sequence[tuple[int, int]],
    left_contracted: Sequence[int],
    right_contracted: Sequence[int],
) -> Entries:
    gone_left = {*left_contracted, *(one for one, _ in batch)}
    gone_right = {*right_contracted, *(other for _, other in batch)}
    return (
        *(lefts[one] for one, _ in batch),
        *(axes for dim, axes in enumerate(lefts) if dim not in gone_left),
        *(axes for dim, axes in enumerate(rights) if dim not in gone_right),
    )


def _why(travels: Sequence[Travel], partial: Sequence[str], gathered: Sequence[str]) -> str:
    if not travels:
        return ""
    words: list[str] = []
    if gathered:
        words.append(f"both operands use {', '.join(sorted(set(gathered)))}, for different dimensions")
    if any(travel.operand is None for travel in travels):
        words.append(f"a contracted dimension is sharded over {', '.join(partial)}")
    return "; ".join(words) or "paired dimensions lie differently"
