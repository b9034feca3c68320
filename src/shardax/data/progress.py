"""A progress bar for a feed, on request, on the first process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Show = Callable[[int, int | None], None]
"""`show(done, total)`: batches of this epoch; the total of a stream is None."""


class Progress:
    """Tells someone how far the epoch is."""

    def __init__(self, show: Show | None = None) -> None:
        self._show = show

    def show(self, done: int, total: int | None) -> None:
        """So many batches of this epoch were given."""
        if self._show is not None:
            self._show(done, total)

    def close(self) -> None:
        """Leave the screen as it is."""


class RichProgress(Progress):
    """A bar with batches per second."""

    def __init__(self) -> None:
        super().__init__(self._advance)
        self._bar: Any = None
        self._task: Any = None

    def _advance(self, done: int, total: int | None) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._task = self._bar.add_task("feed", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_of(wanted: bool | Show) -> Progress:
    """The progress that was asked for: none, a bar on process 0, or the caller's function."""
    if callable(wanted):
        return Progress(wanted)
    return RichProgress() if wanted and jax.process_index() == 0 else Progress()
