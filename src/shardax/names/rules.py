"""`Rules`: ordered (pattern, target) pairs; the first pattern found in a path says where its leaf goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from shardax.errors import Offence, RuleError, plural
from shardax.names.dynamic_axes import DynamicShardingAxes
from shardax.names.layout_file import spec_from_json, spec_to_json
from shardax.names.matching import Matcher, matcher_of
from shardax.names.paths import assign
from shardax.names.ruletext import read_document, read_pairs
from shardax.names.spec import FREE
from shardax.names.tokens import MODE_TRAIN
from shardax.tables import Table

Target = PartitionSpec | tuple[Any, ...] | None
"""Mesh axes, or names of axes that a `PartitionAxis` resolves, or nothing: replicated."""


@dataclass(frozen=True)
class Match:
    """The rule that spoke for a path.

    >>> print(Match(3, "mlp/.*kernel", ("embed", None)))
    rule 3 'mlp/.*kernel' → [embed, _]
    """

    index: int
    pattern: str
    target: Target

    def __str__(self) -> str:
        return f"rule {self.index} {self.pattern!r} → {show_target(self.target)}"


@dataclass(frozen=True, repr=False)
class Rules:
    """Path patterns in order of precedence, each with its target; parsed once, compared and hashed by content.

    A pattern is searched (`re.search`) in the '/'-joined path of a leaf. A target is a `PartitionSpec` of mesh axes, a
    tuple of names that a `PartitionAxis` (or `LogicalRules`) resolves, such as `ColumnWise`, or None for replicated.

    >>> rules = Rules.of([("attn/(q|k|v)/kernel", PartitionSpec("fsdp", "tp")), ("bias$", None)])
    >>> print(rules.match("layers/7/attn/q/kernel"))
    rule 0 'attn/(q|k|v)/kernel' → P('fsdp', 'tp')
    >>> rules.match("norm/scale") is None
    True
    """

    entries: tuple[tuple[str, Target], ...]

    def __post_init__(self) -> None:
        offences: list[Offence] = []
        entries = tuple(
            (_read_pattern(place, pattern, offences), _read_target(place, pattern, target, offences))
            for place, (pattern, target) in enumerate(read_pairs(self.entries, "rules"))
        )
        try:
            matcher_of(tuple(pattern for pattern, _ in entries))
        except RuleError as error:
            offences.extend(error.offences)
        if offences:
            offences.sort(key=lambda offence: int(offence.where.removeprefix("rule ")))
            raise RuleError(f"{plural(len(offences), 'rule')} cannot be read", offences, _HOW)
        object.__setattr__(self, "entries", entries)

    @classmethod
    def of(cls, source: Any) -> Rules:
        """Rules from themselves, a list of pairs, a mapping, YAML text (or a YAML file) of either.

        >>> Rules.of({"kernel": ["embed", "mlp"], ".*": None})
        Rules([('kernel', ('embed', 'mlp')), ('.*', None)])
        """
        if isinstance(source, cls):
            return source
        rules, _ = read_document(source, "partition_rules")
        return cls(rules)

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, in order."""
        return tuple(pattern for pattern, _ in self.entries)

    @cached_property
    def _matches(self) -> tuple[Match, ...]:
        return tuple(Match(place, *entry) for place, entry in enumerate(self.entries))

    @property
    def _matcher(self) -> Matcher:
        return matcher_of(self.patterns)

    def match(self, path: str) -> Match | None:
        """The first rule whose pattern is found in the path."""
        place = self._matcher.first(path)
        return None if place < 0 else self._matches[place]

    def match_all(self, paths: Sequence[str]) -> list[Match | None]:
        """`match` of every path, in time that hardly depends on the number of rules."""
        won: list[Match | None] = [*self._matches, None]  # place -1 is the last
        return [won[place] for place in self._matcher.first_of(paths)]

    def assign(self, tree: Any, answer: Callable[[Match | None], Any], give: Callable[[Any, Any], Any]) -> Any:
        """A tree like `tree` with `give(answer(match), leaf)` for every leaf; `answer` is asked once per kind of path.

        >>> Rules.of({"up": PartitionSpec("tp")}).assign(
        ...     {"up": 1, "down": 2}, lambda match: match and match.target, lambda target, leaf: (leaf, target)
        ... )
        {'up': (1, P('tp',)), 'down': (2, None)}
        """
        won: list[Match | None] = [*self._matches, None]
        return assign(tree, self._matcher.table(lambda place: answer(won[place])), give)

    def matches(self, path: str) -> list[Match]:
        """Every rule that is found in the path, in order: the winner, then the losers."""
        return [self._matches[place] for place in self._matcher.every(path)]

    def matches_of(self, paths: Sequence[str]) -> list[list[int]]:
        """The positions of all rules found in each path, in bulk."""
        return self._matcher.every_of(paths)

    def words(self, index: int) -> list[str]:
        """Texts that a path must hold for a rule to be found in it; what a typo in the rule is seen by.

        >>> Rules.of({"mlp/(up|down)/kernel$": None}).words(0)
        ['mlp', 'kernel']
        """
        return self._matcher.words(index)

    def losers(self, path: str) -> list[Match]:
        """The rules that are found in the path too, but came too late."""
        return self.matches(path)[1:]

    def to_json(self) -> list[Any]:
        """Plain lists: `{"spec": […]}` for mesh axes, a list for axis names, None for replicated.

        >>> Rules.of([("q", PartitionSpec("tp", FREE)), ("k", ("embed", ("a", "b"))), (".*", None)]).to_json()
        [['q', {'spec': ['tp', '*']}], ['k', ['embed', ['a', 'b']]], ['.*', None]]
        """
        return [[pattern, _target_to_json(target)] for pattern, target in self.entries]

    @classmethod
    def from_json(cls, data: Any) -> Rules:
        """The inverse of `to_json`."""
        return cls(tuple((pattern, _target_from_json(target)) for pattern, target in read_pairs(data, "saved rules")))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[str, Target]]:
        return iter(self.entries)

    def __add__(self, other: Any) -> Rules:
        """These rules, then the others: what these match they keep."""
        return Rules((*self.entries, *Rules.of(other).entries))

    def __repr__(self) -> str:
        return f"Rules({list(self.entries)!r})"

    def table(self) -> Table:
        """One row per rule."""
        rows = tuple((str(m.index), m.pattern, show_target(m.target)) for m in self._matches)
        return Table("", ("rule", "pattern", "target"), rows, right=("rule",))

    def __str__(self) -> str:
        return str(self.table())


