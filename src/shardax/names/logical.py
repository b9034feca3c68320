"""`LogicalRules`: names of dimensions → mesh axes, with fallbacks, as Flax linen and MaxText mean them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from jax.sharding import PartitionSpec

from shardax.errors import Offence, RuleError, SpecError, UnknownAxisError, did_you_mean, plural
from shardax.names.ruletext import read_document, read_pairs
from shardax.names.spec import FREE, entry_of
from shardax.tables import Table

Semantics = Literal["first", "last"]

Axes = tuple[str, ...]


@dataclass(frozen=True, repr=False)
class LogicalRules:
    """Ordered (logical axis, mesh axes) pairs; a repeated name is a fallback.

    `semantics="first"` is linen's: rules speak in their order, and a dimension takes the first of its rules whose mesh
    axes no other dimension of the array has taken. `"last"` is NNX's: the last rule of a name counts, and names of mesh
    axes stand for themselves. A name without any rule is an error; declare it with None to replicate it.

    >>> batch, mlp = ("batch", ("data", "fsdp")), ("mlp", "tensor")
    >>> rules = LogicalRules.of([batch, mlp, ("embed", "tensor"), ("embed", "fsdp")])
    >>> rules.spec(("embed", "mlp")), rules.spec(("batch", None, "embed")), rules.spec(("batch", "mlp", "embed"))
    (P('fsdp', 'tensor'), P(('data', 'fsdp'), None, 'tensor'), P(('data', 'fsdp'), 'tensor', None))
    >>> print(rules.explain(("batch", "mlp", "embed")))
    (batch, mlp, embed) → P(('data', 'fsdp'), 'tensor', None)
      dim 0 'batch' → data+fsdp, by rule 0
      dim 1 'mlp' → tensor, by rule 1
      dim 2 'embed' → replicated: no rule of it is free
        lost: rule 2 'embed' → tensor ('tensor' already shards dim 1)
        lost: rule 3 'embed' → fsdp ('fsdp' already shards dim 0)
    """

    entries: tuple[tuple[str, Any], ...]
    semantics: Semantics = "first"
    mesh_axes: tuple[str, ...] = ()
    """The mesh axes that the rules were written for, where their document says so."""

    def __post_init__(self) -> None:
        if self.semantics not in ("first", "last"):
            close = did_you_mean(self.semantics, ("first", "last"))
            raise RuleError(f"semantics={self.semantics!r} is unknown{close}", remedy="'first' (linen) or 'last' (nnx)")
        offences: list[Offence] = []
        entries = tuple(
            (name, _read_target(place, name, target, offences))
            for place, (name, target) in enumerate(read_pairs(self.entries, "rules"))
        )
        if offences:
            remedy = "a rule is (logical axis, mesh axis | tuple of mesh axes | None)"
            raise RuleError(f"{plural(len(offences), 'logical rule')} cannot be read", offences, remedy)
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "mesh_axes", tuple(self.mesh_axes))

    @classmethod
    def of(cls, source: Any, *, semantics: Semantics | None = None) -> LogicalRules:
        """Rules from themselves, a list of pairs, a mapping, YAML text, or a YAML file such as MaxText's.

        >>> LogicalRules.of("mesh_axes: [data]\\nlogical_axis_rules: [[batch, [data]], [norm, []]]")
        LogicalRules([('batch', 'data'), ('norm', None)], mesh_axes=('data',))
        """
        if isinstance(source, cls):
            return source if semantics in (None, source.semantics) else cls(source.entries, semantics, source.mesh_axes)
        rules, document = read_document(source, "logical_axis_rules")
        return cls(rules, semantics or "first", tuple(document.get("mesh_axes", ())))

    def spec(self, logical_axes: Any) -> PartitionSpec:
        """The spec of an array whose dimensions have these names; None and FREE stand for themselves.

        A tuple of names is one dimension over the axes of all of them. Unknown names are listed, all at once.

        >>> LogicalRules.of({"embed": "fsdp", "norm": None}).spec(("embd", "nrm"))
        Traceback (most recent call last):
        shardax.errors.UnknownAxisError: 2 logical axes of ('embd', 'nrm') are in none of 2 rules
          dim 0: 'embd' has no rule; did you mean 'embed'?
          dim 1: 'nrm' has no rule; did you mean 'norm'?
        declare an axis that is never sharded with None: ('embd', None)
        """
        key = _frozen(logical_axes)
        found = self._specs.get(key)
        if found is None:
            found = self._specs[key] = PartitionSpec(*map(_entry, key, self._assign(key)))
        return found

    def resolve_spec(self, axes: Any, mode: str | None = None) -> PartitionSpec:
        """`spec`, as a `PartitionAxis` spells it: these rules stand wherever one does; modes make no difference."""
        return self.spec(axes)

    def explain(self, logical_axes: Any) -> str:
        """Dimension by dimension: the rule that won, and the rules of the same name that lost, with the reason."""
        key = _frozen(logical_axes)
        shown = ", ".join("_" if name is None else str(name) for name in key)
        lines = [f"({shown}) → {self.spec(key)}"]
        for dim, slots in enumerate(self._assign(key)):
            for slot in slots:
                lines.extend(_explain(dim, slot))
        return "\n".join(lines)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The logical axes that have a rule, in order."""
        return tuple(dict.fromkeys(name for name, _ in self.entries))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that some rule leads to, in order."""
        return tuple(dict.fromkeys(axis for _, target in self.entries for axis in _axes(target)))

    def table(self) -> Table:
        """One row per rule."""
        rows = tuple((str(place), name, _show(target)) for place, (name, target) in enumerate(self.entries))
        return Table("", ("rule", "logical axis", "mesh axes"), rows, right=("rule",))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.entries)

    def __repr__(self) -> str:
        text = repr(list(self.entries))
        text += f", semantics={self.semantics!r}" if self.semantics != "first" else ""
        return f"LogicalRules({text}{f', mesh_axes={self.mesh_axes!r}' if self.mesh_axes else ''})"

    def __str__(self) -> str:
        return str(self.table())

    # ---- who gets which axes ----------------------------------------------------------------------------------------

    @cached_property
    def _specs(self) -> dict[tuple[Any, ...], PartitionSpec]:
        return {}

    def _assign(self, key: tuple[Any, ...]) -> list[list[_Slot]]:
        """For each dimension the slots of its names; none for None and FREE."""
        self._check_names(key)
        dims = [[_Slot(name) for name in _names(entry)] for entry in key]
        slots = {slot.name: (dim, slot) for dim, found in enumerate(dims) for slot in found}
        if self.semantics == "last":
            self._assign_last(slots)
        else:
            self._assign_first(slots)
        return dims

    def _assign_first(self, slots: dict[str, tuple[int, _Slot]]) -> None:
        """Linen: the order of the rules decides, not the order of the dimensions."""
        taken: dict[str, int] = {}
        for place, (name, target) in enumerate(self.entries):
            if name not in slots:
                continue
            dim, slot = slots[name]
            clash = [axis for axis in _axes(target) if axis in taken]
            if slot.rule is not None:
                slot.lost.append((place, target, f"rule {slot.rule} came first"))
            elif clash:
                others = ", ".join(f"{axis!r} already shards dim {taken[axis]}" for axis in clash)
                slot.lost.append((place, target, others))
            else:
                slot.rule, slot.target = place, target
                taken.update(dict.fromkeys(_axes(target), dim))

    def _assign_last(self, slots: dict[str, tuple[int, _Slot]]) -> None:
        """NNX: the last rule of a name, come what may; two dimensions on one mesh axis are an error."""
        for name, (_, slot) in slots.items():
            slot.target = name  # a mesh axis that stands for itself, unless a rule speaks for it
        for place, (name, target) in enumerate(self.entries):
            if name in slots:
                slot = slots[name][1]
                if slot.rule is not None:
                    slot.lost.append((slot.rule, slot.target, f"rule {place} came later"))
                slot.rule, slot.target = place, target
        users: dict[str, list[str]] = {}
        for name, (dim, slot) in slots.items():
            for axis in _axes(slot.target):
                users.setdefault(axis, []).append(f"dim {dim} ({name!r})")
        offences = [
            Offence("", f"{axis!r} would shard {' and '.join(dims)}") for axis, dims in users.items() if len(dims) > 1
        ]
        if offences:
            raise SpecError("one mesh axis for two dimensions", offences, 'semantics="first" takes fallbacks')

    def _check_names(self, key: tuple[Any, ...]) -> None:
        shown = tuple(key)
        counts = Counter(name for entry in key for name in _names(entry))
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            offences = [Offence("", f"{name!r} names {counts[name]} dimensions") for name in repeated]
            raise SpecError(f"a logical axis occurs twice in {shown}", offences, "give each dimension its own name")
        known = {*self.names, *(self.axes + self.mesh_axes if self.semantics == "last" else ())}
        offences: list[Offence] = []
        for dim, entry in enumerate(key):
            for name in _names(entry):
                if name in known:
                    continue
                mesh_axis = "is a mesh axis, not a logical one" if name in self.axes else "has no rule"
                offences.append(Offence(f"dim {dim}", f"{name!r} {mesh_axis}{did_you_mean(name, self.names)}"))
        if offences:
            count = f"{plural(len(offences), 'logical axis', 'logical axes')} of {shown}"
            headline = f"{count} {'is' if len(offences) == 1 else 'are'} in none of {plural(len(self), 'rule')}"
            first = offences[0].problem.split(" ")[0]
            raise UnknownAxisError(
                headline, offences, f"declare an axis that is never sharded with None: ({first}, None)"
            )


@dataclass
class _Slot:
    """One name of one dimension while the rules speak."""

    name: str
    rule: int | None = None
    target: Any = None
    lost: list[tuple[int, Any, str]] = field(default_factory=list[tuple[int, Any, str]])


def _frozen(logical_axes: Any) -> tuple[Any, ...]:
    """The names of an array's dimensions, from a tuple, a list or a PartitionSpec of them."""
    if isinstance(logical_axes, str) or not isinstance(logical_axes, Sequence | PartitionSpec):
        raise SpecError(f"logical axes are a tuple of names, not {logical_axes!r}")
    entries = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in logical_axes)
    bad = [
        Offence(f"dim {dim}", f"{entry!r} is not the name of an axis")
        for dim, entry in enumerate(entries)
        if not (entry is None or entry is FREE or isinstance(entry, str))
        and not (isinstance(entry, tuple) and all(isinstance(name, str) for name in entry))
    ]
    if bad:
        raise SpecError(f"{plural(len(bad), 'logical axis', 'logical axes')} cannot be read", bad)
    return entries


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def _entry(asked: Any, slots: list[_Slot]) -> Any:
    if asked is FREE or any(slot.target is FREE for slot in slots):
        return FREE
    return entry_of([axis for slot in slots for axis in _axes(slot.target)])


