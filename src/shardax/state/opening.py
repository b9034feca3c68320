"""Opens groups of nodes in C-speed loops: the children of all of them, or None where one is not as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from shardax.state.graph import Group
from shardax.state.kinds import DICT, same
from shardax.state.sharing import Pick, everything, picker

_flat = chain.from_iterable
_dict_values = dict.values
Open = Callable[[Sequence[Any]], Sequence[Any] | None]
"""From the objects of a level, the children of one group of nodes; None where a node is not as it was."""


def opener(group: Group, size: int) -> Open:
    """Opens the nodes of one group among the `size` objects of their level."""
    kind = group.kind
    pick = picker(group.positions, size) or everything
    if kind.mapping is not None:
        return _of_mappings(group, pick)
    if kind is DICT:
        return _of_dicts(group.keys * len(group.nodes), pick)
    if kind.sequence:
        return _of_sequences([len(group.keys)] * len(group.nodes), pick)
    return _by_opening(group, pick)


def _of_mappings(group: Group, pick: Pick) -> Open:
    kind, mapping = group.kind, group.kind.mapping
    assert mapping is not None
    lengths = [len(group.keys) + len(kind.ignored)] * len(group.nodes)
    order = list(group.keys) * len(group.nodes) if kind.rank is None else None
    fixed, moving = map(values_of, keys_of(group))
    statics = [value for values in group.statics for value in values]
    guards = [(itemgetter(name), [mapping(node)[name] for node in group.nodes]) for name in kind.guarded]

    def open(objects: Sequence[Any]) -> Sequence[Any] | None:
        held = list(map(mapping, pick(objects)))
        if list(map(len, held)) != lengths or (order is not None and list(_flat(held)) != order):
            return None
        if statics and not all(map(is_, _flat(map(fixed, held)), statics)):
            return None
        for guard, values in guards:
            if list(map(guard, held)) != values:
                return None
        return list(_flat(map(moving, held)))

    return open


def keys_of(group: Group) -> tuple[list[Any], list[Any]]:
    """The keys of static children, and of those that go on to the next level."""
    taken = set(group.taken)
    fixed = [key for index, key in enumerate(group.keys) if index not in taken]
    return fixed, [group.keys[index] for index in group.taken]


def values_of(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
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
