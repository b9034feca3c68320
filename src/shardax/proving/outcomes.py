"""What one operation does to layouts: its operands as they lie, its results as they come out, what travels for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from shardax.names.decision import itemsize_of
from shardax.proving.moves import Entries, Move, local_bytes, moves, replicated, stored_width, used, without

Sizes = Mapping[str, int]
_values = count()


@dataclass(frozen=True, slots=True)
class Laid:
    """An array under a layout; `path` is the argument that it is (or a part, a cast, a slice of), if it is one.

    `value` tells arrays apart: what is gathered once is not gathered again.
    """

    shape: tuple[int, ...]
    dtype: Any
    entries: Entries
    path: str | None = None
    value: int = field(default_factory=lambda: next(_values), compare=False)

    @classmethod
    def whole(cls, aval: Any) -> Laid:
        """An array that nothing shards."""
        shape = tuple(getattr(aval, "shape", ()))
        return cls(shape, getattr(aval, "dtype", None), replicated(len(shape)))

    @property
    def itemsize(self) -> float:
        return 0 if self.dtype is None else stored_width(self.dtype, itemsize_of(self.dtype))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that shards it."""
        return used(self.entries)

    def bytes_on(self, sizes: Sizes, gathered: Collection[str] = ()) -> int:
        """Bytes of one device's block, once some axes are gathered."""
        return local_bytes(self.shape, self.itemsize, without(self.entries, gathered), sizes)


@dataclass(frozen=True, slots=True)
class Travel:
    """A move of one operand, or (`operand` None) of the result."""

    operand: int | None
    move: Move


@dataclass(frozen=True, slots=True)
class Outcome:
    """The layouts of the results and what travels; `ambiguous` when the compiler could as well do something else,
    `opaque` when nobody knows what the operation does."""

    results: tuple[Entries, ...]
    travels: tuple[Travel, ...] = ()
    why: str = ""
    ambiguous: bool = False
    opaque: bool = False


def bring(number: int, operand: Laid, to: Entries, sizes: Sizes) -> list[Travel]:
    """What it takes to have an operand in another layout."""
    return [Travel(number, move) for move in moves(operand.entries, to, operand.shape, operand.itemsize, sizes)]


def summed(dims: Iterable[Sequence[str]], result: Laid, sizes: Sizes) -> list[Travel]:
    """Partial results put together: one all-reduce for every dimension that was cut, the last one first."""
    over = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in dims]
    size = result.bytes_on(sizes)
    return [Travel(None, Move("all-reduce", axes, size)) for axes in reversed(over) if axes]


def joined(first: Entries, second: Entries, shape: Sequence[int], sizes: Sizes) -> Entries:
    """The first layout, with the axes that the second adds where the first leaves a dimension whole."""
    taken = set(used(first))
    found: list[tuple[str, ...]] = []
    for mine, other, size in zip(first, second, shape, strict=True):
        free = not mine and other and not taken & set(other) and size % math.prod(sizes[axis] for axis in other) == 0
        found.append(other if free else mine)
        taken |= set(found[-1])
    return tuple(found)


def shards(entries: Entries, sizes: Sizes) -> int:
    """How many different blocks there are."""
    return math.prod(sizes[axis] for axis in used(entries))
