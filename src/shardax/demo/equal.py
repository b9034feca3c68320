"""Are the losses of a job that was killed and resumed those of a run that nothing disturbed?"""

from __future__ import annotations

from dataclasses import dataclass

from shardax.demo.job import Losses, Run

SAME = 1e-5  # between one process and two the sums run in another order: the last digit of a float32 may differ


@dataclass(frozen=True)
class Equality:
    """What was compared, and how it came out."""

    steps: int
    fell_to: float  # the last loss, of the first one
    largest: float  # difference to the undisturbed run
    repeated: int  # steps that were done twice, before the kill and after the resume
    unequal: int  # of those, the ones that gave another loss

    @property
    def ok(self) -> bool:
        """Did the loss fall, and is nothing different?"""
        return self.fell_to < 0.9 and self.largest <= SAME and self.repeated > 0 and not self.unequal

    @property
    def words(self) -> str:
        """The verdict in two lines."""
        twice = "bit for bit" if not self.unequal else f"NOT: {self.unequal} differ"
        whole = "equal" if self.largest <= SAME else "NOT equal"
        return (
            f"steps done twice, before the kill and after the resume: {self.repeated}, equal {twice}\n"
            f"all {self.steps} losses {whole} to the undisturbed run's: largest difference {self.largest:.0e}"
        )


def compare(alone: Losses, lives: tuple[Run, Run]) -> Equality:
    """The undisturbed run against the two lives of the job.

    >>> once = {1: 5.0, 2: 4.0, 3: 3.0}
    >>> found = compare(once, (Run({1: 5.0, 2: 4.0}, 137), Run({2: 4.0, 3: 3.0}, 0)))
    >>> found.ok, found.repeated, found.largest
    (True, 1, 0.0)
    >>> compare(once, (Run({1: 5.0, 2: 4.0}, 137), Run({2: 4.5, 3: 3.0}, 0))).ok
    False
    """
    before, after = (life.losses for life in lives)
    job = before | after
    twice = [step for step in after if step in before]
    steps = sorted(alone)
    missing = float("inf")
    return Equality(
        steps=len(steps),
        fell_to=alone[steps[-1]] / alone[steps[0]],
        largest=max(abs(job.get(step, missing) - alone[step]) for step in steps),
        repeated=len(twice),
        unequal=sum(before[step] != after[step] for step in twice),
    )
