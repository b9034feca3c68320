"""Shardings given as a prefix of the arguments, resolved to one per cell and array of a structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardax.errors import NoMeshError, Offence, StateShardingError
from shardax.names.mesh import current_mesh
from shardax.state.forms import Form
from shardax.state.graph import Record, Ref
from shardax.state.kinds import ARRAY, STATIC, Kind, role_in

Slot = tuple[str, Any]
"""("c", cell) or ("l", leaf) of a graph; ("b", born cell) or ("v", value) of a recipe."""

_PATHS = 8  # a filter may answer otherwise on another way to the same cell: so many ways are asked


def is_mapping_prefix(prefix: Any) -> bool:
    """Does this say by path and cell what a cell gets: a `StateSharding`, ours or flax's, or an `nnx.prefix`?"""
    return (hasattr(prefix, "map_prefix") and hasattr(prefix, "filters")) or callable(_prefix_function(prefix))


def _prefix_function(prefix: Any) -> Any:
    """The function inside what `nnx.prefix(module, …, graph=True)` returns."""
    return getattr(getattr(prefix, "prefix_fn", None), "value", None)


def is_prefix_leaf(prefix: Any) -> bool:
    """Does a prefix end here?"""
    return prefix is None or isinstance(prefix, (PartitionSpec, Sharding)) or is_mapping_prefix(prefix)


def has(prefix: Any, what: Callable[[Any], bool]) -> bool:
    """Does `what` hold for a leaf of the prefix?"""
    return any(
        what(leaf) for leaf in jax.tree.leaves(prefix, is_leaf=lambda node: is_prefix_leaf(node) or _is_node(node))
    )


def _is_node(value: Any) -> bool:
    role = role_in(value, "auto")
    return isinstance(role, Kind) and role.name == "nnx"


def has_graph_node(prefix: Any) -> bool:
    """Does the prefix hold a module?"""
    return has(prefix, _is_node)


def needs_mesh(prefix: Any) -> bool:
    """Does the prefix name mesh axes without saying of which mesh?"""

    def names_axes(leaf: Any) -> bool:
        if is_mapping_prefix(leaf):
            entries = getattr(leaf, "shardings", None)  # a function has none: it may say anything
            return entries is None or any(has(entry, names_axes) for entry in entries)
        return isinstance(leaf, PartitionSpec)

    return has(prefix, names_axes)


def refuse_odd_entries(prefix: Any, argument: str) -> None:
    """Refuse a StateSharding with an entry that is no sharding."""
    offences: list[Offence] = []
    for mapping in jax.tree.leaves(prefix, is_leaf=lambda node: is_prefix_leaf(node) or _is_node(node)):
        for filter, entry in zip(getattr(mapping, "filters", ()), getattr(mapping, "shardings", ()), strict=True):
            odd = [leaf for leaf in jax.tree.leaves(entry, is_leaf=is_prefix_leaf) if not is_prefix_leaf(leaf)]
            offences += [Offence(repr(filter), f"{leaf!r} ({type(leaf).__name__}) is no sharding") for leaf in odd]
    if offences:
        raise StateShardingError(
            f"{argument} cannot contain `StateSharding` objects of anything but shardings",
            offences,
            "a NamedSharding, a PartitionSpec on the current mesh, or None",
        )


OTHER_TREES = "one for all of an argument, or the same containers with one for each inside"


