"""Semantic axes that users add: rules as values, tables of them, and the process-wide table.

A table is never changed: registering makes a new one and puts it in place of the old. A reader that holds a table
therefore sees one consistent state, without a lock, and what was resolved under a table can be cached by it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from shardax.errors import AxisRuleError, AxisTypeError, UnknownAxisError, did_you_mean
from shardax.names.hashing import hash_fn
from shardax.names.tokens import EMPTY, NOT_GIVEN, Axis, NotGiven
from shardax.names.trace_key import TraceKey


@dataclass(frozen=True)
class AxisRule:
    """What a semantic axis is laid over: while training, and (unless it follows from that) while generating.

    >>> AxisRule.of("pages", ["fsdp", "dp"], None)
    AxisRule(rule=('fsdp', 'dp'), generation=None)
    """

    rule: Axis
    generation: Axis | NotGiven = NOT_GIVEN

    @classmethod
    def of(cls, name: str, rule: Any, generation: Any = NOT_GIVEN) -> AxisRule:
        """A checked rule, with lists as tuples."""
        return cls(_checked(name, rule), generation if generation is NOT_GIVEN else _checked(name, generation))


def _checked(name: str, rule: Any) -> Axis:
    if rule is None:
        return None
    if isinstance(rule, str):
        if rule.strip():
            return rule.strip()
        raise AxisRuleError(f"The rule of {name!r} must be a non-empty string (or None for replicated), not {rule!r}")
    if isinstance(rule, (list, tuple)):
        return tuple(_checked(name, part) for part in rule)
    raise AxisTypeError(
        f"The rule of {name!r} cannot be {rule!r}",
        remedy="a rule is a field of PartitionAxis, a mesh axis, another semantic axis, a tuple of those, or None",
    )


def checked_name(name: Any) -> str:
    """A name that a semantic axis can have.

    >>> checked_name(" layers ")
    'layers'
    """
    if not isinstance(name, str) or not name.strip():
        raise AxisRuleError(f"A semantic axis is named by a non-empty string, not {name!r}")
    if name.strip() == EMPTY:
        raise AxisRuleError(f"{EMPTY!r} means replicated and cannot be registered")
    return name.strip()


class RuleTable:
    """Rules by name; never changed, and equal to itself alone, which makes it a cheap cache key."""

    def __init__(self, rules: Mapping[str, AxisRule] | None = None) -> None:
        self.rules: Mapping[str, AxisRule] = dict(rules or {})

    @cached_property
    def fingerprint(self) -> int:
        """The same for the same rules, in whatever order and process they were registered; 0 for none."""
        return hash_fn(self.rules) if self.rules else 0

    def with_rules(self, added: Mapping[str, AxisRule], known: Mapping[str, str], override: bool) -> RuleTable:
        """This table and more rules; an error when a name exists already.

        `known` says which field each built-in name stands for. A circle of names is found by whoever follows it:
        until both ends are registered, a name may as well be a mesh axis.
        """
        existing = [name for name in added if name in self.rules or name in known]
        if existing and not override:
            names = ", ".join(map(repr, existing))
            raise AxisRuleError(f"Semantic axis {names} already exists; use override=True to replace it")
        return RuleTable({**self.rules, **added})

    def without(self, name: str) -> RuleTable:
        """This table less one name."""
        return RuleTable({other: rule for other, rule in self.rules.items() if other != name})


def cycle_error(trail: Sequence[str], known: Mapping[str, str]) -> AxisRuleError:
    """The error for a rule that leads back to itself, and the way out of it."""
    last = trail[-1]
    circle = [*trail[trail.index(last) :]]
    if last in known:
        remedy = f"name the field instead: {known[last]!r}"
    else:
        remedy = f"if {last!r} is a mesh axis, give the semantic axis another name"
    return AxisRuleError(f"Cyclic semantic axis registration: {' -> '.join(map(repr, circle))}", remedy=remedy)


class Registry:
    """The process-wide table. What jit traced under another table is traced again: the table is part of its key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = RuleTable()
        self._traced_under = TraceKey()

    @property
    def table(self) -> RuleTable:
        """The table in force."""
        return self._table

    def add(self, name: str, rule: AxisRule, known: Mapping[str, str], override: bool) -> None:
        """Put one more rule in force, or nothing if it is refused."""
        with self._lock:
            self._put(self._table.with_rules({name: rule}, known, override))

    def remove(self, name: str, missing_ok: bool) -> None:
        """Take one rule out of force."""
        with self._lock:
            if name in self._table.rules:
                self._put(self._table.without(name))
            elif not missing_ok:
                raise UnknownAxisError(
                    f"Semantic axis {name!r} is not registered{did_you_mean(name, self._table.rules)}"
                )

    def clear(self) -> None:
        """Take every rule out of force."""
        with self._lock:
            self._put(RuleTable())

    def _put(self, table: RuleTable) -> None:
        before, self._table = self._table, table
        if table.fingerprint != before.fingerprint:
            self._traced_under.set_everywhere(table.fingerprint)


REGISTRY: Final = Registry()
