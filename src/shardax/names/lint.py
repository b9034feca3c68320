"""`lint`: everything that is wrong between a tree, its rules and a mesh, in one report that can be read or raised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from jax.sharding import PartitionSpec

from shardax.errors import Offence, RuleError, ShardaxError, UnknownAxisError, did_you_mean, plural
from shardax.names.asking import ResolvesAxes, resolver
from shardax.names.decision import itemsize_of
from shardax.names.mesh import MeshLike, MeshSpec, current_mesh
from shardax.names.paths import flatten
from shardax.names.rules import Rules
from shardax.names.spec import MeshShape, fit_cached, mesh_shape
from shardax.names.tokens import MODE_TRAIN
from shardax.tables import Reported, Table

Kind = Literal[
    "no-leaves", "not-an-array", "unmatched", "unused", "shadowed", "unknown-axis", "duplicate", "rank", "indivisible"
]

_OF_A_LEAF: dict[str, Kind] = {"too-long": "rank", "indivisible": "indivisible"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and of which kind."""

    kind: Kind
    offence: Offence

    def __str__(self) -> str:
        return f"{self.kind}: {self.offence}"


@dataclass(frozen=True)
class LintReport(Reported):
    """What `lint` found; empty means that every leaf has its rule, every rule a leaf, and every spec fits."""

    findings: tuple[Finding, ...]
    leaves: int
    rules: int
    mesh: str | None

    @property
    def ok(self) -> bool:
        """Was nothing found?"""
        return not self.findings

    def of(self, *kinds: Kind) -> tuple[Finding, ...]:
        """The findings of some kinds."""
        return tuple(finding for finding in self.findings if finding.kind in kinds)

    def without(self, *kinds: Kind) -> LintReport:
        """The report without some kinds: rules for many models are unused in one of them.

        >>> from jax import ShapeDtypeStruct
        >>> lint({"w": ShapeDtypeStruct((8,), "float32")}, {"w": None, "lora": None}).without("unused").ok
        True
        """
        kept = tuple(finding for finding in self.findings if finding.kind not in kinds)
        return LintReport(kept, self.leaves, self.rules, self.mesh)

    def raise_if_bad(self) -> None:
        """Raise a `RuleError` that lists every finding, if there is one."""
        if self.findings:
            raise RuleError(self._headline(), [_titled(finding) for finding in self.findings])

    def table(self) -> Table:
        """One row per finding."""
        rows = tuple(
            (f.kind, f.offence.where, f.offence.problem, f.offence.remedy or "", f.offence.rule or "")
            for f in self.findings
        )
        return Table(self._headline(), ("kind", "where", "problem", "would work", "rule"), rows)

    def _headline(self) -> str:
        found = plural(len(self.findings), "problem") if self.findings else "no problem"
        over = f"on mesh {self.mesh}" if self.mesh else "no mesh given: axes are not checked"
        return f"{found} with {plural(self.leaves, 'leaf', 'leaves')} and {plural(self.rules, 'rule')}; {over}"

    def __str__(self) -> str:
        return str(self.table()) if self.findings else self._headline()


