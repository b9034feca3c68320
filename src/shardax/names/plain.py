"""Plain patterns: texts with '.*' between them, groups of such texts, '^' and '$' at the ends.

Most rules are plain. They need no compiling, and `str.find` answers them faster than `re`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardax.names.reading import ALONE, DIGITS, Reading, words_of

_ATOM = r"[^\\.^$*+?{}\[\]|()]|\\[^0-9A-Za-z|]|\.\*"
_GROUP = rf"\((?:\?:)?(?:{_ATOM}|\|)*\)"
_BRANCH = rf"\^?(?:{_ATOM}|{_GROUP})*\$?"
_PLAIN = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*")
_TOKEN = re.compile(rf"(?:{_ATOM})+|{_GROUP}|[|^$]")
_GAP = re.compile(r"((?:[^\\.]|\\.)+)|\.\*", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NUMBER_DIGIT = re.compile(r"(?<![^0-9/])[0-9]")  # one that may stand in a segment of digits alone
_MOST_WAYS = 16


@dataclass(frozen=True)
class Way:
    """One way to match: these texts in order, the first at the start of the path, the last at its end."""

    texts: list[str]
    at_start: bool
    at_end: bool


def plain_ways(pattern: str) -> list[Way]:
    """All ways of a plain pattern, its groups written out; none when it is not plain or has too many."""
    ways: list[Way] = []
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
        ways.extend(Way(_split_gaps(spelling), at_start, at_end) for spelling in spellings)
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


def plain_search(ways: list[Way]) -> Callable[[str], bool]:
    """Does a path (without a newline) match one of these ways?"""
    if len(ways) == 1:
        return _search(ways[0])
    if all(len(way.texts) == 1 and not way.at_start and not way.at_end for way in ways):
        texts = [way.texts[0] for way in ways]

        def any_text(path: str) -> bool:
            for text in texts:  # noqa: SIM110 - twice as fast as any()
                if text in path:
                    return True
            return False

        return any_text
    searches = [_search(way) for way in ways]
    return lambda path: any(search(path) for search in searches)


def _search(way: Way) -> Callable[[str], bool]:
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


def read_plain(ways: list[Way]) -> Reading:
    words = [[word for text in way.texts for word in words_of(text)] for way in ways]
    if len({len(way) for way in words}) == 1:  # (q|k)_proj/kernel: each place holds one word or another
        clauses = [tuple(dict.fromkeys(place)) for place in zip(*words, strict=True)]
    elif all(words):
        clauses = [tuple(max(way, key=lambda word: len(word[0])) for way in words)]
    else:
        clauses = []
    texts = [text for way in ways for text in way.texts]
    digits = {digit for text in texts for digit in DIGITS.intersection(text)}
    numbers = {digit for text in texts for digit in _NUMBER_DIGIT.findall(text)}
    return Reading(tuple(clauses), frozenset(ALONE[d] for d in digits), frozenset(ALONE[d] for d in numbers))
