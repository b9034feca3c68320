"""What is known of a pattern before it runs, in the form that `matching.py` uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DIGITS = frozenset("0123456789")
ALONE = {digit: frozenset(digit) for digit in DIGITS}

Word = tuple[str, Literal["in", "folded", "is"]]
"""A text without '/' that stands in a segment of the path; there in any case (lower-case ASCII); is the segment."""

Clause = tuple[Word, ...]
"""Every match holds at least one of these words."""

DigitSets = frozenset[frozenset[str]]


@dataclass(frozen=True)
class Reading:
    """The clauses that hold of every match, and the sets of digits that the pattern tells from the others."""

    clauses: tuple[Clause, ...] = ()
    told_apart: DigitSets = frozenset(ALONE.values())
    in_numbers: DigitSets = frozenset(ALONE.values())
    """Those of `told_apart` that can be told in a segment of digits alone: the 3 of `w3` cannot, it follows a 'w'."""


OPAQUE = Reading()


def words_of(text: str, folded: bool = False) -> list[Word]:
    """The words of a text that stands in every match, part by part.

    >>> words_of("layers/17/mlp")
    [('layers', 'in'), ('17', 'is'), ('mlp', 'in')]
    """
    parts = text.split("/")
    last = len(parts) - 1
    return [
        (part, "folded" if folded else "is" if 0 < place < last else "in") for place, part in enumerate(parts) if part
    ]
