"""What can be known of a regular expression before it runs: the words every match holds, and the digits it tells apart.

Both come from the parse tree that Python's own `re` makes, so that `matching.py` may skip a rule that cannot match
and may treat `layers/17/…` and `layers/42/…` as one path where no rule can see the difference. A pattern (or a
Python) that cannot be read this way is only slower: it has no words, and it tells all digits apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_compiler: Any
_parser: Any
try:  # private, but unchanged since 3.11; without it every pattern is opaque, which costs speed and nothing else
    from re import _compiler, _parser  # pyright: ignore
except ImportError:  # pragma: no cover
    _compiler = _parser = None

DIGITS = frozenset("0123456789")
_ALONE = {digit: frozenset(digit) for digit in DIGITS}
_IGNORECASE = int(re.IGNORECASE)

Word = tuple[str, bool]
"""A text without '/', and whether case is ignored (it is lower-case ASCII then)."""

Clause = tuple[Word, ...]
"""Every match holds at least one of these words, within one segment of the path."""


@dataclass(frozen=True)
class Reading:
    """The clauses that hold of every match, and the sets of digits that the pattern tells from the others."""

    clauses: tuple[Clause, ...] = ()
    told_apart: frozenset[frozenset[str]] = frozenset(_ALONE.values())


OPAQUE = Reading()


class Needle:
    """One pattern: validated when made (`re.error` if it is none), compiled when first needed.

    >>> needle = Needle("layers/.*/kernel$")
    >>> needle.search("model/layers/3/kernel"), needle.search("model/layers/3/bias")
    (True, False)
    >>> needle.reading.clauses
    ((('layers', False),), (('kernel', False),))
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._tree: Any = None
        ways = _plain_ways(pattern)
        if ways:  # nothing to compile, and `str.find` is faster than `re`
            searches = [_plain_search(way) for way in ways]
            self.search: Callable[[str], bool] = (
                searches[0] if len(searches) == 1 else lambda path: any(search(path) for search in searches)
            )
            self.reading = _read_plain(ways)
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


# ---- plain patterns: texts with '.*' between them, groups of such texts, '^' and '$' at the ends --------------------

