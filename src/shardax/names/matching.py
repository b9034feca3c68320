"""Which of many patterns matches a path first: `re.search` in order, without trying them all.

Three steps, each exact (a property test compares them with the plain loop):
- paths that differ only in digits no pattern tells apart (`layers/17/…`, `layers/42/…`) are looked up once;
- words that a match must hold, kept as bit sets per segment of a path, leave a few candidate patterns;
- candidates are tried in order, as text where they are plain, with `re` where they are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from shardax.errors import Offence, RuleError, plural
from shardax.names.paths import ROOT
from shardax.names.paths import part as text_of
from shardax.names.reading import DIGITS, DigitSets
from shardax.names.regex import Needle

_MEMO_LIMIT = 1 << 20  # entries; a process that lays out endless different trees must not grow without end


class Matcher:
    """An index over ordered patterns; places are positions in that order, and -1 is no match.

    >>> matcher = matcher_of(("kernel$", "mlp/.*", "bias"))
    >>> matcher.first_of(["mlp/up/kernel", "mlp/up/bias", "norm/scale"])
    [0, 1, -1]
    >>> matcher.every("mlp/up/kernel")
    [0, 1]
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._needles = _needles(patterns)
        self._table = _digit_table(needle.reading.told_apart for needle in self._needles)
        self._number_table = _digit_table(needle.reading.in_numbers for needle in self._needles)
        self._always, self._words = _choose_words(self._needles)
        self._segments: dict[str, tuple[int, int]] = {}
        self._memo = _Memo(self._search)

    def first(self, path: str) -> int:
        """The place of the first pattern that matches somewhere in `path`."""
        return self._memo[path.encode("utf-8", "surrogatepass").translate(self._table)]

    def first_of(self, paths: Sequence[str]) -> list[int]:
        """`first` of each path; a million leaves are mostly dictionary lookups."""
        memo = self._memo
        if len(memo) > _MEMO_LIMIT:
            memo.clear()
        return [memo[key] for key in self._keys(paths)]

    def every(self, path: str) -> list[int]:
        """The places of all patterns that match, in order."""
        return list(self._matches(path))

    def every_of(self, paths: Sequence[str]) -> list[list[int]]:
        """`every` of each path; paths that no pattern tells apart share one list."""
        keys = self._keys(paths)
        found = {key: self.every(path) for key, path in dict(zip(keys, paths, strict=True)).items()}
        return [found[key] for key in keys]

    def words(self, place: int) -> list[str]:
        """The words that pattern asks of every match, where it asks for one and no other."""
        return [clause[0][0] for clause in self._needles[place].reading.clauses if len(clause) == 1]

    def table(self, answer: Callable[[int], Any]) -> PathTable:
        """`answer(first(path))` for the paths of a tree, as `paths.assign` reads it."""
        root = PathTable("", lambda path: answer(self.first(path)), self._mask, {})
        root[ROOT] = answer(self.first(""))
        root.inner[ROOT] = root
        return root

    def _mask(self, segment: str) -> str:
        """A segment of a path with its digits masked; most by far in the number of a layer, where few patterns look."""
        if segment.isascii():
            table = self._number_table if segment.isdigit() else self._table
            return segment.encode().translate(table).decode()
        return segment.encode("utf-8", "surrogatepass").translate(self._table).decode("utf-8", "surrogatepass")

    def _keys(self, paths: Sequence[str]) -> list[bytes]:
        """The paths with their digits masked: in one sweep, which is ten times faster than one by one."""
        keys = "\n".join(paths).encode("utf-8", "surrogatepass").translate(self._table).split(b"\n")
        if len(keys) == len(paths):
            return keys
        return [path.encode("utf-8", "surrogatepass").translate(self._table) for path in paths]

    def _search(self, key: bytes) -> int:
        return next(self._matches(key.decode("utf-8", "surrogatepass")), -1)

    def _matches(self, path: str) -> Iterator[int]:
        candidates = self._candidates(path)
        newline = "\n" in path  # '.' and '$' treat it apart, and plain patterns do not
        while candidates:
            lowest = candidates & -candidates
            place = lowest.bit_length() - 1
            needle = self._needles[place]
            if needle.regex.search(path) is not None if newline else needle.search(path):
                yield place
            candidates ^= lowest

    def _candidates(self, path: str) -> int:
        """The patterns whose words all stand in the path, as a bit set."""
        one, other = self._always
        segments = self._segments
        for segment in path.split("/"):
            held = segments.get(segment)
            if held is None:
                if len(segments) >= _MEMO_LIMIT:
                    segments.clear()
                held = segments[segment] = self._held_in(segment)
            one |= held[0]
            other |= held[1]
        return one & other

    def _held_in(self, segment: str) -> tuple[int, int]:
        one, other = self._words["is"].get(segment, (0, 0))
        lowered = segment.lower() if segment.isascii() else None
        for word, (first, second) in self._words["in"].items():
            if word in segment:
                one |= first
                other |= second
        for word, (first, second) in self._words["folded"].items():
            if lowered is None or word in lowered:  # beyond ASCII, letters fold in ways that only `re` knows
                one |= first
                other |= second
        return one, other


