"""What is asked for every leaf of a tree, and what the mesh gives: the steps from rules to decisions.

*read* (path, shape and dtype of each leaf) → *ask* (its rule, and what spec this means) → *decide* (fit to the mesh).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from shardax.errors import (
    AxisTypeError,
    LeafError,
    Offence,
    RuleError,
    ShardaxError,
    SpecError,
    UnknownAxisError,
    plural,
)
from shardax.names.axes import PartitionAxis
from shardax.names.decision import Decision, itemsize_of, record
from shardax.names.mesh import AnyMesh, MeshSpec
from shardax.names.paths import flatten
from shardax.names.rules import Rules
from shardax.names.spec import OnMisfit, as_spec, fit_cached, misfit_error


class ResolvesAxes(Protocol):
    """What turns semantic axes into a spec: a `PartitionAxis`, or anything with the same method."""

    def resolve_spec(self, axes: Any, mode: str) -> PartitionSpec:
        """The spec of a list of semantic axes in a mode."""
        ...


Array = tuple[str, tuple[int, ...], str]
"""Path, shape and dtype."""
Asked = tuple[str, tuple[int, ...], str, PartitionSpec, str]
"""The same, with the spec that was asked for, and the rule in words."""


def read_arrays(tree: Any) -> list[Array]:
    """Path, shape and dtype of every leaf; what has none of them is listed."""
    paths, leaves = flatten(tree)
    if not leaves:
        raise LeafError("the tree has no leaves", remedy="give a tree of arrays or jax.ShapeDtypeStruct")
    arrays: list[Array] = []
    problems: list[Offence] = []
    for path, leaf in zip(paths, leaves, strict=True):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is not None and dtype is not None:
            arrays.append((path, tuple(shape), str(dtype)))
        elif isinstance(leaf, numbers.Number):
            arrays.append((path, (), str(jax.dtypes.result_type(leaf))))
        else:
            problems.append(
                Offence(path, f"is {type(leaf).__name__} {_short(leaf)}, not an array", remedy=_as_node(leaf))
            )
    if problems:
        raise LeafError(
            f"{plural(len(problems), 'leaf is', 'leaves are')} not an array", problems, "take it out of the tree"
        )
    return arrays


def _as_node(leaf: Any) -> str | None:
    """How a dataclass becomes a node of the tree."""
    return "jax.tree_util.register_dataclass" if is_dataclass(leaf) and not isinstance(leaf, type) else None


def _short(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 40 else text[:37] + "…"


def resolver(axes: ResolvesAxes | None, mode: str) -> Callable[[Any], PartitionSpec]:
    """From the target of a rule to its spec, in one mode."""
    chosen = axes if axes is not None else PartitionAxis()
    if isinstance(chosen, type) or not hasattr(chosen, "resolve_spec"):
        raise AxisTypeError(
            f"axes= is {type(chosen).__name__} {_short(chosen)}, which resolves no axes",
            remedy="give a PartitionAxis, or LogicalRules.of([…])",
        )

    def resolve(target: Any) -> PartitionSpec:
        if target is None or isinstance(target, PartitionSpec):
            return as_spec(target)
        return chosen.resolve_spec(target, mode)

    return resolve


def ask(arrays: Sequence[Array], rules: Rules, resolve: Callable[[Any], PartitionSpec], min_size: int) -> list[Asked]:
    """What the rules ask for every leaf; a leaf that no rule matches is an error, all of them at once."""
    replicated = PartitionSpec()
    asked: list[Asked] = []
    unmatched: list[Offence] = []
    resolved: dict[int, tuple[PartitionSpec, str]] = {}
    unknown: dict[int, ShardaxError] = {}
    for (path, shape, dtype), match in zip(arrays, rules.match_all([path for path, _, _ in arrays]), strict=True):
        if shape == ():
            asked.append((path, shape, dtype, replicated, "scalar: nothing to shard"))
        elif min_size and math.prod(shape) < min_size:
            asked.append((path, shape, dtype, replicated, f"smaller than min_size={min_size}"))
        elif match is None:
            unmatched.append(Offence(path, "no rule matches", shape=shape))
        else:
            if match.index not in resolved:
                try:
                    resolved[match.index] = (resolve(match.target), str(match))
                except (SpecError, UnknownAxisError) as error:
                    resolved[match.index], unknown[match.index] = (replicated, str(match)), error
            asked.append((path, shape, dtype, *resolved[match.index]))
    if unknown:
        raise _unresolved({resolved[index][1]: error for index, error in sorted(unknown.items())})
    if unmatched:
        count = plural(len(unmatched), "leaf", "leaves")
        raise RuleError(
            f"{count} of {len(arrays)} matched by none of {plural(len(rules), 'rule')}",
            unmatched,
            "add a rule for them; ('.*', P()) last replicates what is left, and says so",
        )
    return asked


def _unresolved(errors: Mapping[str, ShardaxError]) -> ShardaxError:
    """One error for all rules whose axes mean nothing, or cannot lie on one array together."""
    offences = [
        Offence(rule, f"{problem.where}: {problem.problem}".removeprefix(": "), remedy=problem.remedy)
        for rule, error in errors.items()
        for problem in error.offences or (Offence("", error.headline),)
    ]
    kind = UnknownAxisError if all(isinstance(error, UnknownAxisError) for error in errors.values()) else SpecError
    remedies = dict.fromkeys(error.remedy for error in errors.values() if error.remedy)
    return kind(f"the axes of {plural(len(errors), 'rule')} cannot be resolved", offences, "; ".join(remedies))


def _or_adapt(corrected: Iterable[Decision]) -> str:
    """The way out for sizes that do not divide; a slip of the pen is no reason to adapt."""
    only_sizes = all(c.reason == "indivisible" for decision in corrected for c in decision.fit.corrections)
    return 'on_misfit="adapt" keeps what divides, and records what is lost' if only_sizes else ""


def decide(asked: Iterable[Asked], mesh: AnyMesh, on_misfit: OnMisfit) -> tuple[Decision, ...]:
    """The asked specs met with the mesh: recorded corrections, or one error that lists them all."""
    shape_of_mesh = mesh.shape_tuple
    sizes: dict[str, int] = {}
    decisions: list[Decision] = []
    for path, shape, dtype, spec, rule in asked:
        itemsize = sizes.get(dtype)
        if itemsize is None:
            itemsize = sizes[dtype] = itemsize_of(dtype)
        found = fit_cached(spec, shape, shape_of_mesh, itemsize, True)
        decisions.append(Decision(path, shape, dtype, found.spec, rule, found))
    corrected = [decision for decision in decisions if decision.fit.corrections]
    if corrected and on_misfit == "error":
        count = plural(len(corrected), "leaf does", "leaves do")
        raise misfit_error(
            f"{count} not fit the mesh {MeshSpec.of(mesh)}",
            ((d.fit, d.path, d.rule) for d in corrected),
            _or_adapt(corrected),
        )
    record(*corrected, warn=on_misfit == "warn")
    return tuple(decisions)
