"""Verifies in C-speed loops that arguments still have the structure that was surveyed, and gathers their cells.

Nothing of the arguments is kept alive: the program knows types, keys, static values and the pattern of sharing. Any
module with the same structure passes; its cells and arrays are collected on the way. Static values are compared by
identity, because `==` would take 1 for 1.0 and would compute on cells; whoever fails goes the slow way, where equal
static values meet again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from shardax.state.graph import Group, Level, Survey
from shardax.state.kinds import DICT, same
from shardax.state.sharing import Pick, Sharing, everything, picker

_flat = chain.from_iterable
_dict_values = dict.values
_tuple: Any = tuple.__new__  # makes a named tuple in half the time
Open = Callable[[Sequence[Any]], Sequence[Any] | None]
"""From the objects of a level, the children of one group of nodes; None where a node is not as it was."""


class Match(NamedTuple):
    """What a program gathered: the cells and arrays of the arguments, and the objects of every level."""

    cells: Sequence[Any]
    leaves: Sequence[Any]
    levels: Sequence[Sequence[Any]]
    places: Sequence[tuple[int, int]]  # of every node: its level, and where it stands there

    def node(self, number: int) -> Any:
        """A node by its number."""
        level, position = self.places[number]
        return self.levels[level][position]


# ---- opening nodes --------------------------------------------------------------------------------------------------


def _opener(group: Group, size: int) -> Open:
    kind = group.kind
    pick = picker(group.positions, size) or everything
    if kind.mapping is not None:
        return _of_one_mapping(group) if len(group.nodes) == 1 else _of_mappings(group, pick)
    if kind is DICT:
        return _of_dicts(group.keys * len(group.nodes), pick)
    if kind.sequence:
        return _of_sequences([len(group.keys)] * len(group.nodes), pick)
    return _by_opening(group, pick)


def _of_mappings(group: Group, pick: Pick) -> Open:
    kind, mapping = group.kind, group.kind.mapping
    assert mapping is not None
    lengths = [len(group.keys) + len(kind.ignored)] * len(group.nodes)
    fixed, moving = map(_values_of, _keys(group))
    statics = [value for values in group.statics for value in values]
    guards = [(itemgetter(name), [mapping(node)[name] for node in group.nodes]) for name in kind.guarded]

    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        held = list(map(mapping, pick(objects)))
        if list(map(len, held)) != lengths:
            return None
        if statics and not all(map(is_, _flat(map(fixed, held)), statics)):
            return None
        for guard, values in guards:
            if list(map(guard, held)) != values:
                return None
        return list(_flat(map(moving, held)))

    return open


def _of_one_mapping(group: Group) -> Open:
    kind, mapping, place = group.kind, group.kind.mapping, group.positions[0]
    assert mapping is not None
    length = len(group.keys) + len(kind.ignored)
    fixed, moving = map(_values_of, _keys(group))
    (statics,) = group.statics
    guards = [(name, mapping(group.nodes[0])[name]) for name in kind.guarded]

    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        held = mapping(objects[place])
        if len(held) != length or (statics and not all(map(is_, fixed(held), statics))):
            return None
        for name, value in guards:
            if held[name] is not value and held[name] != value:
                return None
        return moving(held)

    return open


def _keys(group: Group) -> tuple[list[Any], list[Any]]:
    """The keys of static children, and of those that go on to the next level."""
    taken = set(group.taken)
    fixed = [key for index, key in enumerate(group.keys) if index not in taken]
    return fixed, [group.keys[index] for index in group.taken]


def _values_of(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """Takes the values of these keys from a mapping."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda held, key=keys[0]: (held[key],)) if keys else lambda held: ()


def _of_dicts(keys: tuple[Any, ...], pick: Pick) -> Open:
    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        nodes = pick(objects)
        return list(_flat(map(_dict_values, nodes))) if tuple(_flat(nodes)) == keys else None

    return open


def _of_sequences(lengths: list[int], pick: Pick) -> Open:
    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        nodes = pick(objects)
        return list(_flat(nodes)) if list(map(len, nodes)) == lengths else None

    return open


def _by_opening(group: Group, pick: Pick) -> Open:
    kind, keys, extras = group.kind, group.keys, group.extras

    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        children: list[Any] = []
        for node, extra in zip(pick(objects), extras, strict=True):
            opened = kind.open(node, "auto")
            if opened.keys != keys or not same(opened.extra, extra):
                return None
            children.extend(opened.values)
        return children

    return open


# ---- the program ----------------------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    """What is verified of the objects of one level, and how they are sorted."""

    types: list[type]
    statics: Pick | None
    values: list[Any]
    cells: Pick | None
    leaves: Pick | None
    shared: Pick | None
    openers: list[Open]


def _stage(level: Level, sharable: set[type]) -> _Stage:
    size, objects = len(level.objects), level.objects
    return _Stage(
        list(map(type, objects)),
        picker(level.statics, size),
        [objects[position] for position in level.statics],
        picker(level.cells, size),
        picker(level.leaves, size),
        picker([position for position in level.occurrences if type(objects[position]) in sharable], size),
        [_opener(group, size) for group in level.groups],
    )


class Program:
    """The verification of one structure. `match` answers with what it gathered, or None."""

    __slots__ = ("places", "sharing", "stages")

    def __init__(self, found: Survey) -> None:
        occurrences = [level.objects[place] for level in found.levels for place in level.occurrences]
        counted = Counter(map(type, occurrences))
        sharable = {cls for cls, count in counted.items() if count > 1}  # what is alone of its type cannot be shared
        self.stages = [_stage(level, sharable) for level in found.levels]
        self.places = [
            (depth, position)
            for depth, level in enumerate(found.levels)
            for group in level.groups
            for position in group.positions
        ]
        self.sharing = Sharing([value for value in occurrences if type(value) in sharable])

    def match(self, roots: Sequence[Any]) -> Match | None:
        """Does everything below `roots` have the structure that was surveyed?"""
        try:
            return self._match(roots)
        except (KeyError, AttributeError, TypeError):  # a key, an attribute table or a length that is no longer there
            return None

    def _match(self, objects: Sequence[Any]) -> Match | None:
        cells: Sequence[Any] = ()
        leaves: Sequence[Any] = ()
        occurrences: Sequence[Any] = ()
        levels: list[Sequence[Any]] = []
        for types, statics, values, cells_of, leaves_of, shared_of, openers in self.stages:
            if list(map(type, objects)) != types:
                return None
            if statics is not None and not all(map(is_, statics(objects), values)):
                return None
            if cells_of is not None:
                cells = [*cells, *cells_of(objects)] if cells else cells_of(objects)
            if leaves_of is not None:
                leaves = [*leaves, *leaves_of(objects)] if leaves else leaves_of(objects)
            if shared_of is not None:
                occurrences = [*occurrences, *shared_of(objects)] if occurrences else shared_of(objects)
            levels.append(objects)
            following: Sequence[Any] = ()
            for open in openers:
                children = open(objects)
                if children is None:
                    return None
                following = [*following, *children] if following else children
            objects = following
        if not self.sharing.alike(occurrences):
            return None
        return _tuple(Match, (cells, leaves, levels, self.places))
