"""Verifies that the objects which occur in a structure are shared among its places as they were when it was surveyed.

Nothing may be kept alive here and nothing may be compared with `==`, which computes on some cells. Three ways, the
fastest that holds: objects that hash by identity go into a set; cells whose family has `marks` are known by those;
everything else by the numbers of `id`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any

from shardax.state.kinds import role_of

Pick = Callable[[Sequence[Any]], Sequence[Any]]


def picker(positions: Sequence[int], size: int) -> Pick | None:
    """The fastest way to take these positions from a sequence of `size`; None where nothing is taken."""
    if not positions:
        return None
    first, count = positions[0], len(positions)
    if list(positions) == list(range(first, first + count)):
        return everything if count == size else itemgetter(slice(first, first + count))
    return itemgetter(*positions)  # more than one: a tuple


def everything(objects: Sequence[Any]) -> Sequence[Any]:
    """The picker of all positions."""
    return objects


class Sharing:
    """The pattern in which one sequence of objects repeats itself."""

    __slots__ = ("alike", "distinct", "first", "hashed", "last", "marked", "marks", "numbers")

    def __init__(self, occurrences: Sequence[Any]) -> None:
        self.numbers = list(map(id, occurrences))  # not references: equal numbers of live objects are equal sharing
        seen: dict[int, int] = {}
        self.first = [seen.setdefault(number, place) for place, number in enumerate(self.numbers)]
        self.distinct = len(seen)
        self.alike: Callable[[Sequence[Any]], bool] = self._by_numbers
        if self.distinct == len(occurrences):
            self._by_kind(occurrences)

    def _by_kind(self, occurrences: Sequence[Any]) -> None:
        """Nothing is shared: that is told faster."""
        families = {cls: getattr(role_of(cls), "marks", None) for cls in set(map(type, occurrences))}
        by_mark = {cls: marks for cls, marks in families.items() if marks is not None}
        if not all(cls in by_mark or _hashes_by_identity(cls) for cls in families):
            return
        size = len(occurrences)
        self.hashed = picker([place for place, value in enumerate(occurrences) if type(value) not in by_mark], size)
        self.marked = picker([place for place, value in enumerate(occurrences) if type(value) in by_mark], size)
        if self.marked is None:
            self.alike = self._by_hash
        elif len(set(by_mark.values())) == 1:  # two frameworks in one structure: by their numbers
            (self.marks,) = set(by_mark.values())
            self.last = self.marks(self.marked(occurrences))
            if len(set(map(id, self.last))) == len(self.last):
                self.alike = self._by_marks

    def _by_hash(self, objects: Sequence[Any]) -> bool:
        return len(set(objects)) == self.distinct

    def _by_marks(self, objects: Sequence[Any]) -> bool:
        """The marks of before, each of another cell, still belong to the same cells as long as they are alive."""
        assert self.marked is not None
        marks = self.marks(self.marked(objects))
        if self.hashed is not None and len(set(self.hashed(objects))) + len(marks) != self.distinct:
            return False
        if all(map(is_, marks, self.last)):
            return True
        if len(set(map(id, self.marked(objects)))) != len(marks):
            return False
        if len(set(map(id, marks))) == len(marks):
            self.last = marks
        return True

    def _by_numbers(self, objects: Sequence[Any]) -> bool:
        numbers = list(map(id, objects))
        if numbers == self.numbers:
            return True
        if len(set(numbers)) != self.distinct or [numbers[place] for place in self.first] != numbers:
            return False
        self.numbers = numbers
        return True


def _hashes_by_identity(cls: type) -> bool:
    return cls.__hash__ is object.__hash__ and cls.__eq__ is object.__eq__
