"""The structure of an object graph as a value, the way to build its like again, and the paths in it.

`survey` walks the stateful arguments of a call once, breadth first, and returns a `Graph` (hashable: calls with equal
graphs share one compiled function), the cells and arrays found, and what `program.py` needs to verify the same
structure next time without walking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardax.state.kinds import ARRAY, STATIC, Frozen, Kind, Mode, has_identity, role_in

Ref = tuple[str, Any]
"""Where a child is: ("c", cell), ("l", leaf), ("n", node) by number, or ("s", Frozen(value))."""


class Record:
    """One node of a graph: its kind, class, keys and children."""

    __slots__ = ("cls", "extra", "keys", "kind", "mode", "refs")

    mode: Mode

    def __init__(self, kind: Kind, cls: type, keys: tuple[Any, ...], extra: Any, mode: Mode) -> None:
        self.kind, self.cls, self.keys, self.extra, self.mode = kind, cls, keys, extra, mode
        self.refs: list[Ref] = []

    def signature(self) -> tuple[Any, ...]:
        return (self.kind.name, self.cls, self.keys, tuple(self.refs), self.extra)


@dataclass(frozen=True, eq=False)
class Graph:
    """A structure: node records, the references of its roots, and what every cell is. Equal if built alike."""

    records: tuple[Record, ...]
    roots: tuple[Ref, ...]
    specs: tuple[tuple[Any, Any], ...]  # one (family, spec) per cell
    leaves: int
    boxes: frozenset[int] = frozenset()  # leaves with an identity: one that is returned is the one that was given
    signature: Any = field(repr=False, default=None)

    def __post_init__(self) -> None:
        specs = tuple((family.name, spec) for family, spec in self.specs)
        signature = (tuple(record.signature() for record in self.records), self.roots, specs, self.leaves, self.boxes)
        object.__setattr__(self, "signature", Hashed(signature))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.signature == other.signature

    def __hash__(self) -> int:
        return hash(self.signature)


class Hashed:
    """A large tuple that computes its hash once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self._hash == other._hash and self.parts == other.parts


@dataclass
class Level:
    """The objects at one depth, as the survey met them; nodes are in `groups` of one (kind, class, keys) each."""

    objects: list[Any] = field(default_factory=list[Any])
    cells: list[int] = field(default_factory=list[int])
    leaves: list[int] = field(default_factory=list[int])
    statics: list[int] = field(default_factory=list[int])
    occurrences: list[int] = field(default_factory=list[int])
    groups: list[Group] = field(default_factory=list)


@dataclass
class Group:
    """Nodes of one level that are verified together. `taken` are the children that go on to the next level."""

    kind: Kind
    keys: tuple[Any, ...]
    taken: tuple[int, ...]
    positions: list[int] = field(default_factory=list[int])
    nodes: list[Any] = field(default_factory=list[Any])
    statics: list[list[Any]] = field(default_factory=list[list[Any]])
    extras: list[Any] = field(default_factory=list[Any])


@dataclass
class Survey:
    """What one walk found."""

    graph: Graph
    cells: list[Any]
    leaves: list[Any]
    nodes: list[Any]
    levels: list[Level]


class _Walk:
    def __init__(self) -> None:
        self.numbers: dict[int, Ref] = {}  # cells and mutable nodes by identity
        self.records: list[Record] = []
        self.cells: list[Any] = []
        self.specs: list[tuple[Any, Any]] = []
        self.leaves: list[Any] = []
        self.boxes: set[int] = set()
        self.nodes: list[Any] = []
        self.levels: list[Level] = []

    def level(self, objects: list[tuple[Any, Mode]]) -> tuple[list[Ref], list[tuple[Record, list[tuple[Any, Mode]]]]]:
        """Number the objects of one level; returns their references and the new nodes with their children."""
        level = Level([value for value, _ in objects])
        self.levels.append(level)
        refs: list[Ref] = []
        fresh: dict[int, tuple[Any, Mode, int]] = {}
        for position, (value, mode) in enumerate(objects):
            refs.append(self._number(level, position, value, mode, fresh))
        return refs, self._open(level, fresh)

    def _number(self, level: Level, position: int, value: Any, mode: Mode, fresh: dict[int, Any]) -> Ref:
        role = role_in(value, mode)
        if role is ARRAY:
            return self._leaf(level, position, value)
        if role is STATIC:
            level.statics.append(position)
            return ("s", Frozen(value))
        if not isinstance(role, Kind):
            level.occurrences.append(position)
            known = self.numbers.get(id(value))
            if known is None:
                known = self.numbers[id(value)] = ("c", len(self.cells))
                level.cells.append(position)
                self.cells.append(value)
                self.specs.append((role, role.spec(value)))
            return known
        if role.mutable:
            level.occurrences.append(position)
            known = self.numbers.get(id(value))
            if known is not None:
                return known
        number = len(fresh)
        fresh[number] = (role, mode, position)
        if role.mutable:  # its final number is known when its group is
            self.numbers[id(value)] = ("pending", number)
        return ("pending", number)

    def _leaf(self, level: Level, position: int, value: Any) -> Ref:
        ref: Ref = ("l", len(self.leaves))
        if has_identity(value):
            level.occurrences.append(position)
            known = self.numbers.setdefault(id(value), ref)
            if known != ref:
                return known
            self.boxes.add(ref[1])
        level.leaves.append(position)
        self.leaves.append(value)
        return ref

    def _open(self, level: Level, fresh: dict[int, Any]) -> list[tuple[Record, list[tuple[Any, Mode]]]]:
        groups: dict[Any, list[tuple[int, int, Mode, Any]]] = {}
        for number, (kind, mode, position) in fresh.items():
            node = level.objects[position]
            opened = kind.open(node, mode)
            taken = tuple(opened.modes)
            if kind.mapping is not None:  # static attributes are verified where they are
                taken = tuple(
                    child_mode if role_in(child, child_mode) is not STATIC else None
                    for child, child_mode in zip(opened.values, opened.modes, strict=True)
                )
            groups.setdefault((kind, type(node), opened.keys, taken), []).append((number, position, mode, opened))
        result: list[tuple[Record, list[tuple[Any, Mode]]]] = []
        final: dict[int, Ref] = {}
        for (kind, cls, keys, modes), members in groups.items():
            picked = tuple(index for index, child_mode in enumerate(modes) if child_mode is not None)
            group = Group(kind, keys, picked)
            level.groups.append(group)
            for number, position, mode, opened in members:
                final[number] = ("n", len(self.records))
                record = Record(kind, cls, keys, opened.extra, mode)
                self.records.append(record)
                self.nodes.append(level.objects[position])
                children = list(zip(opened.values, modes, strict=True))
                record.refs = [("s", Frozen(value)) if m is None else ("?", None) for value, m in children]
                group.positions.append(position)
                group.nodes.append(level.objects[position])
                group.statics.append([value for value, m in children if m is None])
                group.extras.append(opened.extra)
                result.append((record, [(opened.values[index], modes[index]) for index in picked]))
        self.final = final
        for key, ref in self.numbers.items():
            if ref[0] == "pending":
                self.numbers[key] = final[ref[1]]
        return result