def show_target(target: Target) -> str:
    """A target as a table shows it.

    >>> show_target(("embed", ("fsdp", "tp"), None)), show_target(None), show_target(PartitionSpec("tp"))
    ('[embed, fsdp+tp, _]', 'replicated', "P('tp',)")
    """
    if target is None:
        return "replicated"
    return str(target) if isinstance(target, PartitionSpec) else f"[{', '.join(map(_show_axis, target))}]"


def _show_axis(axis: Any) -> str:
    if isinstance(axis, tuple):
        return "+".join(map(_show_axis, axis))
    return "_" if axis is None else str(axis).strip("_") or "_"  # tokens are written __LIKE_THIS__


# ---- reading --------------------------------------------------------------------------------------------------------

_HOW = (
    "a rule is (pattern for re.search, PartitionSpec | tuple of axis names | None); "
    "a literal ( [ . * + ? in a pattern is escaped with a backslash"
)
_INLINE = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s", re.VERBOSE: "x", re.ASCII: "a"}


def _read_pattern(place: int, pattern: Any, offences: list[Offence]) -> str:
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        flags = "".join(letter for flag, letter in _INLINE.items() if pattern.flags & flag)
        inline = re.match(r"\(\?[aimsux]+\)", pattern.pattern)
        return pattern.pattern if inline or not flags else f"(?{flags}){pattern.pattern}"
    offences.append(Offence(f"rule {place}", f"the pattern is {pattern!r}, not text"))
    return ""


def _read_target(place: int, pattern: Any, target: Any, offences: list[Offence]) -> Target:
    if _is_dynamic(target) and target.mode == MODE_TRAIN:  # sx.ColumnWise and its kin, as class or instance
        target = target.axes
    if target is None or isinstance(target, PartitionSpec):
        return target
    if isinstance(target, list | tuple):
        entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in target)
        bad = [entry for entry in entries if not _is_axis(entry)]
        if not bad:
            return entries
        problem = f"{', '.join(map(repr, bad))} {'is' if len(bad) == 1 else 'are'} not the name of an axis"
        offences.append(Offence(f"rule {place}", problem, rule=repr(pattern)))
        return None
    if _is_dynamic(target):
        problem, remedy = f"{target!r} reads its mode from a shape", "its axes alone"
    elif isinstance(target, str):
        problem, remedy = f"the target {target!r} is one text", f"({target!r},) for the first dimension"
    elif callable(target):
        problem = (
            f"the target {getattr(target, '__name__', target)!r} is a function; rules are values, saved and compared"
        )
        remedy = "one rule per case, with its spec"
    else:
        problem, remedy = f"the target is {target!r}", "PartitionSpec('fsdp', 'tp'), ('embed', 'mlp') or None"
    offences.append(Offence(f"rule {place}", problem, rule=repr(pattern), remedy=remedy))
    return None


def _is_dynamic(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, DynamicShardingAxes) and hasattr(target, "axes") and hasattr(target, "mode")
    return isinstance(target, DynamicShardingAxes)


def _is_axis(entry: Any) -> bool:
    if isinstance(entry, tuple):
        return all(isinstance(name, str) and name for name in entry)
    return entry is None or entry is FREE or (isinstance(entry, str) and entry != "")


def _target_to_json(target: Target) -> Any:
    if isinstance(target, PartitionSpec):
        return {"spec": spec_to_json(target)}
    if target is None:
        return None
    return ["*" if entry is FREE else list(entry) if isinstance(entry, tuple) else entry for entry in target]


def _target_from_json(data: Any) -> Any:
    if isinstance(data, dict):
        return spec_from_json(data["spec"])  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(data, list):
        return tuple(FREE if entry == "*" else entry for entry in data)
    return data
