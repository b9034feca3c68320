"""What a traced call did to its objects, as the static part of its result, and how that is carried out outside.

The traced function returns `(out, Result)`: the static part of `Result` says which cells were written, what new cells
and nodes were born, and which nodes changed their children; its leaves are the arrays that go there. One unflattening
per call tells the caller what to do, and it stays right when JAX re-traces by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import jax

from shardax.state.graph import Builder, Record, Ref
from shardax.state.kinds import ARRAY, OBJECT, STATIC, Frozen, Kind, Mode, holds_cells, holds_tracers, role_in, role_of
from shardax.state.sharing import Pick, everything, picker


class Effects:
    """The static part of a result. Compared by identity: each trace makes its own."""

    __slots__ = ("recipe", "store", "written")

    def __init__(self, written: tuple[int, ...], recipe: Recipe | None) -> None:
        self.written, self.recipe = written, recipe
        self.store: Callable[[Sequence[Any], Sequence[Any]], None] = self._store_first

    def _store_first(self, cells: Sequence[Any], values: Sequence[Any]) -> None:
        """Set the written cells. A place has cells of one family in every call: how they are set is found out once."""
        families = [role_of(type(cells[place])) for place in self.written]
        runs = [list(run) for _, run in groupby(range(len(families)), lambda number: id(families[number]))]
        parts = [slice(run[0], run[-1] + 1) for run in runs]
        picks = [picker(self.written[part], len(cells)) or everything for part in parts]
        writes = [families[part.start].write_all for part in parts]
        if picks == [everything] and self.recipe is None:
            self.store = writes[0]
        else:
            self.store = partial(_store, list(zip(writes, picks, parts, strict=True)))
        self.store(cells, values)


def _store(
    runs: Sequence[tuple[Callable[..., None], Pick, slice]], cells: Sequence[Any], values: Sequence[Any]
) -> None:
    for write, pick, part in runs:
        write(pick(cells), values[part])


class Result:
    """The pytree node that carries effects out of a compiled call: values of the written cells, then the recipe's."""

    __slots__ = ("effects", "values")

    def __init__(self, effects: Effects, values: Sequence[Any]) -> None:
        self.effects = effects
        self.values = values


jax.tree_util.register_pytree_node(Result, lambda result: (result.values, result.effects), Result)


def with_moved(result: Result, moved: dict[int, Any]) -> Result:
    """The result of a call that put cells elsewhere first: they are stored like written ones."""
    effects, values = result.effects, list(result.values)
    count = len(effects.written)
    more = {place: array for place, array in moved.items() if place not in effects.written}
    if not more:
        return result
    written = (*effects.written, *more)
    return Result(Effects(written, effects.recipe), [*values[:count], *more.values(), *values[count:]])


@dataclass(eq=False)
class Recipe:
    """How to make outside what was made inside.

    References: ("c", cell), ("e", node) and ("l", leaf) of the call; ("b", born cell), ("n", record) and ("v", value)
    of this recipe; ("r", value) a new mutable array; ("s", static).
    """

    records: list[Record] = field(default_factory=list[Record])
    born: list[tuple[Any, Any, int]] = field(default_factory=list[tuple[Any, Any, int]])  # family, spec, value
    changed: list[tuple[int, Record]] = field(default_factory=list[tuple[int, Record]])
    respecs: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    out: Ref | None = None  # None: the result of the function went out as it is

    def __bool__(self) -> bool:
        return bool(self.records or self.born or self.changed or self.respecs or self.out)


def after(records: Sequence[Record], recipe: Recipe) -> list[Record]:
    """The records of the arguments as the recipe leaves them, then the recipe's own; only what is new has a slot."""
    changed, count = dict(recipe.changed), len(records)

    def moved(record: Record, own: bool) -> Record:
        copy = Record(record.kind, record.cls, record.keys, record.extra, record.mode)
        copy.refs = [_placed(ref, own, count) for ref in record.refs]
        return copy

    given = [moved(changed.get(place, record), place in changed) for place, record in enumerate(records)]
    return given + [moved(record, True) for record in recipe.records]


def _placed(ref: Ref, own: bool, count: int) -> Ref:
    tag, number = ref
    if tag == "n":
        return ("n", number + count if own else number)
    if tag == "e" and number < count:
        return ("n", number)
    return ref if own and tag in "bv" else ("s", None)


def is_ref(value: Any) -> bool:
    """Is this a mutable array (`jax.Ref`), real or traced?"""
    ref = getattr(jax, "Ref", None)
    if ref is None:
        return False
    return isinstance(value, ref)


