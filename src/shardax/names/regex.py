"""What can be known of a regular expression before it runs: the words every match holds, and the digits it tells apart.

Both come from the parse tree that Python's own `re` makes, so that `matching.py` may skip a rule that cannot match
and may treat `layers/17/…` and `layers/42/…` as one path where no rule can see the difference. A pattern (or a
Python) that cannot be read this way is only slower: it has no words, and it tells all digits apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

from shardax.names.plain import plain_search, plain_ways, read_plain
from shardax.names.reading import ALONE, DIGITS, OPAQUE, Clause, Reading, words_of

_compiler: Any
_parser: Any
try:  # private, but unchanged since 3.11; without it every pattern is opaque, which costs speed and nothing else
    from re import _compiler, _parser  # pyright: ignore
except ImportError:  # pragma: no cover
    _compiler = _parser = None

_IGNORECASE = int(re.IGNORECASE)
_DIGIT_CODES = frozenset(map(ord, DIGITS))
_LITERAL = getattr(_parser, "LITERAL", None)


class Needle:
    """One pattern: validated when made (`re.error` if it is none), compiled when first needed.

    >>> needle = Needle("layers/.*/kernel$")
    >>> needle.search("model/layers/3/kernel"), needle.search("model/layers/3/bias")
    (True, False)
    >>> needle.reading.clauses
    ((('layers', 'in'),), (('kernel', 'in'),))
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._tree: Any = None
        ways = plain_ways(pattern)
        if ways:  # nothing to compile, and `str.find` is faster than `re`
            self.search: Callable[[str], bool] = plain_search(ways)
            self.reading = read_plain(ways)
            return
        self.search = self._compile_and_search
        if _parser is not None:
            self._tree = _parser.parse(pattern)
        if _parser is None or "(?<" in pattern:  # only the compiler checks look-behinds
            _ = self.regex
        self.reading = OPAQUE if self._tree is None else read(self._tree)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern, past the cache of `re`: 700 rules would throw everything else out of it."""
        return re.compile(self.pattern) if self._tree is None else _compiler.compile(self._tree)

    def _compile_and_search(self, path: str) -> bool:
        search = self.regex.search
        self.search = lambda path: search(path) is not None
        return self.search(path)


# ---- the parse tree -------------------------------------------------------------------------------------------------


def read(tree: Any) -> Reading:
    """What a parse tree of `re` demands of a match, and which digits it tells apart."""
    reader = _Reader()
    try:
        reader.items(tree, bool(tree.state.flags & _IGNORECASE))
    except (_UnknownError, AttributeError):  # another Python's parse tree
        return OPAQUE
    reader.end_run()
    clauses = tuple(dict.fromkeys(reader.clauses))
    if reader.looks_back:  # a back-reference tells every digit from every other
        return Reading(clauses)
    return Reading(clauses, frozenset(reader.told_apart), frozenset(reader.in_numbers))


class _UnknownError(Exception):
    """An operation of `re` that this file does not know."""


class _Reader:
    """Walks a parse tree once; `run` is the text that must stand without a break where the walk is."""

    def __init__(self, parent: _Reader | None = None) -> None:
        self.clauses: list[Clause] = []
        self.told_apart: set[frozenset[str]] = parent.told_apart if parent else set()
        self.in_numbers: set[frozenset[str]] = parent.in_numbers if parent else set()
        self.looks_back = False
        self.run: list[str] = []
        self.folded = False

    def end_run(self) -> None:
        if self.run:
            self.clauses.extend((word,) for word in words_of("".join(self.run), self.folded))
            self.run.clear()

    def items(self, items: Any, folded: bool) -> None:
        letter = None if folded else _LITERAL
        run = self.run
        for operation, argument in items.data:
            if operation is letter and not self.folded and argument not in _DIGIT_CODES:
                run.append(chr(argument))  # nine in ten
                continue
            visit = _VISITS.get(operation.name)
            if visit is None:
                raise _UnknownError(operation.name)
            visit(self, argument, folded)

    def literal(self, argument: int, folded: bool) -> None:
        character = chr(argument)
        if character in DIGITS:
            self.tell_apart(ALONE[character])
        if not folded and not self.folded:
            self.run.append(character)
        else:
            self.literal_in_case(character, folded)

    def literal_in_case(self, character: str, folded: bool) -> None:
        if folded != self.folded or not character.isascii():
            self.end_run()
            self.folded = folded
        if not folded:
            self.run.append(character)
        elif character.isascii():  # 'K' (Kelvin) matches 'k' when case is ignored: such a letter is no word
            self.run.append(character.lower())

    def tell_apart(self, digits: frozenset[str]) -> None:
        """Called before the run goes on: what stands in it stands just before the digit."""
        self.told_apart.add(digits)
        if not self.run or self.run[-1] in DIGITS or self.run[-1] == "/":
            self.in_numbers.add(digits)

    def stay(self, argument: Any, folded: bool) -> None:
        """Anchors take no room: what stands before and after them stands together."""

    def one_of(self, argument: Any, folded: bool) -> None:
        digits: frozenset[str] = frozenset()
        for operation, value in argument:
            name = operation.name
            if name == "LITERAL":
                digits |= DIGITS & {chr(value)}
            elif name == "RANGE":
                digits |= {digit for digit in DIGITS if value[0] <= ord(digit) <= value[1]}
            elif name == "CATEGORY":
                digits |= _category_digits(value.name)
            elif name != "NEGATE":  # the complement is told apart just as well
                raise _UnknownError(name)
        if digits and digits != DIGITS:
            self.tell_apart(digits)
        self.end_run()

    def not_literal(self, argument: Any, folded: bool) -> None:
        if chr(argument) in DIGITS:
            self.tell_apart(ALONE[chr(argument)])
        self.end_run()

    def anything(self, argument: Any, folded: bool) -> None:
        self.end_run()

    def group(self, argument: Any, folded: bool) -> None:
        _, added, removed, items = argument
        if added or removed:
            folded = (folded or bool(added & _IGNORECASE)) and not removed & _IGNORECASE
        self.items(items, folded)

    def atomic(self, argument: Any, folded: bool) -> None:
        self.items(argument, folded)

    def branch(self, argument: Any, folded: bool) -> None:
        self.end_run()
        branches = [self.apart(items, folded) for items in argument[1]]
        if all(branches):  # each way through holds something: one of those stands in every match
            best = (max(clauses, key=_weight) for clauses in branches)
            self.clauses.append(tuple(word for clause in best for word in clause))

    def repeat(self, argument: Any, folded: bool) -> None:
        least, _, items = argument
        self.end_run()
        clauses = self.apart(items, folded)
        if least:
            self.clauses.extend(clauses)

    def look_around(self, argument: Any, folded: bool) -> None:
        self.apart(argument[1], folded)

    def back_reference(self, argument: Any, folded: bool) -> None:
        self.end_run()
        self.looks_back = True

    def conditional(self, argument: Any, folded: bool) -> None:
        self.end_run()
        for items in argument[1:]:
            if items is not None:
                self.apart(items, folded)

    def apart(self, items: Any, folded: bool) -> list[Clause]:
        """The clauses of a part that may not be there, or not at this place."""
        inner = _Reader(self)
        inner.items(items, folded)
        inner.end_run()
        self.looks_back |= inner.looks_back
        return inner.clauses


_VISITS: dict[str, Callable[[_Reader, Any, bool], None]] = {
    "LITERAL": _Reader.literal,
    "AT": _Reader.stay,
    "IN": _Reader.one_of,
    "NOT_LITERAL": _Reader.not_literal,
    "ANY": _Reader.anything,
    "FAILURE": _Reader.anything,
    "SUBPATTERN": _Reader.group,
    "ATOMIC_GROUP": _Reader.atomic,
    "BRANCH": _Reader.branch,
    "MAX_REPEAT": _Reader.repeat,
    "MIN_REPEAT": _Reader.repeat,
    "POSSESSIVE_REPEAT": _Reader.repeat,
    "ASSERT": _Reader.look_around,
    "ASSERT_NOT": _Reader.look_around,
    "GROUPREF": _Reader.back_reference,
    "GROUPREF_EXISTS": _Reader.conditional,
}


def _category_digits(name: str) -> frozenset[str]:
    """ASCII digits are all in a category of `re`, or none is."""
    if name in {"CATEGORY_DIGIT", "CATEGORY_WORD", "CATEGORY_NOT_SPACE"}:
        return DIGITS
    if name in {"CATEGORY_NOT_DIGIT", "CATEGORY_NOT_WORD", "CATEGORY_SPACE"}:
        return frozenset()
    raise _UnknownError(name)


def _weight(clause: Clause) -> int:
    """How much a clause is likely to rule out: as much as its shortest word."""
    return min(len(word) for word, _ in clause)
