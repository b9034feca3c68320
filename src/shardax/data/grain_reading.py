"""`GrainSource`: records in the plan's order, read and decoded by Grain's threads and worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from shardax.data.exchange import Exchange
from shardax.data.plan import BLOCK, EpochPlan
from shardax.data.planned import PlannedSource
from shardax.data.reading import LocalBatch, Position, RowsOf, or_first
from shardax.data.sources import RecordSource


class InOrder:
    """A Grain data source: the records that one process needs, one after another, from a step on.

    The order is the plan's, so a resumed feed opens a new one at its step; Grain's own state is never needed.
    """

    def __init__(self, source: Any, plan: EpochPlan, rows: np.ndarray[Any, Any], first: int, steps: int) -> None:
        self._source, self._plan, self._rows, self._first, self._steps = source, plan, rows, first, steps
        self._block = max(1, BLOCK // len(rows))
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._steps * len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        step, row = divmod(int(index), len(self._rows))
        block, within = divmod(step, self._block)
        number, records = self._held
        if number != block:
            start = block * self._block
            count = min(self._block, self._steps - start)
            records = self._plan.records_of_steps(self._first + start, count, self._rows)[0]
            self._held = (block, records)  # one assignment: threads see an old block or a new one, never a mixture
        record = int(records[within, row])
        return record, self._source[record]


class GrainSource(PlannedSource):
    """As `PlannedSource`, with Grain in between."""

    def __init__(
        self, source: RecordSource, plan: EpochPlan, epochs: int | None, rows_of: RowsOf, workers: int, options: Any
    ) -> None:
        super().__init__(source, plan, epochs, rows_of)
        self.records, self.workers, self.options = source, workers, options

    def batches(self, position: Position, exchange: Exchange | None) -> Generator[LocalBatch]:
        """Epoch by epoch: the full batches through Grain, a smaller last one directly."""
        del exchange
        step, end = position.step, self.end_of_pass(position.step)
        full = self.plan.steps_per_epoch - (self.plan.tail != self.plan.global_batch)
        held = self.rows_of(self.plan.global_batch)
        rows = or_first(held)
        while end is None or step < end:
            within = self.plan.epoch_of(step)[1]
            stream = self._open(InOrder(self.records.source, self.plan, rows, step, full - within))
            for at in range(step, step + full - within):
                numbered = list(itertools.islice(stream, len(rows)))
                records, valid = self.plan.records_at(at, rows)
                columns = self.records.stacked([record for _, record in numbered], [number for number, _ in numbered])
                yield self.local(at, held, records, valid, columns)
            step += full - within
            if full != self.plan.steps_per_epoch:
                yield self.tail(step)
                step += 1

    def _open(self, order: InOrder) -> Iterator[Any]:
        import grain

        dataset = grain.MapDataset.source(order).to_iter_dataset(self.options)
        if self.workers:
            _mark_flags_as_parsed()
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=self.workers))
        return iter(dataset)


def _mark_flags_as_parsed() -> None:
    """Grain's workers read flags of absl, which nobody has parsed in a program that does not begin with `absl.app`."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
