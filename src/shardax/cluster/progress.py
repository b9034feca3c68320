"""The step that this process is at, as far as it has said: what a guard tells the others."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsIndex

from shardax.errors import ClusterError


def whole_step(step: object) -> int:
    """A step as an int; JAX takes -1 for a step at which all have stopped.

    >>> whole_step(3)
    3
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ClusterError(f"{step!r} is no step", remedy="steps are whole numbers that grow from 0")
    return number


@dataclass(eq=False)
class Progress:
    """One number, and who wants to know of it."""

    step: int | None = None
    follower: Callable[[str], None] | None = None

    def reach(self, step: SupportsIndex) -> None:
        """This process is now at this step."""
        self.step = whole_step(step)
        if self.follower is not None:
            self.follower(str(self))

    def __str__(self) -> str:
        return "the start" if self.step is None else f"step {self.step}"


PROGRESS = Progress()
"""One process is at one step."""
