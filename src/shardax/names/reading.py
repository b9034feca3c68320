"""What is known of a pattern before it runs, in the form that `matching.py` uses."""

from __future__ import annotations

from dataclasses import dataclass

DIGITS = frozenset("0123456789")
ALONE = {digit: frozenset(digit) for digit in DIGITS}

Word = tuple[str, bool]
"""A text without '/', and whether case is ignored (it is lower-case ASCII then)."""

Clause = tuple[Word, ...]
"""Every match holds at least one of these words, within one segment of the path."""

DigitSets = frozenset[frozenset[str]]


@dataclass(frozen=True)
class Reading:
    """The clauses that hold of every match, and the sets of digits that the pattern tells from the others."""

    clauses: tuple[Clause, ...] = ()
    told_apart: DigitSets = frozenset(ALONE.values())
    in_numbers: DigitSets = frozenset(ALONE.values())
    """Those of `told_apart` that can be told in a segment of digits alone: the 3 of `w3` cannot, it follows a 'w'."""


OPAQUE = Reading()
