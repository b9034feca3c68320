"""The step that this process is at, as far as it has said: what a guard tells the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Progress:
    """One number, and who wants to know of it."""

    step: int | None = None
    follower: Callable[[str], None] | None = None

    def reach(self, step: int) -> None:
        """This process is now at this step."""
        self.step = step
        if self.follower is not None:
            self.follower(str(self))

    def __str__(self) -> str:
        return "the start" if self.step is None else f"step {self.step}"


PROGRESS = Progress()
"""One process is at one step."""