def odd_leaves(prefix: Any, argument: str, wanted: str) -> list[Offence]:
    """The ends of a prefix that cannot be meant: text, numbers, arrays."""
    return [
        Offence(argument + jax.tree_util.keystr(path), f"{leaf!r} ({type(leaf).__name__}) is no {wanted}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(prefix, is_leaf=is_prefix_leaf)
        if isinstance(leaf, (str, bytes)) or role_in(leaf, "data") is ARRAY
    ]


def other_trees(arguments: Iterable[tuple[str, Any, Any]]) -> list[Offence]:
    """The arguments without state whose prefixes are of other containers."""
    offences: list[Offence] = []
    for name, prefix, tree in arguments:
        try:
            jax.tree.map(lambda _, part: part, prefix, tree, is_leaf=is_prefix_leaf)
        except ValueError:
            there = jax.tree.structure(prefix, is_leaf=is_prefix_leaf)
            offences.append(Offence(name, f"{jax.tree.structure(tree)} is given, against {there}"))
    return offences


def bind(sharding: Any, mesh: Any, argument: str) -> Any:
    """A PartitionSpec on the current mesh; everything else as it is."""
    if not isinstance(sharding, PartitionSpec):
        return sharding
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        raise NoMeshError(
            f"{argument} holds {sharding} and no mesh is set",
            remedy="pass NamedSharding(mesh, spec), or call under `with jax.set_mesh(mesh):`",
        )
    return NamedSharding(mesh, sharding)


def bind_all(prefix: Any, mesh: Any, argument: str) -> Any:
    """Every PartitionSpec of a prefix on the current mesh; a StateSharding for a result without state is nothing."""
    return jax.tree.map(
        lambda leaf: None if is_mapping_prefix(leaf) else bind(leaf, mesh, argument), prefix, is_leaf=is_prefix_leaf
    )


def per_argument(prefix: Any, form: Form, argument: str) -> dict[int, Any]:
    """The prefix of every positional argument that is not static."""
    static = {place for place, _ in form.static}
    places = [place for place in range(form.count) if place not in static]
    if is_prefix_leaf(prefix) or not isinstance(prefix, (tuple, list)):
        return dict.fromkeys(places, prefix)
    if len(prefix) != len(places):
        raise StateShardingError(
            f"{argument} has {len(prefix)} entries for {len(places)} positional arguments that are not static",
            remedy="one entry per argument, or one sharding for all",
        )
    return dict(zip(places, prefix, strict=True))


class Assignment:
    """What a prefix says of every cell and array below the roots of a graph or a recipe."""

    def __init__(self, records: Sequence[Record], cell_at: Callable[[Ref], Any], argument: str) -> None:
        self.records, self.cell_at, self.argument = records, cell_at, argument
        self.found: dict[Slot, tuple[Any, str]] = {}
        self.clashes: list[Offence] = []

    def of(self, slot: Slot) -> Any:
        """The sharding of a slot, or None."""
        return self.found[slot][0] if slot in self.found else None

    def root(self, ref: Ref, prefix: Any, name: str) -> None:
        """Assign everything below one root."""
        self._assign(ref, prefix, (), name, Counter())

    def check(self) -> None:
        """Refuse one cell under two shardings."""
        if self.clashes:
            raise StateShardingError(
                f"Inconsistent aliasing in {self.argument}: one cell is reached under two shardings",
                self.clashes,
                "give both paths the same sharding, or pass the cell once",
            )

    def _assign(self, ref: Ref, prefix: Any, local: Any, name: str, visits: Counter[Any]) -> None:
        tag, number = ref
        visit, most = (tag, number, id(prefix)), _PATHS if is_mapping_prefix(prefix) else 1
        if tag in "ser" or visits[visit] >= most:
            return
        visits[visit] += 1
        if tag != "n":
            try:
                self._put(ref, self._resolve(ref, prefix, local), name)
            except ValueError:  # no filter covers it by this path: its first one stands
                if ref not in self.found:
                    raise
            return
        record, so_far = self.records[number], visits[visit]
        below = self._children(record, prefix, name)
        visits[visit] = most  # below itself a node is not met again
        for key, child, child_prefix in zip(record.keys, record.refs, below, strict=True):
            here = (*local, record.kind.part(record.cls, key))
            self._assign(child, child_prefix, here, name + record.kind.step(key), visits)
        visits[visit] = so_far

    def _children(self, record: Any, prefix: Any, name: str) -> Sequence[Any]:
        if is_prefix_leaf(prefix):
            return [prefix] * len(record.refs)
        role = role_in(prefix, "data")
        if isinstance(role, Kind):
            opened = role.open(prefix, "data")
            entries = dict(zip(opened.keys, opened.values, strict=True))
            if role.name == record.kind.name and set(entries) >= {
                key for key, ref in zip(record.keys, record.refs, strict=True) if ref[0] != "s"
            }:
                return [entries.get(key) for key in record.keys]
        raise StateShardingError(
            f"{self.argument} is not a prefix of the arguments",
            [Offence(name, f"{record.cls.__name__} with {list(record.keys)} against {prefix!r}")],
            "a sharding, a StateSharding, or the same containers with shardings inside",
        )

    def _resolve(self, ref: Ref, prefix: Any, local: tuple[Any, ...]) -> Any:
        role = role_in(prefix, "auto")
        if role is not STATIC and role is not ARRAY and not isinstance(role, Kind):
            prefix = role.get(prefix)  # a module of shardings: the cell of the prefix holds the cell's sharding
        if is_mapping_prefix(prefix):
            ask = _prefix_function(prefix) or prefix.map_prefix
            prefix = ask(local, self.cell_at(ref)) if ref[0] in "cb" else None
        return self.bind(prefix)

    def bind(self, prefix: Any) -> Any:
        """What the end of a prefix means: a sharding, with a PartitionSpec on the current mesh."""
        return bind(prefix, None, self.argument)

    def _put(self, slot: Slot, sharding: Any, name: str) -> None:
        before = self.found.get(slot)
        if before is None:
            self.found[slot] = (sharding, name)
        elif before[0] != sharding:
            self.clashes.append(Offence(f"{before[1]} and {name}", f"{_spec(before[0])} against {_spec(sharding)}"))


def _spec(sharding: Any) -> Any:
    return getattr(sharding, "spec", sharding)
