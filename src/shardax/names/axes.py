"""PartitionAxis: from what a dimension means to the mesh axes it is laid over, per mode.

The body of the class is the one table: field → value when not given, token that reads it. Everything else (tokens,
decode partners, derived values, resolving) follows from that table.
"""

# ruff: noqa: RUF009  (the fields are made by `_axis`, which is dataclasses.field with the columns of the table)
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, Final, final

import jax
from jax.sharding import PartitionSpec

from shardax.errors import AxisRuleError, AxisTypeError, Offence, did_you_mean
from shardax.names.hashing import hash_fn
from shardax.names.registry import REGISTRY, AxisRule, RuleTable, checked_name
from shardax.names.resolving import Reader, frozen_axes, side_by_side
from shardax.names.spec import axes_in
from shardax.names.tokens import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    DATA_PARALLEL,
    EMBED,
    EMPTY,
    EXPERT,
    EXPERT_GATE,
    EXPERT_PARALLEL,
    FULLY_SHARDED_DATA_PARALLEL,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    LENGTH,
    MLP_INTERMEDIATE,
    NOT_GIVEN,
    QUERY_LENGTH,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    VOCAB,
    Axis,
    MeshAxes,
    is_generation,
)


def _axis(token: str | None = None, value: MeshAxes = None, follows: str | tuple[str, ...] | None = None) -> Any:
    """A field: the token that reads it, and either its value or the fields it follows unless it is given."""
    metadata = {"token": token, "value": value, "follows": follows}
    return field(default=NOT_GIVEN if follows else value, metadata=metadata)


