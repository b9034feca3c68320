"""Verifies in C-speed loops that arguments still have the structure that was surveyed, and gathers their cells.

Nothing of the arguments is kept alive: the program knows types, keys, static values and the pattern of sharing. Any
module with the same structure passes; its cells and arrays are collected on the way. Static values are compared by
identity, because `==` would take 1 for 1.0 and would compute on cells; whoever fails goes the slow way, where equal
static values meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from shardax.state.graph import Group, Level, Survey
from shardax.state.kinds import DICT, Kind, same

_flat = chain.from_iterable
_dict_values = dict.values
Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Match(NamedTuple):
    """What a program gathered: the cells and arrays of the arguments, and their nodes group by group."""

    cells: Sequence[Any]
    leaves: Sequence[Any]
    nodes: list[Sequence[Any]]


def picker(positions: Sequence[int], size: int) -> Pick | None:
    """The fastest way to take these positions from a sequence of `size`; None where nothing is taken."""
    if not positions:
        return None
    first, count = positions[0], len(positions)
    if list(positions) == list(range(first, first + count)):
        return everything if count == size else itemgetter(slice(first, first + count))
    return itemgetter(*positions)  # more than one: a tuple


def everything(objects: Sequence[Any]) -> Sequence[Any]:
    """The picker of all positions."""
    return objects


class _Members:
    """Verifies the nodes of one group and gives their children."""

    __slots__ = (
        "check",
        "children",
        "extras",
        "keys",
        "kind",
        "lengths",
        "mapping",
        "pick",
        "single",
        "statics",
        "wide",
    )

    def __init__(self, group: Group, size: int) -> None:
        kind = group.kind
        self.kind: Kind = kind
        self.pick = picker(group.positions, size)
        self.mapping = kind.mapping
        self.extras = group.extras
        self.keys = group.keys
        self.statics: list[Any] = list(_flat(group.statics))
        self.lengths = [len(group.keys) + len(kind.ignored)] * len(group.nodes)
        self.check, self.children = None, None
        self.wide = self.single = False
        if kind.mapping is not None:
            taken = set(group.taken)
            fixed = [key for index, key in enumerate(group.keys) if index not in taken]
            moving = [group.keys[index] for index in group.taken]
            self.check = itemgetter(*fixed) if fixed else None
            self.single = len(fixed) == 1
            self.children = itemgetter(*moving) if moving else None
            self.wide = len(moving) > 1
        elif kind is DICT:
            self.keys = group.keys * len(group.nodes)

    def open(self, nodes: Sequence[Any]) -> Sequence[Any] | None:
        """The children that go on to the next level, or None where a node is not as it was."""
        if self.mapping is not None:
            return self._open_mappings(list(map(self.mapping, nodes)))
        if self.kind is DICT:
            if tuple(_flat(nodes)) != self.keys:
                return None
            return list(_flat(map(_dict_values, nodes)))
        if self.kind.sequence:
            if list(map(len, nodes)) != self.lengths:
                return None
            return list(_flat(nodes))
        return self._open_slowly(nodes)

    def _open_mappings(self, dicts: list[dict[Any, Any]]) -> Sequence[Any] | None:
        if list(map(len, dicts)) != self.lengths:
            return None
        if self.check is not None:
            found = map(self.check, dicts)
            if not all(map(is_, found if self.single else _flat(found), self.statics)):
                return None
        if self.children is None:
            return ()
        return list(_flat(map(self.children, dicts))) if self.wide else list(map(self.children, dicts))

    def _open_slowly(self, nodes: Sequence[Any]) -> Sequence[Any] | None:
        children: list[Any] = []
        for node, extra in zip(nodes, self.extras, strict=True):
            opened = self.kind.open(node, "auto")
            if opened.keys != self.keys or not same(opened.extra, extra):
                return None
            children.extend(opened.values)
        return children


class _Stage:
    """Verifies the objects of one level and sorts them."""

    __slots__ = ("cells", "groups", "leaves", "occurrences", "statics", "types", "values")

    def __init__(self, level: Level) -> None:
        size = len(level.objects)
        self.types = list(map(type, level.objects))
        self.cells = picker(level.cells, size)
        self.leaves = picker(level.leaves, size)
        self.statics = picker(level.statics, size)
        self.values = [level.objects[position] for position in level.statics]
        self.occurrences = picker(level.occurrences, size)
        self.groups = [_Members(group, size) for group in level.groups]


class Program:
    """The verification of one structure. `match` answers with what it gathered, or None."""

    __slots__ = ("distinct", "first", "last", "stages")

    def __init__(self, found: Survey) -> None:
        self.stages = [_Stage(level) for level in found.levels]
        identities = [id(level.objects[place]) for level in found.levels for place in level.occurrences]
        seen: dict[int, int] = {}
        self.first = [seen.setdefault(identity, place) for place, identity in enumerate(identities)]
        self.distinct = len(seen)
        self.last = identities  # numbers, not references: equal numbers of live objects are equal sharing

    def match(self, roots: Sequence[Any]) -> Match | None:
        try:
            return self._match(roots)
        except (KeyError, AttributeError, TypeError):  # a key, an attribute table or a length that is no longer there
            return None

    def _match(self, roots: Sequence[Any]) -> Match | None:
        objects = roots
        cells: Sequence[Any] = ()
        leaves: Sequence[Any] = ()
        nodes: list[Sequence[Any]] = []
        occurrences: Sequence[Any] = ()
        for stage in self.stages:
            if list(map(type, objects)) != stage.types:
                return None
            if stage.statics is not None and not all(map(is_, stage.statics(objects), stage.values)):
                return None
            if stage.cells is not None:
                cells = [*cells, *stage.cells(objects)] if cells else stage.cells(objects)
            if stage.leaves is not None:
                leaves = [*leaves, *stage.leaves(objects)] if leaves else stage.leaves(objects)
            if stage.occurrences is not None:
                found = stage.occurrences(objects)
                occurrences = [*occurrences, *found] if occurrences else found
            following: Sequence[Any] = ()
            for group in stage.groups:
                members = group.pick(objects) if group.pick is not None else ()
                nodes.append(members)
                children = group.open(members)
                if children is None:
                    return None
                following = [*following, *children] if following else children
            objects = following
        if len(self.first) > 1 and list(map(id, occurrences)) != self.last and not self._shared_alike(occurrences):
            return None
        return Match(cells, leaves, nodes)

    def _shared_alike(self, occurrences: Sequence[Any]) -> bool:
        identities = list(map(id, occurrences))
        alike = len(set(identities)) == self.distinct and [identities[place] for place in self.first] == identities
        if alike:
            self.last = identities
        return alike
