"""Words and groups for ranks: who says what, and who is the odd one out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def show_ranks(ranks: Iterable[int]) -> str:
    """Ranks for people; long runs are shortened.

    >>> show_ranks([2]), show_ranks([0, 1, 3]), show_ranks([*range(64), 70])
    ('rank 2', 'ranks 0, 1, 3', 'ranks 0-63, 70')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"


def group_ranks(values: Mapping[int, Value]) -> list[tuple[Value, list[int]]]:
    """Who holds which value: the largest group first (of two equal ones, the one with the lowest rank).

    >>> group_ranks({0: "a", 1: "b", 2: "a"})
    [('a', [0, 2]), ('b', [1])]
    """
    groups: dict[Value, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))