def _axes(target: Any) -> Axes:
    return (target,) if isinstance(target, str) else target if isinstance(target, tuple) else ()


def _show(target: Any) -> str:
    return "free" if target is FREE else "+".join(_axes(target)) or "replicated"


def _explain(dim: int, slot: _Slot) -> Iterator[str]:
    if slot.rule is not None:
        yield f"  dim {dim} {slot.name!r} → {_show(slot.target)}, by rule {slot.rule}"
    elif slot.target is not None:
        yield f"  dim {dim} {slot.name!r} → itself, a mesh axis"
    else:
        yield f"  dim {dim} {slot.name!r} → replicated: no rule of it is free"
    for place, target, reason in slot.lost:
        yield f"    lost: rule {place} {slot.name!r} → {_show(target)} ({reason})"


def _read_target(place: int, name: Any, target: Any, offences: list[Offence]) -> Any:
    """A mesh axis, a tuple of them, None or FREE; anything else is listed."""
    where = f"rule {place}"
    if not isinstance(name, str) or not name:
        offences.append(Offence(where, f"{name!r} is not the name of a logical axis"))
    if target is None or target is FREE or (isinstance(target, str) and target):
        return target
    if isinstance(target, list | tuple) and all(isinstance(axis, str) and axis for axis in target):
        axes = tuple(target)
        repeated = [axis for axis, count in Counter(axes).items() if count > 1]
        if repeated:
            offences.append(Offence(where, f"{', '.join(map(repr, repeated))} occurs twice in {axes}", rule=repr(name)))
        return entry_of(axes)
    offences.append(Offence(where, f"{target!r} is not a mesh axis, a tuple of them or None", rule=repr(name)))
    return None