_ATOM = r"[^\\.^$*+?{}\[\]|()]|\\[^0-9A-Za-z|]|\.\*"
_GROUP = rf"\((?:\?:)?(?:{_ATOM}|\|)*\)"
_BRANCH = rf"\^?(?:{_ATOM}|{_GROUP})*\$?"
_PLAIN = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*")
_TOKEN = re.compile(rf"(?:{_ATOM})+|{_GROUP}|[|^$]")
_GAP = re.compile(r"((?:[^\\.]|\\.)+)|\.\*", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_MOST_WAYS = 16


@dataclass(frozen=True)
class _Way:
    """One way to match: these texts in order, the first at the start of the path, the last at its end."""

    texts: list[str]
    at_start: bool
    at_end: bool


def _plain_ways(pattern: str) -> list[_Way]:
    """All ways of a plain pattern, its groups written out; none when it is not plain or has too many."""
    ways: list[_Way] = []
    if not _PLAIN.fullmatch(pattern):
        return ways
    for branch in _split_branches(_TOKEN.findall(pattern)):
        spellings = [""]
        for token in branch:
            if token in {"^", "$"}:
                continue
            options = token[1:-1].removeprefix("?:").split("|") if token[0] == "(" else [token]
            spellings = [spelling + option for spelling in spellings for option in options]
            if len(spellings) + len(ways) > _MOST_WAYS:
                return []
        at_start, at_end = branch[:1] == ["^"], branch[-1:] == ["$"]
        ways.extend(_Way(_split_gaps(spelling), at_start, at_end) for spelling in spellings)
    return ways


def _split_branches(tokens: list[str]) -> list[list[str]]:
    branches: list[list[str]] = [[]]
    for token in tokens:
        if token == "|":
            branches.append([])
        else:
            branches[-1].append(token)
    return branches


def _split_gaps(spelling: str) -> list[str]:
    texts = [""]
    for piece in _GAP.finditer(spelling):
        if piece[1] is None:
            texts.append("")
        else:
            texts[-1] = _ESCAPE.sub(r"\1", piece[1]) if "\\" in piece[1] else piece[1]
    return texts


def _plain_search(way: _Way) -> Callable[[str], bool]:
    """Does a path (without a newline) match this way?"""
    at_start, at_end = way.at_start, way.at_end
    first, last = way.texts[0], way.texts[-1]
    if len(way.texts) == 1:
        if at_start:
            return (lambda path: path == first) if at_end else (lambda path: path.startswith(first))
        return (lambda path: path.endswith(last)) if at_end else (lambda path: last in path)
    middle = way.texts[at_start : len(way.texts) - at_end]

    def search(path: str) -> bool:
        if (at_start and not path.startswith(first)) or (at_end and not path.endswith(last)):
            return False
        place = len(first) if at_start else 0
        end = len(path) - len(last) if at_end else len(path)
        for text in middle:
            found = path.find(text, place, end)
            if found < 0:
                return False
            place = found + len(text)
        return place <= end

    return search


def _read_plain(ways: list[_Way]) -> Reading:
    words = [[word for text in way.texts for word in text.split("/") if word] for way in ways]
    if len({len(way) for way in words}) == 1:  # (q|k)_proj/kernel: each place holds one word or another
        clauses = [tuple((word, False) for word in dict.fromkeys(place)) for place in zip(*words, strict=True)]
    elif all(words):
        clauses = [tuple((max(way, key=len), False) for way in words)]
    else:
        clauses = []
    digits = DIGITS.intersection("".join(word for way in words for word in way))
    return Reading(tuple(clauses), frozenset(_ALONE[digit] for digit in digits))


# ---- all other patterns: the parse tree -----------------------------------------------------------------------------


def read(tree: Any) -> Reading:
    """What a parse tree of `re` demands of a match, and which digits it tells apart."""
    reader = _Reader()
    try:
        reader.items(tree, bool(tree.state.flags & _IGNORECASE))
    except (_UnknownError, AttributeError):  # another Python's parse tree
        return OPAQUE
    reader.end_run()
    told_apart = OPAQUE.told_apart if reader.looks_back else frozenset(reader.told_apart)
    return Reading(tuple(dict.fromkeys(reader.clauses)), told_apart)


class _UnknownError(Exception):
    """An operation of `re` that this file does not know."""


class _Reader:
    """Walks a parse tree once; `run` is the text that must stand without a break where the walk is."""

    def __init__(self, parent: _Reader | None = None) -> None:
        self.clauses: list[Clause] = []
        self.told_apart: set[frozenset[str]] = parent.told_apart if parent else set()
        self.looks_back = False
        self.run: list[str] = []
        self.folded = False

    def end_run(self) -> None:
        if self.run:
            for word in "".join(self.run).split("/"):
                if word:
                    self.clauses.append(((word, self.folded),))
            self.run.clear()

    def items(self, items: Any, folded: bool) -> None:
        for operation, argument in items.data:
            visit = _VISITS.get(operation.name)
            if visit is None:
                raise _UnknownError(operation.name)
            visit(self, argument, folded)

    def literal(self, argument: int, folded: bool) -> None:
        character = chr(argument)
        if character in DIGITS:
            self.told_apart.add(_ALONE[character])
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

    def stay(self, argument: Any, folded: bool) -> None:
        """Anchors take no room: what stands before and after them stands together."""

    def one_of(self, argument: Any, folded: bool) -> None:
        self.end_run()
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
            self.told_apart.add(digits)

    def not_literal(self, argument: Any, folded: bool) -> None:
        self.end_run()
        if chr(argument) in DIGITS:
            self.told_apart.add(_ALONE[chr(argument)])

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
