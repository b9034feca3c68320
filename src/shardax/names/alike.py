"""Leaves that are alike (layer after layer of one model), taken together: the same a hundred times is said once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Leaf = TypeVar("Leaf")
NUMBER = re.compile(r"(?:(?<=[/._\[])|^)\d+(?=[/.\]]|$)")  # blocks/3/w1, layer_3/w1, ['blocks'][3]['w1']: not w1's


def alike(
    leaves: Iterable[Leaf], path: Callable[[Leaf], str], look: Callable[[Leaf], Hashable]
) -> dict[str, list[Leaf]]:
    """Leaves by a path that all of a group share, `*` where they differ; alike are those of one look, too.

    >>> alike(["a/0/w", "a/1/w", "a/0/b"], lambda path: path, lambda path: path[-1])
    {'a/*/w': ['a/0/w', 'a/1/w'], 'a/0/b': ['a/0/b']}
    """
    groups: dict[tuple[str, Hashable], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault((NUMBER.sub("*", path(leaf)), look(leaf)), []).append(leaf)
    named: dict[str, list[Leaf]] = {}
    for found in groups.values():
        name = _shared([path(leaf) for leaf in found])
        while name in named:  # of another look, such as layers of two widths
            name += "′"
        named[name] = found
    return named


def _shared(paths: list[str]) -> str:
    """The path of a group: a number that differs is starred."""
    columns = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in columns)
