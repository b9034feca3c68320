"""The progress of a training: a bar, the step, and the loss; a run that begins in the middle shows where it began."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text


class _Mark(SpinnerColumn):
    """A spinner while it runs, then how it ended."""

    def render(self, task: Task) -> RenderableType:
        ended = task.stop_time is not None and not task.finished
        return Text("✗", "red") if ended else super().render(task)


class _Loss(ProgressColumn):
    """The step and the loss; that it is compiling, before the first step."""

    def render(self, task: Task) -> Text:
        loss = task.fields.get("loss")
        if loss is None:
            return Text("starting, compiling …", "dim")
        return Text(f"step {task.completed:>3.0f}  loss {loss:.4f}")


class TrainingBar(Progress):
    """A bar for every run of one training."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (_Mark(finished_text="[green]✓[/green]"), TextColumn("{task.description:15}"), BarColumn(24), _Loss())
        super().__init__(*columns, console=console, auto_refresh=console.is_terminal)
        self._steps = steps
        self._run = TaskID(0)

    def begin(self, words: str) -> None:
        """A run begins."""
        self._run = self.add_task(words, total=self._steps, loss=None)

    def reach(self, step: int, loss: float) -> None:
        """It has done this step."""
        self.update(self._run, completed=step, loss=loss)

    def end(self) -> None:
        """It goes no further."""
        self.stop_task(self._run)
