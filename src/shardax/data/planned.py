"""`PlannedSource`: a source with random access, read in the order of an epoch plan."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.data.exchange import Exchange
from shardax.data.plan import EpochPlan
from shardax.data.reading import BatchRows, LocalBatch, Position, RowsOf, or_first
from shardax.data.sources import Readable


class PlannedSource:
    """This process's rows of one batch after another; a pass is `epochs` epochs, or without end."""

    def __init__(self, source: Readable, plan: EpochPlan, epochs: int | None, rows_of: RowsOf) -> None:
        self.source, self.plan, self.epochs, self.rows_of = source, plan, epochs, rows_of

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def batches(self, position: Position, exchange: Exchange | None) -> Generator[LocalBatch]:
        """From a position to the end of its pass."""
        del exchange  # the plan is the same everywhere: there is nothing to ask
        step, end = position.step, self.end_of_pass(position.step)
        full = self.plan.global_batch
        while end is None or step < end:
            if self.plan.size(step) != full:
                yield self.tail(step)
                step += 1
                continue
            held = self.rows_of(full)
            for at, records, valid in self.plan.blocks(step, or_first(held)):
                if end is not None and at >= end:
                    return
                yield self._local(at, held, records, valid)
                step = at + 1

    def tail(self, step: int) -> LocalBatch:
        """A smaller last batch."""
        held = self.rows_of(self.plan.size(step))
        return self._local(step, held, *self.plan.records_at(step, or_first(held)))

    def end_of_pass(self, step: int) -> int | None:
        """The step where the pass of this step ends."""
        if self.epochs is None:
            return None
        steps = self.epochs * self.plan.steps_per_epoch
        return (step // steps + 1) * steps

    def _local(
        self, step: int, held: NDArray[np.int64], records: NDArray[np.int64], valid: NDArray[np.bool_]
    ) -> LocalBatch:
        return self.local(step, held, records, valid, self.source.read(records))

    def local(
        self, step: int, held: NDArray[np.int64], records: NDArray[np.int64], valid: NDArray[np.bool_], columns: Any
    ) -> LocalBatch:
        """Columns that were read, with what they are."""
        epoch, size = self.plan.epoch_of(step)[0], self.plan.size(step)
        about = BatchRows(step, epoch, size, or_first(held), valid, records, self.plan.seed)
        return LocalBatch(about, columns, held, self._at(step + 1))

    def _at(self, step: int) -> Position:
        epoch, within = self.plan.epoch_of(step)
        return Position(step, epoch, step - within)

    def after_pass(self, position: Position) -> Position:
        """Where the next pass begins."""
        return position

    def state(self, position: Position) -> dict[str, Any]:
        """The position as JSON."""
        return self.plan.state(position.step)

    def restore(self, state: Mapping[str, Any], now: Position) -> Position:
        """The position of a state, or an error."""
        del now
        return self._at(self.plan.step_of(state))