@final
@dataclass(frozen=True, repr=False)
class PartitionAxis:
    """Which mesh axes each semantic axis is laid over, while training and while generating.

    A value is a mesh axis, a tuple of them (major to minor), None or `EMPTY` for replicated. `NOT_GIVEN` derives it:
    batches over fsdp and dp, sequences over sp, heads and widths over tp, experts over ep, decode fields from their
    training value. A decode field that is None means "as in training"; `EMPTY` there means replicated.

    >>> import shardax as sx
    >>> paxis = sx.PartitionAxis(tensor_parallel_axis="model", decode_batch_axis="dp")
    >>> paxis.head_axis, paxis.batch_axis
    ('model', ('fsdp', 'dp'))
    >>> paxis.resolve_spec([sx.BATCH, sx.LENGTH, sx.HEAD, None], sx.MODE_TRAIN)
    P(('fsdp', 'dp'), 'sp', 'model', None)
    >>> paxis.resolve_axis([sx.BATCH], sx.MODE_DECODE)
    ['dp']
    """

    data_parallel_axis: MeshAxes = _axis(DATA_PARALLEL, "dp")
    fully_sharded_data_parallel_axis: MeshAxes = _axis(FULLY_SHARDED_DATA_PARALLEL, "fsdp")
    tensor_parallel_axis: MeshAxes = _axis(TENSOR_PARALLEL, "tp")
    sequence_parallel_axis: MeshAxes = _axis(SEQUENCE_PARALLEL, "sp")
    expert_parallel_axis: MeshAxes = _axis(EXPERT_PARALLEL, "ep")

    batch_axis: MeshAxes = _axis(BATCH, follows=("fully_sharded_data_parallel_axis", "data_parallel_axis"))
    sequence_axis: MeshAxes = _axis(LENGTH, follows="sequence_parallel_axis")
    query_sequence_axis: MeshAxes = _axis(QUERY_LENGTH, follows="sequence_parallel_axis")
    head_axis: MeshAxes = _axis(HEAD, follows="tensor_parallel_axis")
    kv_head_axis: MeshAxes = _axis(KV_HEAD, follows="tensor_parallel_axis")
    key_sequence_axis: MeshAxes = _axis(KV_LENGTH, follows="sequence_parallel_axis")
    hidden_state_axis: MeshAxes = _axis(EMBED, follows="tensor_parallel_axis")
    mlp_intermediate_axis: MeshAxes = _axis(MLP_INTERMEDIATE, follows="tensor_parallel_axis")
    vocab_axis: MeshAxes = _axis(VOCAB, follows="tensor_parallel_axis")
    expert_axis: MeshAxes = _axis(EXPERT, follows="expert_parallel_axis")
    expert_gate_axis: MeshAxes = _axis(EXPERT_GATE)
    attention_dim_axis: MeshAxes = _axis(HEAD_DIM)
    attention_kv_dim_axis: MeshAxes = _axis(KV_HEAD_DIM)
    bias_head_sequence_axis: MeshAxes = _axis(BIAS_HEAD_SEQ)
    bias_key_sequence_axis: MeshAxes = _axis(BIAS_KV_SEQ)

    decode_batch_axis: MeshAxes = _axis(follows="batch_axis")
    decode_query_sequence_axis: MeshAxes = _axis()
    decode_head_axis: MeshAxes = _axis(follows="head_axis")
    decode_kv_head_axis: MeshAxes = _axis(follows="kv_head_axis")
    decode_key_sequence_axis: MeshAxes = _axis(follows="key_sequence_axis")
    decode_attention_dim_axis: MeshAxes = _axis()
    decode_attention_kv_dim_axis: MeshAxes = _axis()

    extensions: tuple[tuple[str, AxisRule], ...] = ()
    """Semantic axes of this instance alone; made by `extend`."""

    def __post_init__(self) -> None:
        offences: list[Offence] = []
        for name in FIELDS:
            given = getattr(self, name)
            try:
                value = self._derived(name) if given is NOT_GIVEN else self._as_mesh_axes(given)
            except AxisRuleError as problem:
                offences.append(Offence(name, problem.headline))
                value = None
            object.__setattr__(self, name, value)
        if offences:
            raise AxisRuleError("These fields of PartitionAxis are not mesh axes", offences)
        rules = {
            checked_name(name): rule if isinstance(rule, AxisRule) else AxisRule.of(name, rule)
            for name, rule in dict(self.extensions).items()
        }
        object.__setattr__(self, "extensions", tuple(sorted(rules.items(), key=itemgetter(0))))

    def _derived(self, name: str) -> MeshAxes:
        """What a field is when it is not given. The fields it follows come before it in the table."""
        facts = FIELDS[name]
        follows = facts["follows"]
        if isinstance(follows, tuple):  # one mesh axis may be both: then it counts once
            return side_by_side([tuple(dict.fromkeys(axes_in(getattr(self, other) for other in follows)))])
        return getattr(self, follows) if follows else facts["value"]

    def _as_mesh_axes(self, given: Any) -> MeshAxes:
        """A field value in its one form: lists become flat tuples, mesh tokens become the axes they stand for."""
        if given is None or given == EMPTY:
            return given
        if isinstance(given, (list, tuple)):
            return side_by_side([self._as_mesh_axes(part) for part in given]) or EMPTY
        if not isinstance(given, str) or not given.strip():
            raise AxisTypeError(f"{given!r} is not the name of a mesh axis")
        if given in MESH_TOKENS:
            return getattr(self, SEMANTIC[given])
        if given in SEMANTIC:
            raise AxisRuleError(f"{given!r} is a semantic axis; a field holds mesh axes (or DP, FSDP, TP, EP, SP)")
        return given.strip()

    # ---- values ------------------------------------------------------------------------------------------------------

    def _given(self) -> dict[str, Any]:
        """The fields that are not what they would be if they were left out."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name) != self._derived(name)}

    def __repr__(self) -> str:
        text = f"PartitionAxis({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"
        if not self.extensions:
            return text
        rules = {name: entry.rule for name, entry in self.extensions}
        generation = {name: entry.generation for name, entry in self.extensions if entry.generation is not NOT_GIVEN}
        tail = f", generation_axis_rules={generation!r}" if generation else ""
        tail += ", override=True" if SEMANTIC.keys() & rules else ""
        return f"{text}.extend({rules!r}{tail})"

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", hash_fn(self))
        return self.__dict__["_hash"]

    @cached_property
    def _known(self) -> PartitionAxis:
        """The first value equal to this one: what is cached by it is found without comparing every field."""
        return _first_equal(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionAxis, tuple(getattr(self, name) for name in (*FIELDS, "extensions"))

    def replace(self, **changes: Any) -> PartitionAxis:
        """This value with some fields changed; fields that follow them change along.

        >>> PartitionAxis(head_axis="heads").replace(tensor_parallel_axis="model")
        PartitionAxis(tensor_parallel_axis='model', head_axis='heads')
        """
        for name in changes:
            if name not in FIELDS:
                raise AxisTypeError(f"PartitionAxis has no field {name!r}{did_you_mean(name, FIELDS)}")
        given: dict[str, Any] = {**self._given(), "extensions": self.extensions, **changes}
        return PartitionAxis(**given)

    def extend(
        self,
        rules: Mapping[str, Axis],
        *,
        generation_axis_rules: Mapping[str, Axis] | None = None,
        override: bool = False,
    ) -> PartitionAxis:
        """The same axes and some more, on this instance alone: `register` without the global.

        >>> import shardax as sx
        >>> paxis = sx.PartitionAxis().extend({"layers": "pp", "rows": ["layers", sx.BATCH]})
        >>> paxis.resolve_axis(["rows"], sx.MODE_TRAIN)
        [('pp', 'fsdp', 'dp')]
        """
        generation = generation_axis_rules or {}
        stray = [f"{name!r}{did_you_mean(name, rules)}" for name in generation if name not in rules]
        if stray:
            raise AxisRuleError(f"A generation rule without a rule: {', '.join(stray)}")
        added = {
            checked_name(name): AxisRule.of(name, rule, generation.get(name, NOT_GIVEN)) for name, rule in rules.items()
        }
        table = RuleTable(dict(self.extensions)).with_rules(added, SEMANTIC, override)
        return dataclasses.replace(self, extensions=tuple(table.rules.items()))

    # ---- resolving ---------------------------------------------------------------------------------------------------

    def resolve_axis(self, axes: Sequence[Axis], mode: str) -> list[MeshAxes]:
        """The mesh axes of each semantic axis: one answer per entry, so two entries may share a mesh axis.

        None and "_" are replicated; a list or tuple is a composite of semantic and mesh names, and comes back flat.

        >>> import shardax as sx
        >>> sx.PartitionAxis().resolve_axis([sx.BATCH, sx.EMPTY, [sx.FSDP, "slice"]], sx.MODE_TRAIN)
        [('fsdp', 'dp'), None, ('fsdp', 'slice')]
        """
        return list(_resolved(self._known, frozen_axes(axes), is_generation(mode), REGISTRY.table))

    def resolve_spec(self, axes: Sequence[Axis], mode: str, shape: Sequence[int] | None = None) -> PartitionSpec:
        """The PartitionSpec of an array with these axes. One mesh axis over two dimensions is an error here.

        Where the shape is known, a dimension of size 1 (the query of a decoding step) may name an axis that another
        one uses: nothing of it can be sharded.

        >>> import shardax as sx
        >>> sx.PartitionAxis().resolve_spec([sx.BATCH, sx.QUERY_LENGTH, sx.HEAD, sx.HEAD_DIM], sx.MODE_PREFILL)
        P(('fsdp', 'dp'), 'sp', 'tp', None)
        """
        whole = frozenset(dim for dim, size in enumerate(shape) if size == 1) if shape and 1 in shape else _NO_DIMS
        return _spec(self._known, frozen_axes(axes), is_generation(mode), REGISTRY.table, whole)

    # ---- the process-wide registry -----------------------------------------------------------------------------------

    @classmethod
    def register(
        cls, semantic_axis: str, axis_rule: Axis, *, generation_axis_rule: Any = NOT_GIVEN, override: bool = False
    ) -> None:
        """Add a semantic axis to every PartitionAxis of this process, present and future.

        The rule is a field (`"head_axis"`), a mesh axis, another semantic axis, a tuple of those, or None for
        replicated. While generating, a field or an alias of one gives way to its decode partner, unless
        `generation_axis_rule` says otherwise. What `jax.jit` traced under other rules is traced again.

        >>> import shardax as sx
        >>> sx.PartitionAxis.register("pages", "key_sequence_axis")
        >>> sx.PartitionAxis().resolve_axis(["pages"], sx.MODE_TRAIN)
        ['sp']
        >>> PartitionAxis.unregister("pages")
        """
        name = checked_name(semantic_axis)
        REGISTRY.add(name, AxisRule.of(name, axis_rule, generation_axis_rule), SEMANTIC, override)

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Take a registered semantic axis back; a built-in one that was overridden means again what it meant.

        >>> PartitionAxis.unregister("pages", missing_ok=False)
        Traceback (most recent call last):
        shardax.errors.UnknownAxisError: Semantic axis 'pages' is not registered
        """
        REGISTRY.remove(checked_name(semantic_axis), missing_ok)

    @classmethod
    def clear_registered_axes(cls) -> None:
        """Take all registered semantic axes back.

        >>> PartitionAxis.clear_registered_axes()
        """
        REGISTRY.clear()

    @classmethod
    def get_registered_axes(cls) -> dict[str, dict[str, Any]]:
        """The registered axes with their rules, generation rules included where they are given or follow.

        >>> PartitionAxis.register("pages", "head_axis")
        >>> PartitionAxis.get_registered_axes()
        {'pages': {'axis_rule': 'head_axis', 'generation_axis_rule': 'decode_head_axis'}}
        >>> PartitionAxis.unregister("pages")
        """
        rules = REGISTRY.table.rules
        return {
            name: {"axis_rule": entry.rule, "generation_axis_rule": _generation_rule(entry, rules)}
            for name, entry in rules.items()
        }


FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    entry.name: entry.metadata for entry in dataclasses.fields(PartitionAxis) if entry.metadata
}
"""The table: field → token, value, follows."""

SEMANTIC: Final[Mapping[str, str]] = {facts["token"]: name for name, facts in FIELDS.items() if facts["token"]}
"""Built-in token → the field it reads."""

DECODE: Final[Mapping[str, str]] = {name: f"decode_{name}" for name in FIELDS if f"decode_{name}" in FIELDS}
"""Training field → its decode partner."""

MESH_TOKENS: Final = tuple(SEMANTIC)[:5]
"""The tokens of the mesh axes themselves, which a field value may use."""

_NO_DIMS: Final[frozenset[int]] = frozenset()

jax.tree_util.register_static(PartitionAxis)


@lru_cache(maxsize=1024)
def _first_equal(paxis: PartitionAxis) -> PartitionAxis:
    return paxis


@lru_cache(maxsize=4096)
def _resolved(paxis: PartitionAxis, axes: tuple[Any, ...], generation: bool, table: RuleTable) -> tuple[MeshAxes, ...]:
    """What `resolve_axis` answers; cached, because it is asked at every constraint of a program."""
    return _reader(paxis, generation, table).read_all(axes)


@lru_cache(maxsize=4096)
def _spec(
    paxis: PartitionAxis, axes: tuple[Any, ...], generation: bool, table: RuleTable, whole: frozenset[int]
) -> PartitionSpec:
    """What `resolve_spec` answers; `whole` are the dimensions of size 1."""
    resolved = _resolved(paxis, axes, generation, table)
    flat = axes_in(entry for dim, entry in enumerate(resolved) if dim not in whole)
    if len(set(flat)) != len(flat):
        raise _reader(paxis, generation, table).used_twice(axes, whole)
    return PartitionSpec(*(tuple(entry) if isinstance(entry, tuple) else entry for entry in resolved))


