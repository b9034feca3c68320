"""From axes as they are written to mesh axes: one reader, whatever the names come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardax.errors import AxisTypeError, Offence, SpecError, UnknownAxisError, did_you_mean
from shardax.names.registry import AxisRule, cycle_error
from shardax.names.spec import FREE, axes_of
from shardax.names.tokens import EMPTY, NOT_GIVEN, MeshAxes


def frozen_axes(axes: Any) -> tuple[Any, ...]:
    """One axis per dimension, as a hashable value. (Hashable entries are checked when first read.)

    >>> frozen_axes(["batch", ["dp", None]])
    ('batch', ('dp', None))
    """
    if isinstance(axes, str) or not isinstance(axes, (list, tuple, Sequence)):
        hint = f"[{axes!r}]" if isinstance(axes, str) else "[BATCH, None, HEAD]"
        raise AxisTypeError(f"Axes are a sequence with one axis per dimension, not {axes!r}; write {hint}")
    flat = tuple(axes)
    try:
        hash(flat)
    except TypeError:
        for dim, axis in enumerate(flat):
            _check(axis, dim)
        return tuple(map(_frozen, flat))
    return flat


def _frozen(axis: Any) -> Any:
    return tuple(map(_frozen, axis)) if isinstance(axis, (list, tuple)) else axis


def _check(axis: Any, dim: int, composite: bool = False) -> None:
    if isinstance(axis, (list, tuple)):
        for part in axis:
            _check(part, dim, composite=True)
    elif not (axis is None or isinstance(axis, str) or (axis is FREE and not composite)):
        raise AxisTypeError(f"The axis of dim {dim} is a name, None, or a list of those, not {axis!r}")


class Composite(tuple[str, ...]):
    """Mesh axes side by side over one dimension: a tuple that also equals a list of the same names.

    eformer answers with lists where lists were registered; code that compares with them keeps working.

    >>> Composite(("dp", "tp")) == ["dp", "tp"], Composite(("dp", "tp")) == ("dp", "tp")
    (True, True)
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, list) else other)

    __hash__ = tuple.__hash__


def side_by_side(parts: Sequence[MeshAxes]) -> tuple[str, ...] | None:
    """Several answers over one dimension, flat; None when nothing is left of them.

    >>> side_by_side(["tp", None, ("fsdp", "dp")])
    ('tp', 'fsdp', 'dp')
    """
    return Composite(name for part in parts for name in axes_of(part) if name != EMPTY) or None


@dataclass(frozen=True)
class Reader:
    """What every name means, in one mode and under one set of rules.

    >>> reader = Reader({"HEAD": "tp", "head_axis": "tp"}, {"head_axis": "tp"}, {"rows": AxisRule(("dp", "HEAD"))})
    >>> reader.read_all(("HEAD", "rows", None))
    ('tp', ('dp', 'tp'), None)
    """

    words: Mapping[str, MeshAxes]
    """Built-in tokens and fields, in this mode."""
    written: Mapping[str, MeshAxes]
    """Fields as they are written, whatever the mode: what an explicit generation rule names."""
    rules: Mapping[str, AxisRule]
    """Semantic axes that users added."""
    generation: bool = False
    fields: Mapping[str, str] | None = None
    """The field behind each token, for messages."""

    @cached_property
    def mesh_axes(self) -> frozenset[str]:
        """The mesh axes that some field lays something over."""
        return frozenset(name for value in self.words.values() for name in axes_of(value))

    def read_all(self, axes: tuple[Any, ...]) -> tuple[MeshAxes, ...]:
        """The mesh axes of every entry, or one error that lists every unknown name."""
        for dim, axis in enumerate(axes):
            _check(axis, dim)
        unknown = [(f"dim {dim}", name) for dim, axis in enumerate(axes) for name in self._unknown(axis)]
        if unknown:
            raise self._unknown_error(unknown)
        return tuple(axis if axis is FREE else self.read(axis) for axis in axes)

    def read(self, rule: Any, trail: tuple[str, ...] = (), exact: bool = False) -> MeshAxes:
        """The mesh axes of one axis or rule; with `exact`, fields are read as they are written."""
        if rule is None or rule == EMPTY:
            return None
        if isinstance(rule, tuple):
            return side_by_side([self.read(part, trail, exact) for part in rule])
        if rule in trail:
            raise cycle_error((*trail, rule), self.fields or {})
        if rule in self.rules:
            entry, trail = self.rules[rule], (*trail, rule)
            if self.generation and entry.generation is not NOT_GIVEN:
                return self.read(entry.generation, trail, exact=True)
            return self.read(entry.rule, trail)
        if exact and rule in self.written:
            return self.written[rule]
        if rule not in self.words and _looks_like_a_token(rule):
            raise self._unknown_error([(f"the rule of {trail[-1]!r}" if trail else "", rule)])
        return self.words.get(rule, rule)

    def _unknown(self, axis: Any, composite: bool = False) -> Iterator[str]:
        """Names that mean nothing. In a composite any word may be a mesh axis, but not one that looks like a token."""
        if isinstance(axis, tuple):
            for part in axis:
                yield from self._unknown(part, composite=True)
        elif isinstance(axis, str) and not (
            axis == EMPTY
            or axis in self.words
            or axis in self.rules
            or axis in self.mesh_axes
            or (composite and not _looks_like_a_token(axis))
        ):
            yield axis

    def _unknown_error(self, unknown: list[tuple[str, str]]) -> UnknownAxisError:
        fields = self.fields or {}
        known = sorted({*fields, *fields.values(), *self.rules, *self.mesh_axes})
        offences = [Offence(where, f"{name!r}{did_you_mean(name, known)}") for where, name in unknown]
        names = ", ".join(repr(name) for _, name in unknown)
        return UnknownAxisError(
            f"Unknown semantic axis name{'s' if len(unknown) > 1 else ''}: {names}",
            offences,
            "PartitionAxis.register(name, rule) or paxis.extend({name: rule}) adds a semantic axis",
        )

    def used_twice(self, axes: tuple[Any, ...], whole: frozenset[int]) -> SpecError:
        """The error for mesh axes that are used twice: which axes use them, and what to change."""
        users: dict[str, list[tuple[str, int]]] = {}
        for dim, axis in enumerate(axes):
            for name in () if dim in whole else _leaves(axis):
                for mesh_axis in axes_of(self.read(name)):
                    users.setdefault(mesh_axis, []).append((name, dim))
        offences = [
            Offence(
                "",
                f"{' and '.join(f'{name!r} (dim {dim})' for name, dim in names)} are both laid over {mesh_axis!r}",
                remedy=self._elsewhere(names[-1][0]),
            )
            for mesh_axis, names in users.items()
            if len(names) > 1
        ]
        return SpecError("An array uses each mesh axis once", offences)

    def _elsewhere(self, name: str) -> str:
        fields = self.fields or {}
        another = f", or PartitionAxis({fields[name]}=...) over another mesh axis" if name in fields else ""
        return f"None in place of {name!r}{another}"


def _leaves(axis: Any) -> Iterator[str]:
    """The names that an axis is written with."""
    if isinstance(axis, tuple):
        for part in axis:
            yield from _leaves(part)
    elif isinstance(axis, str) and axis != EMPTY:
        yield axis


def _looks_like_a_token(name: str) -> bool:
    """No mesh axis is called `__HAED__`."""
    return name.startswith("__") and name.endswith("__") and name.isupper()
