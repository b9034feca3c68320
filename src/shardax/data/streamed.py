"""`StreamedSource`: a stream that every process reads and keeps its own rows of."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.data.exchange import Exchange
from shardax.data.plan import Policy, check_policy, plain_state, read_state
from shardax.data.reading import BatchRows, LocalBatch, Position, RowsOf, or_first
from shardax.data.streams import Stream
from shardax.errors import FeedError, FeedStateError, Offence, SourceEndedError


class StreamedSource:
    """This process's rows of one batch after another, until the stream ends; that is one epoch."""

    steps_per_epoch = None

    def __init__(self, stream: Stream, policy: Policy, seed: int, rows_of: RowsOf) -> None:
        check_policy(policy)
        if policy == "wrap":
            raise FeedError(
                "policy 'wrap' needs the first records again, and a stream does not keep them",
                remedy="use 'drop', 'pad' or 'keep', or a source with a length",
            )
        self.stream, self.policy, self.seed, self.rows_of = stream, policy, seed, rows_of

    def batches(self, position: Position, exchange: Exchange | None) -> Generator[LocalBatch]:
        """From a position to the end; with several processes every batch is compared, so that all end together."""
        self.stream.seek(position.step - position.epoch_start, position.resume)
        step, full = position.step, self.stream.batch
        while True:
            count, columns = self.stream.take(self._choose)
            if exchange is not None:
                _all_got_the_same(exchange, step, count)
            if count == 0 or (count < full and self.policy == "drop"):
                return
            size = count if self.policy == "keep" else full
            held = self.rows_of(size)
            rows = or_first(held)
            after = Position(step + 1, position.epoch, position.epoch_start, self.stream.state())
            yield LocalBatch(
                BatchRows(step, position.epoch, size, rows, rows < count, None, self.seed), columns, held, after
            )
            step += 1

    def _choose(self, count: int) -> NDArray[np.int64]:
        rows = or_first(self.rows_of(count if self.policy == "keep" else self.stream.batch))
        return rows % count if self.policy == "pad" else rows[rows < count]

    def after_pass(self, position: Position) -> Position:
        """The stream from its start, as the next epoch."""
        return Position(position.step, position.epoch + 1, position.step)

    def state(self, position: Position) -> dict[str, Any]:
        """The position as JSON; `source` is the iterator's own state where it has one."""
        state = {
            "seed": self.seed,
            "epoch": position.epoch,
            "global_step": position.step,
            "policy": self.policy,
            "records": None,
            "global_batch": self.stream.batch,
            "shuffle": False,
            "epoch_start": position.epoch_start,
        }
        return state if position.resume is None else {**state, "source": position.resume}

    def restore(self, state: Mapping[str, Any], now: Position) -> Position:
        """The position of a state; a stream that cannot go there is an error, before it has moved."""
        state = plain_state(state)
        step = read_state(state, self.state(now), None)
        start, epoch = state.get("epoch_start", 0), state["epoch"]
        if not isinstance(start, int) or not isinstance(epoch, int) or not 0 <= start <= step:
            raise FeedStateError("this is not a feed's state", [Offence("epoch_start", f"{start!r} for step {step}")])
        there = Position(step, epoch, start, state.get("source"))
        if there != now:
            self.stream.check_seek(step - start, there.resume)
        return there


def _all_got_the_same(exchange: Exchange, step: int, count: int) -> None:
    said: dict[int, int] = exchange.ask(count, f"the records of step {step}")
    if len(set(said.values())) > 1:
        most = max(said.values())
        raise SourceEndedError(
            f"the stream ended at step {step} on some processes and went on in others",
            [Offence(f"process {rank}", f"got {got} records of {most}") for rank, got in sorted(said.items())],
            "every process must iterate over the same records; give a source with a length if they cannot",
        )
