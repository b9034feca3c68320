"""Verifies that arguments still have the structure that was surveyed, and gathers their cells: the steady state.

Nothing of the arguments is kept alive: the program knows types, keys, static values and the pattern of sharing. Any
module with the same structure passes; its cells and arrays are collected on the way. Static values are compared by
identity, because `==` would take 1 for 1.0 and would compute on cells; whoever fails goes the slow way, where equal
static values meet again.

A program is written out as one Python function, a paragraph a level: nodes that stand alone are looked at in place,
groups of alike nodes in C-speed loops (`opening.py`). Read it: `print(Program(survey(...)).source)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from types import CodeType
from typing import Any, NamedTuple

from shardax.state.graph import Group, Level, Survey
from shardax.state.opening import keys_of, opener, values_of
from shardax.state.sharing import Sharing, picker

_tuple: Any = tuple.__new__  # makes a named tuple in half the time
_FEW = 3  # so many objects are looked at one by one, more of them in a loop


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


class Program:
    """The verification of one structure. `match` answers with what it gathered, or None."""

    __slots__ = ("match", "source")

    def __init__(self, found: Survey) -> None:
        places = [
            (depth, position)
            for depth, level in enumerate(found.levels)
            for group in level.groups
            for position in group.positions
        ]
        occurrences = [level.objects[place] for level in found.levels for place in level.occurrences]
        counted = Counter(map(type, occurrences))
        sharable = {cls for cls, count in counted.items() if count > 1}  # what is alone of its type cannot be shared
        writer = _Writer(sharable)
        for level in found.levels:
            writer.level(level)
        self.source = writer.finish(Sharing([value for value in occurrences if type(value) in sharable]), places)
        names: dict[str, Any] = writer.names
        exec(_code(self.source), names)
        self.match: Callable[[Sequence[Any]], Match | None] = names["match"]


@lru_cache(maxsize=256)
def _code(source: str) -> CodeType:
    """Alike structures are written alike: compiling takes longer than writing."""
    return compile(source, "<shardax program>", "exec")


class _Writer:
    """Writes `match`, and collects the objects that it names."""

    def __init__(self, sharable: set[type]) -> None:
        self.sharable = sharable
        self.names: dict[str, Any] = {"is_": is_, "tuple_": _tuple, "Match": Match}
        self.lines: list[str] = []
        self.depth = 0
        self.gathered: dict[str, list[str]] = {"cells": [], "leaves": [], "occurring": []}

    def name(self, value: Any) -> str:
        name = f"_{len(self.names)}"
        self.names[name] = value
        return name

    def refuse(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return None"]

    def level(self, level: Level) -> None:
        here, size = f"level{self.depth}", len(level.objects)
        self._same([f"type({here}[{n}])" for n in range(size)], f"map(type, {here})", list(map(type, level.objects)))
        statics = [level.objects[position] for position in level.statics]
        self._same([f"{here}[{n}]" for n in level.statics], self._picked(level.statics, here, size), statics)
        self._gather("cells", level.cells, here, size)
        self._gather("leaves", level.leaves, here, size)
        shared = [place for place in level.occurrences if type(level.objects[place]) in self.sharable]
        self._gather("occurring", shared, here, size)
        following = [self._open(group, here, size) for group in level.groups]
        self.depth += 1
        if following:
            self.lines.append(f"level{self.depth} = {_joined(following)}")

    def _same(self, each: Sequence[str], loop: str, values: list[Any]) -> None:
        """Refuse what is not these very objects."""
        if 0 < len(values) <= _FEW:
            self.refuse(" or ".join(f"{a} is not {self.name(b)}" for a, b in zip(each, values, strict=True)))
        elif values and all(isinstance(value, type) for value in values):
            self.refuse(f"[*{loop}] != {self.name(values)}")  # classes compare by identity, and lists of them at once
        elif values:
            self.refuse(f"not all(map(is_, {loop}, {self.name(values)}))")

    def _picked(self, positions: Sequence[int], source: str, size: int) -> str:
        if len(positions) == size:
            return source
        if len(positions) == 1:
            return f"({source}[{positions[0]}],)"
        return f"{self.name(picker(positions, size))}({source})"

    def _gather(self, what: str, positions: Sequence[int], here: str, size: int) -> None:
        if positions:
            self.gathered[what].append(self._picked(positions, here, size))

    def _open(self, group: Group, here: str, size: int) -> str:
        if group.kind.mapping is not None and len(group.nodes) == 1:
            return self._open_one(group, here)
        children = f"nodes{len(self.names)}"
        self.lines.append(f"{children} = {self.name(opener(group, size))}({here})")
        self.refuse(f"{children} is None")
        return children

    def _open_one(self, group: Group, here: str) -> str:
        kind = group.kind
        assert kind.mapping is not None
        held = f"held{len(self.names)}"
        self.lines.append(f"{held} = {self.name(kind.mapping)}({here}[{group.positions[0]}])")
        self.refuse(f"len({held}) != {len(group.keys) + len(kind.ignored)}")
        for key in kind.guarded:
            value = self.name(kind.mapping(group.nodes[0])[key])
            self.refuse(f"{held}[{key!r}] is not {value} and {held}[{key!r}] != {value}")
        fixed, moving = keys_of(group)
        fixed_names = [self.name(key) for key in fixed]
        loop = f"{self.name(values_of(fixed))}({held})"
        self._same([f"{held}[{key}]" for key in fixed_names], loop, group.statics[0])
        if len(moving) == 1:
            return f"({held}[{self.name(moving[0])}],)"
        children = f"nodes{len(self.names)}"
        self.lines.append(f"{children} = {self.name(values_of(moving))}({held})")
        return children

    def finish(self, sharing: Sharing, places: list[tuple[int, int]]) -> str:
        if self.gathered["occurring"]:
            self.refuse(f"not {self.name(sharing)}.alike({_joined(self.gathered['occurring'])})")
        levels = ", ".join(f"level{depth}" for depth in range(self.depth))
        cells, leaves = _joined(self.gathered["cells"]), _joined(self.gathered["leaves"])
        self.lines.append(f"return tuple_(Match, ({cells}, {leaves}, ({levels},), {self.name(places)}))")
        body = "\n".join(f"        {line}" for line in self.lines)
        return (
            "def match(level0):\n    try:\n"
            f"{body}\n"
            "    except (KeyError, AttributeError, TypeError):  # a key, an attribute, a length that is gone\n"
            "        return None\n"
        )


def _joined(sequences: Sequence[str]) -> str:
    """One sequence of several."""
    if len(sequences) < 2:
        return sequences[0] if sequences else "()"
    return f"[{', '.join(f'*{sequence}' for sequence in sequences)}]"