class _Memo(dict[bytes, int]):
    """The place of each masked path, searched for when it is first asked for."""

    def __init__(self, search: Callable[[bytes], int]) -> None:
        self.search = search

    def __missing__(self, key: bytes) -> int:
        found = self[key] = self.search(key)
        return found


class PathTable(dict[Any, Any]):
    """Answers under one prefix, filled as they are asked for; prefixes that no pattern tells apart share a table."""

    def __init__(
        self, prefix: str, answer: Callable[[str], Any], mask: Callable[[str], str], known: dict[str, PathTable]
    ) -> None:
        self.prefix = prefix
        self.answer = answer
        self.inner: dict[Any, PathTable] = _InnerTables(self, mask, known)

    def __missing__(self, part: Any) -> Any:
        if type(part) is not str:  # 1 and True are one key of a dict, and two paths
            return self[text_of(part)]
        found = self[part] = self.answer(self.prefix + part)
        return found


class _InnerTables(dict[Any, PathTable]):
    def __init__(self, outer: PathTable, mask: Callable[[str], str], known: dict[str, PathTable]) -> None:
        self.outer = outer
        self.mask = mask
        self.known = known

    def __missing__(self, part: Any) -> PathTable:
        if type(part) is not str:
            return self[text_of(part)]
        prefix = f"{self.outer.prefix}{self.mask(part)}/"
        found = self.known.get(prefix)
        if found is None:
            found = self.known[prefix] = PathTable(prefix, self.outer.answer, self.mask, self.known)
        self[part] = found
        return found


@lru_cache(maxsize=32)
def matcher_of(patterns: tuple[str, ...]) -> Matcher:
    """The matcher of these patterns; made once for equal rules, so that laying out a second tree costs no compile."""
    return Matcher(patterns)


def _needles(patterns: Iterable[str]) -> list[Needle]:
    needles: list[Needle] = []
    offences: list[Offence] = []
    for place, pattern in enumerate(patterns):
        try:
            needles.append(Needle(pattern))
        except re.error as error:
            where = "" if error.pos is None else f" at position {error.pos}"
            offences.append(
                Offence(f"rule {place}", f"not a regular expression: {error.msg}{where}", rule=repr(pattern))
            )
        except (OverflowError, RecursionError) as error:
            offences.append(Offence(f"rule {place}", f"not a regular expression: {error}", rule=repr(pattern)))
    if offences:
        remedy = "write patterns for re.search; a literal ( [ . * + ? is escaped with a backslash"
        raise RuleError(f"{plural(len(offences), 'pattern')} cannot be read", offences, remedy)
    return needles


def _digit_table(told_apart: Iterable[DigitSets]) -> bytes:
    """Each digit becomes the least one that no pattern tells from it.

    Sound because every single step of `re` then treats a digit and its stand-in alike, and lengths stay.
    """
    sets = sorted({tuple(sorted(digits)) for some in told_apart for digits in some})
    stand_in: dict[tuple[bool, ...], str] = {}
    masked = [stand_in.setdefault(tuple(d in digits for digits in sets), d) for d in sorted(DIGITS)]
    return bytes.maketrans("".join(sorted(DIGITS)).encode(), "".join(masked).encode())


_Sides = tuple[int, int]


def _choose_words(needles: Sequence[Needle]) -> tuple[_Sides, dict[str, dict[str, _Sides]]]:
    """Two clauses of each pattern, the rarest ones among all patterns, as bit sets by kind of word and word.

    A pattern with fewer clauses has its bit always set: nothing then rules it out on that side.
    """
    rarity = Counter(clause for needle in needles for clause in needle.reading.clauses)

    merit = {clause: (count, -min(len(word) for word, _ in clause)) for clause, count in rarity.items()}
    always = [0, 0]
    words: dict[str, dict[str, list[int]]] = {"is": {}, "in": {}, "folded": {}}
    for place, needle in enumerate(needles):
        best = sorted(needle.reading.clauses, key=merit.__getitem__)[:2]
        for side in range(2):
            if side >= len(best):
                always[side] |= 1 << place
                continue
            for word, how in best[side]:
                words[how].setdefault(word, [0, 0])[side] |= 1 << place
    chosen = {how: {word: (one, other) for word, (one, other) in sides.items()} for how, sides in words.items()}
    return (always[0], always[1]), chosen
