"""`JaxProcessSharderConfig`: what a process sharder is told, as a frozen, hashable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from shardax.errors import Offence, SharderError

ShardingRules: TypeAlias = "tuple[tuple[str, str | tuple[str, ...] | None], ...]"


@dataclass(frozen=True, eq=False)
class JaxProcessSharderConfig:
    """Configuration of a `JaxProcessSharderModule`; two with the same content are equal and hash alike.

    >>> rules = [("batch", ("data", "fsdp")), ("hidden", None)]
    >>> JaxProcessSharderConfig(sharding_rules=rules) == JaxProcessSharderConfig(sharding_rules=dict(rules))
    True
    >>> JaxProcessSharderConfig(batch_stats_fn=sum, precomputed_stats={"mean": 0.0})
    Traceback (most recent call last):
        ...
    shardax.errors.SharderError: Cannot specify both batch_stats_fn and precomputed_stats
    statistics are either computed from data or given: keep one of the two
    """

    cacheable: bool = False
    batch_stats_fn: Callable[[Any], Any] | None = None
    precomputed_stats: Mapping[str, Any] | None = None
    sharding_rules: ShardingRules | Sequence[tuple[str, Any]] | Mapping[str, Any] | None = None
    drop_remainder: bool = True

    def __post_init__(self) -> None:
        if self.batch_stats_fn is not None and self.precomputed_stats is not None:
            raise SharderError(
                "Cannot specify both batch_stats_fn and precomputed_stats",
                remedy="statistics are either computed from data or given: keep one of the two",
            )
        self._check_types()
        if self.precomputed_stats is not None:
            object.__setattr__(self, "precomputed_stats", dict(self.precomputed_stats))
        object.__setattr__(self, "sharding_rules", read_rules(self.sharding_rules))

    def _check_types(self) -> None:
        rules, stats, function = self.sharding_rules, self.precomputed_stats, self.batch_stats_fn
        wanted = {
            "cacheable": (isinstance(self.cacheable, bool), "True or False"),
            "batch_stats_fn": (function is None or callable(function), "a function or None"),
            "precomputed_stats": (stats is None or isinstance(stats, Mapping), "a mapping or None"),
            "sharding_rules": (
                rules is None or (isinstance(rules, (Mapping, Sequence)) and not isinstance(rules, str)),
                "pairs, a mapping or None",
            ),
            "drop_remainder": (isinstance(self.drop_remainder, bool), "True or False"),
        }
        wrong = [
            Offence(name, f"{getattr(self, name)!r} is not {kind}")
            for name, (right, kind) in wanted.items()
            if not right
        ]
        if wrong:
            raise SharderError("this is no configuration of a sharder", wrong)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._plain() == other._plain() and same_content(self.precomputed_stats, other.precomputed_stats)

    def __hash__(self) -> int:
        names = () if self.precomputed_stats is None else tuple(sorted(self.precomputed_stats))
        return hash((*self._plain(), names))

    def unshared(self) -> JaxProcessSharderConfig:
        """An equal config whose statistics are its own; the function that computes them is the same."""
        return (
            self
            if self.precomputed_stats is None
            else replace(self, precomputed_stats=deepcopy(self.precomputed_stats))
        )

    def _plain(self) -> tuple[Any, ...]:
        return self.cacheable, self.batch_stats_fn, self.sharding_rules, self.drop_remainder


def read_rules(rules: Any) -> ShardingRules | None:
    """Pairs of (logical axis, mesh axis, several mesh axes, or None), from pairs or a mapping."""
    if rules is None:
        return None
    pairs = list(cast("Mapping[str, Any]", rules).items()) if isinstance(rules, Mapping) else list(rules)
    wrong = [Offence(f"rule {place}", f"{pair!r} is no pair") for place, pair in enumerate(pairs) if not _is_rule(pair)]
    if wrong:
        raise SharderError(
            "these are no sharding rules", wrong, "write [('batch', 'data'), ('embed', ('fsdp', 'tp')), ('seq', None)]"
        )
    return tuple((name, tuple(axes) if isinstance(axes, (list, tuple)) else axes) for name, axes in pairs)


def _is_rule(pair: Any) -> bool:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    axes = pair[1]
    several = isinstance(axes, (list, tuple)) and all(isinstance(axis, str) for axis in axes)
    return axes is None or isinstance(axes, str) or several


def same_content(one: Any, other: Any) -> bool:
    """Equality that also knows arrays and what holds them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_content(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_content(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    return bool(one == other)