@lru_cache(maxsize=256)
def _reader(paxis: PartitionAxis, generation: bool, table: RuleTable) -> Reader:
    """Everything a name can mean to this PartitionAxis in this mode."""
    written = {name: _as_in_training(paxis, name) for name in FIELDS}
    in_mode = {name: written[DECODE.get(name, name) if generation else name] for name in FIELDS}
    return Reader(
        words={**in_mode, **{token: in_mode[name] for token, name in SEMANTIC.items()}},
        written=written,
        rules={**table.rules, **dict(paxis.extensions)},
        generation=generation,
        fields=SEMANTIC,
    )


def _as_in_training(paxis: PartitionAxis, name: str) -> MeshAxes:
    """A field as it is written, where None in a decode field means its training value and EMPTY means None."""
    value = getattr(paxis, name)
    if value is None and name in DECODE.values():
        value = getattr(paxis, name.removeprefix("decode_"))
    return None if value == EMPTY else value


def _generation_rule(entry: AxisRule, rules: Mapping[str, AxisRule]) -> Any:
    """The rule that applies while generating: the one given, else the decode partner of the field behind the rule."""
    for _ in rules:  # as many steps as there are rules, at most: a circle of names has no end
        if entry.generation is NOT_GIVEN and isinstance(entry.rule, str) and entry.rule in rules:
            entry = rules[entry.rule]
    if entry.generation is NOT_GIVEN and isinstance(entry.rule, str):
        return DECODE.get(SEMANTIC.get(entry.rule, entry.rule), NOT_GIVEN)
    return entry.generation
