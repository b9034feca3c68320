"""The cells a function closes over: found by walking what it refers to, pinned by identity, watched for rebinding.

The walk saves a trace: what it finds is an input from the start. What it cannot see (a State inside some foreign
object) is met while tracing, and the trace is done again with that cell as an input.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from operator import is_, itemgetter
from typing import Any

from shardax.state.graph import paths_of, survey
from shardax.state.kinds import ARRAY, BOX, LIBRARIES, OBJECT, SCALAR, STATIC, UNKNOWN, Kind, role_of

_EMPTY = object()
_INSIDE = ("__wrapped__", "func", "__func__")  # where decorators, partials and methods keep their function


class Watch:
    """The places through which a function reaches its cells, and what stood there when they were found."""

    def __init__(self) -> None:
        self.lists: list[tuple[Sequence[Any], list[Any], bool]] = []
        self.mappings: list[tuple[Any, Callable[[Any], Any], tuple[Any, ...]]] = []
        self.closures: list[tuple[types.CellType, Any]] = []

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
        if (function.__module__ or "").split(".")[0] in LIBRARIES and function.__code__.co_filename[:1] != "<":
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
    return list(search.cells.values()), search.watch


def reached_by(function: Callable[..., Any]) -> dict[int, Any]:
    """Every object that may lead to a cell and that `function` can reach without its arguments, by its `id`."""
    search = _Search()
    search.visit(function)
    return {id(value): value for value in search.alive}


def names_of(function: Callable[..., Any], cells: Sequence[Any]) -> list[str]:
    """What closed-over cells are called: by the variables through which the function reaches them.

    >>> from shardax.state.cells import State
    >>> count, layers = State(0), [State(1)]
    >>> names_of(lambda: (count.value, layers), [layers[0], count, State(2)])
    ['layers[0]', 'count', 'State(2)']
    """
    inner: Any = function
    while any(hasattr(inner, name) for name in _INSIDE):
        inner = next(getattr(inner, name) for name in _INSIDE if hasattr(inner, name))
    code = getattr(inner, "__code__", None)
    found: dict[int, str] = {}
    if code is not None:
        places = {name: inner.__globals__[name] for name in _names_in(code) if name in inner.__globals__}
        variables = dict(zip(code.co_freevars, map(contents, inner.__closure__ or ()), strict=True))
        for name, value in (variables | places).items():
            for path, cell in _cells_below(name, value):
                found.setdefault(id(cell), path)
    return [found.get(id(cell)) or " ".join(repr(cell).split()) for cell in cells]


def _cells_below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    walked = survey([(value, "auto")])
    paths, _, _ = paths_of(walked.graph, [name])
    for number, cell in enumerate(walked.cells):
        yield paths[number], cell