def survey(roots: Sequence[tuple[Any, Mode]]) -> Survey:
    """Walk everything below `roots`."""
    walk = _Walk()
    objects = list(roots)
    parents: list[tuple[list[Ref], list[int]]] = []  # who wants the references of the level, in order
    root_refs: list[Ref] = [("?", None)] * len(objects)
    parents.append((root_refs, list(range(len(objects)))))
    while objects:
        refs, opened = walk.level(objects)
        refs = [walk.final[ref[1]] if ref[0] == "pending" else ref for ref in refs]
        start = 0
        for target, places in parents:
            for place in places:
                target[place] = refs[start]
                start += 1
        parents = []
        objects = []
        for record, children in opened:
            parents.append((record.refs, [index for index, ref in enumerate(record.refs) if ref[0] == "?"]))
            objects.extend(children)
    graph = Graph(tuple(walk.records), tuple(root_refs), tuple(walk.specs), len(walk.leaves), frozenset(walk.boxes))
    return Survey(graph, walk.cells, walk.leaves, walk.nodes, walk.levels)


class Builder:
    """Builds objects from records: the stand-ins of a trace, or outside what was born inside.

    `resolve` answers every reference that is not a node of `records`; `existing` holds nodes to use as they are.
    """

    def __init__(
        self, records: Sequence[Record], resolve: Callable[[Ref], Any], existing: dict[int, Any] | None = None
    ):
        self.records, self.resolve = records, resolve
        self.nodes: dict[int, Any] = dict(existing or {})
        self.contents: dict[int, list[Any]] = {}

    def ref(self, ref: Ref) -> Any:
        if ref[0] == "s":
            return ref[1].value
        return self.node(ref[1]) if ref[0] == "n" else self.resolve(ref)

    def node(self, number: int) -> Any:
        if number in self.nodes:
            return self.nodes[number]
        record = self.records[number]
        if record.kind.mutable:
            node = self.nodes[number] = record.kind.create(record.cls, record.extra)
            values = self.contents[number] = [self.ref(ref) for ref in record.refs]
            record.kind.fill(node, record.keys, values, record.extra)
        else:
            values = [self.ref(ref) for ref in record.refs]
            node = self.nodes[number] = record.kind.make(record.cls, record.keys, values, record.extra)
        return node


def paths_of(graph: Graph, names: Sequence[str]) -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    """The first path of every cell, leaf and node, from the names of the roots."""
    cells: dict[int, str] = {}
    leaves: dict[int, str] = {}
    nodes: dict[int, str] = {}
    queue: list[tuple[Ref, str]] = list(zip(graph.roots, names, strict=True))
    while queue:
        following: list[tuple[Ref, str]] = []
        for (tag, number), path in queue:
            if tag == "c":
                cells.setdefault(number, path)
            elif tag == "l":
                leaves.setdefault(number, path)
            elif tag == "n" and number not in nodes:
                nodes[number] = path
                record = graph.records[number]
                following += [
                    (ref, path + step(record, key)) for ref, key in zip(record.refs, record.keys, strict=True)
                ]
        queue = following
    return cells, leaves, nodes


def step(record: Record, key: Any) -> str:
    """One step of a path; a namedtuple (optax's states) has names, which rules know."""
    fields = getattr(record.cls, "_fields", None)
    return f".{fields[key]}" if fields and isinstance(key, int) else record.kind.step(key)