class Emission:
    """Writes the recipe while the trace is still open."""

    def __init__(
        self,
        cells: dict[int, int],
        nodes: dict[int, int],
        leaves: dict[int, int],
        boxes: frozenset[int],
        outside: Container[Any],
    ) -> None:
        self.cells, self.nodes, self.leaves, self.boxes, self.outside = cells, nodes, leaves, boxes, outside
        self.recipe = Recipe()
        self.values: list[Any] = []
        self.born: list[Any] = []  # the cells that `recipe.born` describes
        self._seen: dict[int, Ref] = {}
        self._alive: list[Any] = []

    def ref(self, value: Any, mode: Mode, alias: bool) -> Ref:  # noqa: PLR0911  one return per sort of value
        """The reference of a value; `alias` lets an unchanged input array stand for itself."""
        identity = id(value)
        if identity in self.cells:
            return ("c", self.cells[identity])
        if identity in self.nodes:
            return ("e", self.nodes[identity])
        role = role_in(value, mode)
        if role is ARRAY:
            return self._array(value, alias)
        if role is STATIC or (role is OBJECT and self._stays(value)):
            return ("s", Frozen(value))
        if identity in self._seen:
            return self._seen[identity]
        self._alive.append(value)
        if isinstance(role, Kind):
            return self._node(value, role, mode, alias)
        self._seen[identity] = ref = ("b", len(self.recipe.born))
        self.born.append(value)
        self.recipe.born.append((role, role.spec(value), self._value(role.get(value))))
        return ref

    def _stays(self, value: Any) -> bool:
        """Does a plain object stay itself? One that was made inside is made again by every call."""
        return not (holds_cells(value) or holds_tracers(value)) and value in self.outside

    def _array(self, value: Any, alias: bool) -> Ref:
        number = self.leaves.get(id(value))
        if number is not None and (alias or number in self.boxes or is_ref(value)):
            return ("l", number)
        if is_ref(value):
            if id(value) not in self._seen:
                self._alive.append(value)
                self._seen[id(value)] = ("r", self._value(value[...]))
            return self._seen[id(value)]
        return ("v", self._value(value))

    def _value(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _node(self, value: Any, kind: Kind, mode: Any, alias: bool) -> Ref:
        opened = kind.open(value, mode)
        record = Record(kind, type(value), opened.keys, opened.extra, mode)
        number = len(self.recipe.records)
        self.recipe.records.append(record)
        ref: Ref = ("n", number)
        if kind.mutable:
            self._seen[id(value)] = ref
        record.refs = [self.ref(child, m, alias) for child, m in zip(opened.values, opened.modes, strict=True)]
        return ref

    def changes(self, nodes: dict[int, Any], contents: dict[int, list[Any]], records: Sequence[Record]) -> None:
        """Record every node whose children are not the ones it was built with."""
        for number, before in contents.items():
            node, record = nodes[number], records[number]
            opened = record.kind.open(node, record.mode)
            if opened.keys != record.keys and _is_sorted_only(record, opened.keys):
                opened = opened.in_order(record.keys)
            alike = opened.keys == record.keys and opened.extra == record.extra
            if alike and all(a is b for a, b in zip(opened.values, before, strict=True)):
                continue
            changed = Record(record.kind, record.cls, opened.keys, opened.extra, record.mode)
            changed.refs = [self.ref(child, m, True) for child, m in zip(opened.values, opened.modes, strict=True)]
            self.recipe.changed.append((number, changed))


def _is_sorted_only(record: Record, keys: tuple[Any, ...]) -> bool:
    """Did a framework only sort the children? A gradient taken inside does; every call would carry that out again."""
    return record.kind.rank is not None and keys == tuple(sorted(record.keys, key=record.kind.rank))


def carry_out(
    recipe: Recipe, values: Sequence[Any], cells: Sequence[Any], nodes: Callable[[int], Any], leaves: Sequence[Any]
) -> Any:
    """Make what the recipe says, change the nodes that changed, and return the function's result."""
    born = [family.make(spec, values[place]) for family, spec, place in recipe.born]
    refs: dict[int, Any] = {}

    def resolve(ref: Ref) -> Any:
        tag, place = ref
        if tag == "c":
            return cells[place]
        if tag == "e":
            return nodes(place)
        if tag == "b":
            return born[place]
        if tag == "l":
            return leaves[place]
        if tag == "r":
            if place not in refs:
                value = values[place]
                refs[place] = jax.new_ref(value) if isinstance(value, jax.Array) else value  # a shape stays a shape
            return refs[place]
        return values[place]

    builder = Builder(recipe.records, resolve)
    contents = [(number, record, [builder.ref(ref) for ref in record.refs]) for number, record in recipe.changed]
    out = builder.ref(recipe.out) if recipe.out is not None else None
    for number, record, children in contents:
        record.kind.fill(nodes(number), record.keys, children, record.extra)
    return out
