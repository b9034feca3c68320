"""The cells a function closes over: found by walking what it refers to, pinned by identity, watched for rebinding.

The walk saves a trace: what it finds is an input from the start. What it cannot see (a State inside some foreign
object) is met while tracing, and the trace is done again with that cell as an input.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from shardax.state.graph import Record, paths_of, survey
from shardax.state.kinds import ARRAY, BOX, LIBRARIES, OBJECT, SCALAR, STATIC, UNKNOWN, Frozen, Kind, Opened, role_of

_EMPTY = object()
_INSIDE = ("__wrapped__", "func", "__func__")  # where decorators, partials and methods keep their function


@dataclass(frozen=True, eq=False)
class Surrounding:
    """A framework's node that a function closes over, as it was found: its attributes are structure of the function."""

    node: Any
    kind: Kind
    opened: Opened
    structure: tuple[Any, ...]

    def record(self) -> Record:
        """The node as one of a graph."""
        return Record(self.kind, type(self.node), self.opened.keys, self.opened.extra, "auto")

    def restore(self) -> None:
        """Undo what was done to the attributes since."""
        now = self.kind.open(self.node, "auto")
        if now.keys != self.opened.keys or not all(map(is_, now.values, self.opened.values)):
            self.kind.fill(self.node, self.opened.keys, self.opened.values, self.opened.extra)

    def statics(self) -> Iterator[tuple[str, str]]:
        """What a re-trace may come of: attributes that are no cells, as text."""
        for key, value in zip(self.opened.keys, self.structure[1], strict=True):
            if isinstance(value, Frozen):
                yield self.kind.step(key), repr(value)


@contextmanager
def entered(surroundings: Sequence[Surrounding]) -> Generator[None]:
    """While it is open, closed-over nodes belong to the trace; what happened to them is undone at its end."""
    tokens = [(surrounding, surrounding.kind.enter(surrounding.node)) for surrounding in surroundings]
    try:
        yield
    finally:
        for surrounding, token in tokens:
            surrounding.kind.leave(surrounding.node, token)
            surrounding.restore()


class Watch:
    """The places through which a function reaches its cells, and what stood there when they were found."""

    def __init__(self) -> None:
        self.lists: list[tuple[Sequence[Any], list[Any], bool]] = []
        self.mappings: list[tuple[Any, Callable[[Any], Any], tuple[Any, ...]]] = []
        self.closures: list[tuple[types.CellType, Any]] = []
        self.surroundings: list[Surrounding] = []

    @property
    def structure(self) -> tuple[Any, ...]:
        """What the function depends on of the nodes that it closes over."""
        return tuple((id(surrounding.node), *surrounding.structure) for surrounding in self.surroundings)

    def finish(self) -> None:
        """Watch nodes with the same attributes in one loop."""
        groups: dict[tuple[Any, ...], list[Surrounding]] = {}
        for surrounding in self.surroundings:
            groups.setdefault((surrounding.kind, *surrounding.opened.keys), []).append(surrounding)
        self.groups = [_Group(members) for members in groups.values()]

    def doubts(self, name: Callable[[Any], str]) -> Iterator[str]:
        """Expressions of which one is true, or raises a `LookupError` or `ValueError`, if a place holds something else.

        They are written into a program, where `name` says what an object is called.
        """
        for closure, value in self.closures:  # a closure that was emptied raises
            yield f"{name(closure)}.cell_contents is not {name(value)}"
        for mapping, get, values in self.mappings:  # a name that was deleted raises
            yield f"not all(map({name(is_)}, {name(get)}({name(mapping)}), {name(values)}))"
        for sequence, values, comparable in self.lists:
            now, then = name(sequence), name(values)
            if comparable:  # own cells compare by identity: one C comparison of two lists
                yield f"{now} != {then}"
            else:
                yield f"len({now}) != {len(values)} or not all(map({name(is_)}, {now}, {then}))"
        for group in self.groups:
            yield f"not {name(group.holds)}()"


