"""Specs for a tree from path patterns: rules over a whole tree, and a one-line pattern language."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax.sharding import PartitionSpec

from shardax.errors import Offence, RuleError, UnknownAxisError, did_you_mean, plural
from shardax.names.axes import PartitionAxis
from shardax.names.decision import Decision, every_move_is_logged, record, warn_outside
from shardax.names.mesh import MeshLike
from shardax.names.paths import flatten, path_text
from shardax.names.rules import Match, Rules
from shardax.names.spec import Correction, Fit, SpecLike, as_spec, axes_of, mesh_shape
from shardax.names.tokens import MODE_TRAIN

# ---- rules over a tree ----------------------------------------------------------------------------------------------


def match_partition_rules(rules: Any, tree: Any, min_size: int | None = 0, strict: bool = True) -> Any:
    """A spec for every leaf: of the first rule whose pattern is found in the leaf's path.

    Strict: scalars and leaves without a shape get `P()`, so do leaves with fewer than `min_size` elements (None: the
    environment's `MIN_SHARDING_SIZE`, else 16384), and entries beyond the rank of a leaf are trimmed. Not strict: the
    rule's spec as it stands, for leaves of any kind. A leaf that no rule matches is an error; all of them are listed.

    >>> import jax
    >>> tree = {"mlp": {"up": jax.ShapeDtypeStruct((8, 32), "float32"), "bias": jax.ShapeDtypeStruct((32,), "float32")}}
    >>> match_partition_rules([("mlp", PartitionSpec("fsdp", "tp"))], tree)
    {'mlp': {'up': P('fsdp', 'tp'), 'bias': P('fsdp',)}}
    >>> match_partition_rules([("up", PartitionSpec("tp"))], {"up": 0, "down": 1}, strict=False)
    Traceback (most recent call last):
    shardax.errors.RuleError: 1 leaf of 2 is matched by none of 1 rule
      down: no rule matches
    add a rule; ('.*', PartitionSpec()) as the last one replicates what is left
    """
    parsed = Rules.of(rules)
    asked = _Asked(parsed, min_sharding_size() if min_size is None else min_size, strict)
    specs = parsed.assign(tree, asked.answer, asked.strictly if strict else asked.raw)
    if asked.remarks:
        asked.report(tree)
    return specs


def min_sharding_size() -> int:
    """`MIN_SHARDING_SIZE` of the environment, read when used: smaller arrays are not worth sharding.

    >>> min_sharding_size()
    16384
    """
    text = os.environ.get("MIN_SHARDING_SIZE", "16384")
    try:
        return int(text)
    except ValueError:
        raise RuleError(f"MIN_SHARDING_SIZE={text!r} in the environment is not a whole number") from None


class _Asked:
    """What the rules ask for each leaf, and whether anything has to be said about it."""

    def __init__(self, rules: Rules, min_size: int, strict: bool) -> None:
        self.rules = rules
        self.min_size = min_size
        self.strict = strict
        self.remarks = False
        self.every_move = every_move_is_logged()

    def answer(self, match: Match | None) -> tuple[PartitionSpec | None, int]:
        """The spec of a rule and the rank it needs; where no rule matched, none has it."""
        if match is None:
            return None, _NEVER
        spec = _spec_of(match)
        return spec, len(spec)

    def raw(self, answer: tuple[PartitionSpec | None, int], leaf: Any) -> PartitionSpec | None:
        self.remarks |= answer[0] is None
        return answer[0]

    def strictly(self, answer: tuple[PartitionSpec | None, int], leaf: Any) -> PartitionSpec | None:
        shape = getattr(leaf, "shape", None)
        if not shape:
            return _REPLICATED
        if answer[1] <= len(shape) and not self.min_size:
            return answer[0]
        return self._with_care(answer[0], shape)

    def _with_care(self, spec: PartitionSpec | None, shape: tuple[int, ...]) -> PartitionSpec | None:
        if spec is None:
            self.remarks = True
        elif math.prod(shape) < self.min_size:
            self.remarks |= self.every_move
            return _REPLICATED
        elif len(spec) > len(shape):
            self.remarks = True
            return _cut(spec, len(shape))
        return spec

    def report(self, tree: Any) -> None:
        """Complain of every leaf that no rule matches; record what was trimmed; name the small if all is logged."""
        paths, leaves = flatten(tree)
        unmatched: list[Offence] = []
        small: list[str] = []
        for path, leaf, match in zip(paths, leaves, self.rules.match_all(paths), strict=True):
            shape: Any = getattr(leaf, "shape", None)
            if self.strict and not shape:
                continue
            if match is None:
                unmatched.append(Offence(path or "(root)", "no rule matches", shape=shape))
            elif self.strict and self.min_size and math.prod(shape) < self.min_size:
                small.append(path)
            elif self.strict:
                trimmed(_spec_of(match), shape, path, str(match), getattr(leaf, "dtype", ""))
        if unmatched:
            many = len(unmatched)
            headline = (
                f"{plural(many, 'leaf', 'leaves')} of {len(paths)} {'is' if many == 1 else 'are'} matched by none of "
            )
            remedy = "add a rule; ('.*', PartitionSpec()) as the last one replicates what is left"
            raise RuleError(headline + plural(len(self.rules), "rule"), unmatched, remedy)
        if small and self.every_move:
            warn_outside(f"replicated, smaller than {self.min_size} elements: {', '.join(small)}")


_REPLICATED = PartitionSpec()
_NEVER = sys.maxsize


def _spec_of(match: Match) -> PartitionSpec:
    """Names of axes mean what they mean to every `PartitionAxis`; mesh axes stand as they are."""
    target = match.target
    if target is None or isinstance(target, PartitionSpec):
        return as_spec(target)
    return PartitionAxis().resolve_spec(target, MODE_TRAIN)


@lru_cache(maxsize=4096)
def _cut(spec: PartitionSpec, rank: int) -> PartitionSpec:
    return PartitionSpec(*tuple(spec)[:rank])


def trimmed(spec: PartitionSpec, shape: tuple[int, ...], path: str, rule: str, dtype: Any = "") -> PartitionSpec:
    """A spec without the entries that an array has no dimension for; mesh axes lost that way are recorded.

    >>> trimmed(PartitionSpec("fsdp", "tp"), (8,), "bias", "rule 0")
    P('fsdp',)
    """
    given = _cut(spec, len(shape))
    lost = tuple(
        Correction(dim, axes_of(entry), "too-long", 0, f"{len(spec)} entries for {plural(len(shape), 'dim')}")
        for dim, entry in enumerate(spec)
        if dim >= len(shape) and axes_of(entry)
    )
    if lost:
        record(Decision(path, tuple(shape), str(dtype), given, rule, Fit(spec, tuple(shape), (), given, lost)))
    return given


# ---- one line of patterns -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatternSpec:
    """A function of a name and an array; prints as the rules it follows."""

    rules: Rules
    default: PartitionSpec

    def __call__(self, name: Any, array: Any = None) -> PartitionSpec:
        """The spec of the first rule found in the name (a path, or jax's key path)."""
        path = name if isinstance(name, str) else path_text(name)
        match = self.rules.match(path)
        spec = self.default if match is None else as_spec(match.target)
        shape = getattr(array, "shape", None)
        if shape is None or len(spec) <= len(shape):
            return spec
        return trimmed(spec, shape, path, str(match or "default_spec"), getattr(array, "dtype", ""))


def create_pattern_based_partition_spec(
    pattern: str, mesh: MeshLike | None = None, default_spec: SpecLike = None
) -> PatternSpec:
    """A function `(name, array) -> PartitionSpec` from one line of rules.

    `,` stands between rules, `->` between names and spec, `|` between names (each a pattern for `re.search`), `.`
    between dimensions, `+` within a dimension over several axes; `None` or `_` is a dimension that is not sharded.
    With a mesh, its axes are the only ones known. What no rule matches gets `default_spec`, else `P()`.

    >>> spec_of = create_pattern_based_partition_spec("attention|mlp->data, hidden->fsdp+dp._.model")
    >>> spec_of("layers/0/mlp/kernel", None), spec_of("hidden", None), spec_of("norm", None)
    (P('data',), P(('fsdp', 'dp'), None, 'model'), P())
    >>> create_pattern_based_partition_spec("mlp->data,->tp,norm-fsdp,hidden->a..b")
    Traceback (most recent call last):
    shardax.errors.RuleError: 3 mistakes in the pattern 'mlp->data,->tp,norm-fsdp,hidden->a..b'
      position 10: no name before '->' [rule '->tp']
      position 15: no '->' between names and spec [rule 'norm-fsdp']
      position 35: no axis [rule 'hidden->a..b']; would work: '_' for a dimension that is not sharded
    write names->spec, as in 'attention|mlp->data, hidden->fsdp+dp._.model'
    """
    problems = _Problems(pattern)
    known = None if mesh is None else tuple(name for name, _ in mesh_shape(mesh))
    read = [_read_rule(place, text, known, problems) for place, text in _split(pattern, ",")]
    problems.finish()
    try:
        rules = Rules(tuple(rule for rule in read if rule is not None))
    except RuleError as error:
        raise RuleError(f"the pattern {pattern!r} cannot be read", error.offences, _GRAMMAR) from None
    return PatternSpec(rules, as_spec(default_spec))


_GRAMMAR = "write names->spec, as in 'attention|mlp->data, hidden->fsdp+dp._.model'"
_AXIS = re.compile(r"[A-Za-z_][\w-]*")


class _Problems:
    """Everything that is wrong with one line, each at its position."""

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise RuleError(f"a pattern is text, not {pattern!r}", remedy=_GRAMMAR)
        self.pattern = pattern
        self.offences: list[Offence] = []
        self.only_unknown = True

    def add(self, place: int, problem: str, rule: str, remedy: str | None = None, unknown: bool = False) -> None:
        self.only_unknown &= unknown
        self.offences.append(Offence(f"position {place}", problem, rule=repr(rule), remedy=remedy))

    def finish(self) -> None:
        if self.offences:
            kind = UnknownAxisError if self.only_unknown else RuleError
            headline = f"{plural(len(self.offences), 'mistake')} in the pattern {self.pattern!r}"
            raise kind(headline, self.offences, _GRAMMAR)


def _read_rule(place: int, text: str, known: tuple[str, ...] | None, problems: _Problems) -> Any:
    rule = text.strip()
    names, arrow, spec = text.partition("->")
    after = place + len(names) + len(arrow)
    if not rule:
        return problems.add(place, "no rule here", text)
    if not arrow:
        return problems.add(place + len(text) - len(text.lstrip()), "no '->' between names and spec", rule)
    if "->" in spec:
        return problems.add(after + spec.index("->"), "a second '->'", rule, "',' between rules")
    alternatives = list(_split(names, "|"))
    for offset, name in alternatives:
        if not name.strip():
            problems.add(place + offset, "no name before '->'" if len(alternatives) == 1 else "no name at '|'", rule)
    entries = [_read_dimension(after + offset, entry, rule, known, problems) for offset, entry in _split(spec, ".")]
    used = [axis for entry in entries for axis in entry]
    for axis in dict.fromkeys(axis for axis in used if used.count(axis) > 1):
        problems.add(after, f"{axis!r} is used {used.count(axis)} times", rule, f"{axis!r} once")
    found = [None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries]
    return "|".join(name.strip() for _, name in alternatives), PartitionSpec(*found)


def _read_dimension(
    place: int, text: str, rule: str, known: tuple[str, ...] | None, problems: _Problems
) -> tuple[str, ...]:
    if text.strip() in {"None", "_"}:
        return ()
    axes: list[str] = []
    for offset, part in _split(text, "+"):
        axis = part.strip()
        at = place + offset + len(part) - len(part.lstrip())
        if not axis:
            problems.add(at, "no axis", rule, "'_' for a dimension that is not sharded")
        elif axis in {"None", "_"} or not _AXIS.fullmatch(axis):
            problems.add(at, f"{axis!r} is no axis", rule, "letters, digits, '_' and '-'; '+' between axes")
        elif known is not None and axis not in known:
            close = did_you_mean(axis, known)
            problems.add(at, f"{axis!r} is not an axis of the mesh {known}{close}", rule, unknown=True)
        else:
            axes.append(axis)
    return tuple(axes)


def _split(text: str, separator: str) -> Iterator[tuple[int, str]]:
    """Pieces with their positions; what stands in brackets stays whole: 'layer_[0,1]|w{1,2}->tp' is one rule."""
    start = depth = 0
    escaped = False
    for place, character in enumerate(text):
        if escaped or character == "\\":
            escaped = not escaped
        elif character == separator and not depth:
            yield start, text[start:place]
            start = place + 1
        else:
            depth = max(0, depth + (character in "([{") - (character in ")]}"))
    yield start, text[start:]