def lint(
    tree: Any,
    rules: Any,
    mesh: MeshLike | None = None,
    axes: ResolvesAxes | None = None,
    *,
    mode: str = MODE_TRAIN,
) -> LintReport:
    """Check rules against a tree and a mesh (given, or in force): all problems at once, nothing raised.

    Unmatched leaves; rules that no leaf needs, or that always come too late; specs longer than their leaf, over axes
    that are unknown or used twice, over dimensions that do not divide.

    >>> from jax import ShapeDtypeStruct
    >>> up, bias = ShapeDtypeStruct((16, 6), "float32"), ShapeDtypeStruct((6,), "float32")
    >>> rules = [("up", PartitionSpec("dp", "tp")), ("mlp/up", None), ("mpl/bias", PartitionSpec("fsd"))]
    >>> report = lint({"mlp": {"up": up, "bias": bias}}, rules, "fsdp=2,dp=2,tp=4")
    >>> for finding in report.findings:
    ...     print(finding.kind, "|", finding.offence.where, "|", finding.offence.problem)
    unmatched | mlp/bias | no rule matches
    shadowed | rule 1 'mlp/up' | always comes too late: rule 0 'up' takes its 1 leaf
    unused | rule 2 'mpl/bias' | matches no leaf: 'mpl' is in no path; did you mean 'mlp'?
    unknown-axis | rule 2 'mpl/bias' | 'fsd' is not an axis of the mesh ('fsdp', 'dp', 'tp'); did you mean 'fsdp'?
    indivisible | mlp/up | dim 1: 6 does not divide by 'tp' (4)
    """
    parsed = Rules.of(rules)
    target = current_mesh(mesh)
    paths, leaves = flatten(tree)
    arrays = [_Array(path, *_facts(leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    found = parsed.matches_of(paths)
    findings: list[Finding] = []
    if not arrays:
        findings.append(Finding("no-leaves", Offence("", "the tree has no leaves")))
    findings += _check_leaves(arrays, found, parsed)
    findings += _check_rules(arrays, found, parsed)
    specs, bad_targets = _resolve(parsed, resolver(axes, mode))
    findings += bad_targets
    if target is not None:
        shape_of_mesh = mesh_shape(target)
        findings += _check_axes(parsed, specs, shape_of_mesh)
        findings += _check_fits(arrays, found, parsed, specs, shape_of_mesh)
    return LintReport(tuple(findings), len(arrays), len(parsed), None if target is None else str(MeshSpec.of(target)))


@dataclass(frozen=True)
class _Array:
    path: str
    shape: tuple[int, ...] | None
    itemsize: int


def _facts(leaf: Any) -> tuple[tuple[int, ...] | None, int]:
    if isinstance(leaf, int | float | complex):
        return (), 8
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return (None, 0) if shape is None or dtype is None else (tuple(shape), itemsize_of(dtype))


def _check_leaves(arrays: Sequence[_Array], found: Sequence[Sequence[int]], rules: Rules) -> Iterator[Finding]:
    words = list(dict.fromkeys(word for place in range(len(rules)) for word in rules.words(place)))

    @cache
    def close(segment: str) -> str:
        return "" if segment in words else did_you_mean(segment, words)

    for array, places in zip(arrays, found, strict=True):
        if array.shape is None:
            yield Finding("not-an-array", Offence(array.path, "is not an array"))
        elif not places and array.shape != ():  # a scalar needs no rule
            hints = [
                f": {segment!r} is in no rule{close(segment)}" for segment in array.path.split("/") if close(segment)
            ]
            problem = f"no rule matches{''.join(hints[-1:])}"  # the last part of a path is the most telling
            yield Finding("unmatched", Offence(array.path, problem, shape=array.shape))


def _check_rules(arrays: Sequence[_Array], found: Sequence[Sequence[int]], rules: Rules) -> Iterator[Finding]:
    """Rules that never win, because no leaf matches or because an earlier rule always does."""
    winners: list[dict[int, int]] = [{} for _ in range(len(rules))]  # rule → who takes its leaves, how many
    for places in found:
        for place in places:
            winners[place][places[0]] = winners[place].get(places[0], 0) + 1
    segments = list(dict.fromkeys(segment for array in arrays for segment in array.path.split("/")))
    for place, taken in enumerate(winners):
        if place in taken:
            continue
        if not taken:
            yield Finding(
                "unused", Offence(_name(rules, place), f"matches no leaf{_missing(rules.words(place), segments)}")
            )
        else:
            others = ", ".join(_name(rules, other) for other in taken)
            verb = "takes its" if len(taken) == 1 else "take its"
            problem = f"always comes too late: {others} {verb} {plural(sum(taken.values()), 'leaf', 'leaves')}"
            yield Finding("shadowed", Offence(_name(rules, place), problem))


def _missing(words: Iterable[str], segments: Sequence[str]) -> str:
    """The words of a rule that no path holds: where the typo is."""
    gone = [word for word in words if not any(word in segment for segment in segments)]
    return "".join(f": {word!r} is in no path{did_you_mean(word, segments)}" for word in gone[:1])


def _resolve(rules: Rules, resolve: Callable[[Any], PartitionSpec]) -> tuple[list[PartitionSpec | None], list[Finding]]:
    """The spec of every rule; None where its axes cannot be resolved."""
    specs: list[PartitionSpec | None] = []
    findings: list[Finding] = []
    for place, (_, target) in enumerate(rules):
        try:
            specs.append(resolve(target))
        except ShardaxError as error:
            specs.append(None)
            kind: Kind = "unknown-axis" if isinstance(error, UnknownAxisError) else "duplicate"
            problems = "; ".join(f"{o.where}: {o.problem}".lstrip(": ") for o in error.offences) or error.headline
            findings.append(Finding(kind, Offence(_name(rules, place), problems, remedy=error.remedy or None)))
    return specs, findings


def _check_axes(rules: Rules, specs: Sequence[PartitionSpec | None], mesh: MeshShape) -> Iterator[Finding]:
    """What is wrong with the spec of a rule whatever the leaf: said once per rule."""
    for place, spec in enumerate(specs):
        if spec is None:
            continue
        for correction in fit_cached(spec, (0,) * len(spec), mesh, 1, True).corrections:  # 0 divides by everything
            kind: Kind = "unknown-axis" if correction.reason == "unknown-axis" else "duplicate"
            remedy = correction.remedy or None
            yield Finding(kind, Offence(_name(rules, place), correction.detail, remedy=remedy))


def _check_fits(
    arrays: Sequence[_Array],
    found: Sequence[Sequence[int]],
    rules: Rules,
    specs: Sequence[PartitionSpec | None],
    mesh: MeshShape,
) -> Iterator[Finding]:
    for array, places in zip(arrays, found, strict=True):
        spec = specs[places[0]] if places else None
        if spec is None or not array.shape:
            continue
        for correction in fit_cached(spec, array.shape, mesh, array.itemsize, True).corrections:
            kind = _OF_A_LEAF.get(correction.reason)
            if kind is not None:
                rule = _name(rules, places[0]).removeprefix("rule ")
                problem, remedy = f"dim {correction.dim}: {correction.detail}", correction.remedy or None
                yield Finding(kind, Offence(array.path, problem, array.shape, spec, rule, remedy))


def _name(rules: Rules, place: int) -> str:
    return f"rule {place} {rules.patterns[place]!r}"


def _titled(finding: Finding) -> Offence:
    o = finding.offence
    return Offence(o.where, f"{finding.kind}: {o.problem}", o.shape, o.spec, o.rule, o.remedy)