class _Group:
    """Nodes with the same attributes, and what all of those held."""

    def __init__(self, members: Sequence[Surrounding]) -> None:
        kind, keys = members[0].kind, members[0].opened.keys
        assert kind.mapping is not None
        self.mapping, self.nodes = kind.mapping, [member.node for member in members]
        self.lengths = [len(keys) + len(kind.ignored)] * len(members)
        self.get = itemgetter(*keys) if len(keys) > 1 else lambda held: tuple(held[key] for key in keys)
        self.values = [value for member in members for value in member.opened.values]

    def holds(self) -> bool:
        held = list(map(self.mapping, self.nodes))
        return list(map(len, held)) == self.lengths and all(
            map(is_, chain.from_iterable(map(self.get, held)), self.values)
        )


def _may_lead(cls: type) -> bool:
    role = role_of(cls)
    if role is STATIC:
        return bool(getattr(cls, "__call__", None))  # noqa: B004  asked of a class: do its instances call?
    return role is not ARRAY and role is not SCALAR and role is not BOX


class _Search:
    def __init__(self) -> None:
        self.cells: dict[int, Any] = {}
        self.watch = Watch()
        self.known: dict[int, bool] = {}
        self.alive: list[Any] = []

    def visit(self, value: Any) -> bool:
        """Does `value` lead to a cell? Everything on the way is watched."""
        if isinstance(value, types.CellType):
            return self._closure(value)
        role = role_of(type(value))
        if role is ARRAY or role is SCALAR or role is BOX:
            return False
        if id(value) in self.known:
            return self.known[id(value)]
        if role is STATIC and not callable(value):
            return False
        self.known[id(value)] = False  # a cycle leads nowhere new
        self.alive.append(value)
        found = self._visit(value, role)
        self.known[id(value)] = found
        return found

    def _visit(self, value: Any, role: Any) -> bool:
        if role is STATIC:
            return self._callable(value)
        if role is UNKNOWN:
            role = OBJECT
        if not isinstance(role, Kind):
            self.cells.setdefault(id(value), value)
            return True
        if role.sequence:
            if not any(map(_may_lead, set(map(type, value)))):
                return False
            hits = [self.visit(child) for child in value]
            if any(hits) and role.mutable:
                comparable = all(cls.__eq__ is object.__eq__ for cls in set(map(type, value)))
                self.watch.lists.append((value, list(value), comparable))
            return any(hits)
        opened = role.open(value, "auto")
        hits = [self.visit(child) for child in opened.values]
        if role.whole:
            parts = tuple(id(v) if hit else Frozen(v) for v, hit in zip(opened.values, hits, strict=True))
            self.watch.surroundings.append(Surrounding(value, role, opened, (opened.keys, parts)))
            return True
        self._watch_mapping(value, role, opened.keys, opened.values, hits)
        called = self.visit(type(value).__call__) if role is OBJECT and callable(value) else False
        return any(hits) or called

    def _watch_mapping(self, value: Any, role: Kind, keys: Any, values: Any, hits: list[bool]) -> None:
        if not any(hits) or not role.mutable:
            return
        mapping = value if isinstance(value, dict) else role.mapping(value) if role.mapping is not None else None
        if mapping is not None:
            self._names(mapping, [(k, v) for k, v, hit in zip(keys, values, hits, strict=True) if hit])

    def _names(self, mapping: Any, items: list[tuple[Any, Any]]) -> None:
        keys = [key for key, _ in items]
        get = itemgetter(*keys) if len(keys) > 1 else lambda place, key=keys[0]: (place[key],)
        self.watch.mappings.append((mapping, get, tuple(value for _, value in items)))

    def _closure(self, cell: types.CellType) -> bool:
        value = contents(cell)
        if value is _EMPTY or not self.visit(value):
            return False
        self.watch.closures.append((cell, value))
        return True

    def _callable(self, value: Any) -> bool:
        parts: list[Any] = []
        if isinstance(value, functools.partial):
            parts = [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            parts = [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            return self._function(value)
        elif not isinstance(value, type) and hasattr(value, "__wrapped__"):
            parts = [value.__wrapped__]
        hits = [self.visit(part) for part in parts]
        return any(hits)

    def _function(self, function: types.FunctionType) -> bool:
        if _is_of_a_library(function):
            return False
        hits = [self.visit(part) for part in (function.__closure__ or ())]
        hits += [self.visit(part) for part in (function.__defaults__ or ())]
        hits += [self.visit(part) for part in (function.__kwdefaults__ or {}).values()]
        if "__wrapped__" in vars(function):
            hits.append(self.visit(vars(function)["__wrapped__"]))
        places = function.__globals__
        names = [(name, places[name]) for name in _names_in(function.__code__) if name in places]
        reached = [(name, value) for name, value in names if self.visit(value)]
        if reached:
            self._names(places, reached)
        return any(hits) or bool(reached)


def _is_of_a_library(function: types.FunctionType) -> bool:
    """Is it a library's own? What is typed at a prompt, or in a doctest, is nobody's."""
    return (function.__module__ or "").split(".")[0] in LIBRARIES and function.__code__.co_filename[:1] != "<"


def contents(cell: types.CellType) -> Any:
    """What a closure variable holds, if anything yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads by name; `co_names` would list attributes too."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_in(constant)
    return tuple(dict.fromkeys(names))


def closed_over(function: Callable[..., Any]) -> tuple[list[Any], Watch]:
    """The cells that `function` can reach without its arguments, and the places to watch."""
    search = _Search()
    search.visit(function)
    search.watch.finish()
    return list(search.cells.values()), search.watch


class Outside:
    """What a function and some values refer to: what is not here, and no argument, was made by the call."""

    def __init__(self, *roots: Any) -> None:
        self.roots = roots
        self.search: _Search | None = None

    def __contains__(self, value: Any) -> bool:
        if self.search is None:  # few calls make plain objects
            self.search = _Search()
            for root in self.roots:
                self.search.visit(root)
        return id(value) in self.search.known


def names_of(function: Callable[..., Any], cells: Sequence[Any]) -> list[str]:
    """What closed-over cells and nodes are called: by the variables through which the function reaches them.

    >>> from shardax.state.cells import State
    >>> count, layers = State(0), [State(1)]
    >>> names_of(lambda: (count.value, layers), [layers[0], count, State(2)])
    ['layers[0]', 'count', 'State(2)']
    """
    found: dict[int, str] = {}
    queue, seen = [function], set[int]()
    while queue:
        for name, value in _variables(queue.pop(0)):
            for path, cell in _cells_below(name, value):
                found.setdefault(id(cell), path)
            if callable(value) and id(value) not in seen and not isinstance(value, type):
                seen.add(id(value))
                queue.append(value)
    return [found.get(id(cell)) or _described(cell) for cell in cells]


def _described(value: Any) -> str:
    return type(value).__name__ if isinstance(role_of(type(value)), Kind) else " ".join(repr(value).split())


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to, by name; `self` is the instance of a method."""
    while any(hasattr(function, name) for name in _INSIDE):
        if isinstance(function, types.MethodType):
            yield "self", function.__self__
        function = next(getattr(function, name) for name in _INSIDE if hasattr(function, name))
    code = getattr(function, "__code__", None)
    if code is None or _is_of_a_library(function):
        return
    yield from zip(code.co_freevars, map(contents, function.__closure__ or ()), strict=True)
    yield from ((name, function.__globals__[name]) for name in _names_in(code) if name in function.__globals__)


def _cells_below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    walked = survey([(value, "auto")])
    paths, _, nodes = paths_of(walked.graph, [name])
    for number, cell in enumerate(walked.cells):
        yield paths[number], cell
    for number, node in enumerate(walked.nodes):
        yield nodes[number], node
