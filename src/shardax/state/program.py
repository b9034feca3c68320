"""Verifies that a call is one that was seen before, and gathers what goes in: the steady state.

Nothing of the arguments is kept alive: the program knows types, keys, static values and the pattern of sharing. Any
module with the same structure passes; its cells and arrays are collected on the way. Static values are compared by
identity, because `==` would take 1 for 1.0 and would compute on cells; whoever fails goes the slow way, where equal
static values meet again.

A program is written out as one Python function, a paragraph a level: nodes that stand alone are looked at in place,
groups of alike nodes in C-speed loops (`opening.py`). Python calls nothing on the way that could be written here, for
a call of ten cells takes JAX 14 µs and every frame is a hundredth of that. Read it: `print(plan.program.source)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, groupby
from operator import is_
from types import CodeType
from typing import Any

from shardax.state.cells import Attributes, Family, in_place
from shardax.state.environment import Watch
from shardax.state.forms import Form
from shardax.state.graph import Group, Level, Survey
from shardax.state.kinds import DICT, role_of
from shardax.state.lifted import Lifted
from shardax.state.opening import keys_of, opener, values_of
from shardax.state.sharing import Sharing, picker

_FEW = 3  # so many objects are looked at one by one, more of them in a loop
Found = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Sequence[Any]]]
"""What a program gathers: the inputs, the cells and arrays among them, and the objects of every level."""


class Program:
    """The verification of one sort of call. `gather(args, kwargs)` gives what was `Found`, or None."""

    __slots__ = ("gather", "places", "source")

    def __init__(self, found: Survey, lifted: Lifted, watch: Watch, cells: Sequence[Any]) -> None:
        self.places = [  # of every node: its level, and where it stands there
            (depth, position)
            for depth, level in enumerate(found.levels)
            for group in level.groups
            for position in group.positions
        ]
        occurrences = [level.objects[place] for level in found.levels for place in level.occurrences]
        counted = Counter(map(type, occurrences))
        sharable = {cls for cls, count in counted.items() if count > 1}  # what is alone of its type cannot be shared
        writer = _Writer(sharable)
        writer.call(lifted, watch)
        for level in found.levels:
            writer.level(level)
        writer.sharing([value for value in occurrences if type(value) in sharable])
        writer.join(lifted, len(found.cells))
        writer.read(cells)
        self.source = writer.finish()
        names: dict[str, Any] = writer.names
        exec(_code(self.source), names)
        self.gather: Callable[[Sequence[Any], dict[str, Any]], Found | None] = names["gather"]

    def node(self, found: Found, number: int) -> Any:
        """A node by its number."""
        level, position = self.places[number]
        return found[3][level][position]


@lru_cache(maxsize=256)
def _code(source: str) -> CodeType:
    """Alike structures are written alike: compiling takes longer than writing."""
    return compile(source, "<shardax program>", "exec")


class _Writer:
    """Writes `gather`, and collects the objects that it names."""

    def __init__(self, sharable: set[type]) -> None:
        self.sharable = sharable
        self.names: dict[str, Any] = {"is_": is_}
        self.lines: list[str] = []
        self.variables = count()
        self.depth = 0
        self.gathered: dict[str, list[str]] = {"cells": [], "leaves": [], "occurring": []}

    def name(self, value: Any) -> str:
        name = f"_{len(self.names)}"
        self.names[name] = value
        return name

    def variable(self, what: str) -> str:
        return f"{what}{next(self.variables)}"

    def refuse(self, condition: str) -> None:
        self.lines += [f"if {condition}:", "    return None"]

    # ---- the call -----------------------------------------------------------------------------------------------

    def call(self, lifted: Lifted, watch: Watch) -> None:
        """What the function closes over, its static arguments, and which arguments hold state."""
        form = lifted.form
        for doubt in watch.doubts(self.name):
            self.refuse(doubt)
        if form.static or form.static_names:
            self.refuse(f"not {self.name(form.static_alike)}(args, kwargs)")
        roots = [f"args[{place}]" for place in form.stateful]
        roots += [f"kwargs[{name!r}]" for name in form.stateful_names]
        if roots:
            self.lines.append("level0 = args" if _is_all(form) else f"level0 = ({', '.join(roots)},)")

    # ---- the structure of what was given -----------------------------------------------------------------------

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
        """The children of a group of nodes that go on to the next level."""
        children, alone = self.variable("nodes"), len(group.nodes) == 1
        node = f"{here}[{group.positions[0]}]"
        if alone and group.kind.mapping is not None:
            return self._open_one(group, node)
        if alone and (group.kind is DICT or group.kind.sequence):
            self.lines.append(f"{children} = [*{node}{'.values()' if group.kind is DICT else ''}]")
            if group.kind is DICT:
                self.refuse(f"[*{node}] != {self.name(list(group.keys))}")
            else:
                self.refuse(f"len({children}) != {len(group.keys)}")
            return children
        self.lines.append(f"{children} = {self.name(opener(group, size))}({here})")
        self.refuse(f"{children} is None")
        return children

    def _open_one(self, group: Group, node: str) -> str:
        kind = group.kind
        assert kind.mapping is not None
        held = self.variable("held")
        self.lines.append(f"{held} = {self.name(kind.mapping)}({node})")
        if kind.rank is None:
            self.refuse(f"[*{held}] != {self.name(list(group.keys))}")
        else:  # its framework sorts: the order of attributes means nothing
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
        children = self.variable("nodes")
        self.lines.append(f"{children} = {self.name(values_of(moving))}({held})")
        return children

    # ---- what was found -----------------------------------------------------------------------------------------

    def sharing(self, occurrences: Sequence[Any]) -> None:
        if occurrences:
            self.refuse(f"not {self.name(Sharing(occurrences))}.alike({_joined(self.gathered['occurring'])})")

    def join(self, lifted: Lifted, size: int) -> None:
        """The cells of the arguments, then those that the function closes over; a cell that is both stands there."""
        environment = lifted.environment
        self.lines.append(f"cells = {_joined(self.gathered['cells'])}")
        for place, number in lifted.pinned.items():
            self.refuse(f"cells[{place}] is not {self.name(environment.cells[number])}")
        if len(lifted.own) != size:
            self.lines.append(f"cells = {self._picked(lifted.own, 'cells', size)}")
        if not environment.cells:
            return
        if not lifted.own:
            self.lines.append(f"cells = {self.name(environment.cells)}")
            return
        self.refuse(f"not {self.name(environment.identities.keys())}.isdisjoint(map(id, cells))")
        self.lines.append(f"cells = [*cells, *{self.name(environment.cells)}]")

    def read(self, cells: Sequence[Any]) -> None:
        """The values of cells like these. A list always: to JAX a tuple would be another structure."""
        runs = [list(run) for _, run in groupby(cells, lambda cell: id(role_of(type(cell))))]
        values: list[str] = []
        start = 0
        for run in runs:
            part = "cells" if len(runs) == 1 else f"cells[{start}:{start + len(run)}]"
            values.append(self._read(role_of(type(run[0])), run, part))
            start += len(run)
        values += self.gathered["leaves"]
        whole = f"[{', '.join(f'*{part}' for part in values)}]"
        self.lines.append(f"values = {values[0] if len(values) == 1 and runs else whole}")

    def _read(self, family: Family, run: Sequence[Any], part: str) -> str:
        snapshot, values = self.name(family.snapshot(run)), self.variable("values")
        if isinstance(family.reads, Attributes):  # in a comprehension an attribute is read four times as fast as mapped
            self.refuse(f"[cell.{family.reads.described} for cell in {part}] != {snapshot}")
            reading = f"{values} = [cell.{family.reads.value} for cell in {part}]"
            self.lines += [f"with {self.name(in_place)}:", f"    {reading}"] if family.reads.locked else [reading]
        else:
            self.lines.append(f"{values} = {self.name(family.reads)}({part}, {snapshot})")
            self.refuse(f"{values} is None")
        return values

    def finish(self) -> str:
        levels = ", ".join(f"level{depth}" for depth in range(self.depth))
        self.lines.append(f"return values, cells, {_joined(self.gathered['leaves'])}, ({levels}{',' * bool(levels)})")
        body = "\n".join(f"        {line}" for line in self.lines)
        return (
            "def gather(args, kwargs):\n    try:\n"
            f"{body}\n"
            "    except (LookupError, AttributeError, TypeError, ValueError):  # something is gone\n"
            "        return None\n"
        )


def _joined(sequences: Sequence[str]) -> str:
    """One sequence of several."""
    if len(sequences) < 2:
        return sequences[0] if sequences else "()"
    return f"[{', '.join(f'*{sequence}' for sequence in sequences)}]"


def _is_all(form: Form) -> bool:
    """Are all arguments stateful, and none of them named?"""
    return not form.stateful_names and form.stateful == tuple(range(form.count))
