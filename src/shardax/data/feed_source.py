"""`open_source`: anything a feed can be given, as batches with positions."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any, Protocol

from shardax.data.exchange import Exchange
from shardax.data.grain_reading import GrainSource
from shardax.data.plan import EpochPlan, Policy, check_policy, check_seed, check_sizes, is_count
from shardax.data.planned import PlannedSource
from shardax.data.reading import LocalBatch, Position, RowsOf
from shardax.data.sources import RecordSource, readable
from shardax.data.streamed import StreamedSource
from shardax.data.streams import Stream
from shardax.errors import FeedError, Offence


class FeedSource(Protocol):
    """Local batches from a position on, and what a position is in a checkpoint."""

    @property
    def steps_per_epoch(self) -> int | None: ...
    def batches(self, position: Position, exchange: Exchange | None) -> Generator[LocalBatch]: ...
    def after_pass(self, position: Position) -> Position: ...
    def state(self, position: Position) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any], now: Position) -> Position: ...


def open_source(
    source: Any,
    rows_of: RowsOf,
    *,
    global_batch: int,
    policy: Policy,
    seed: int,
    shuffle: bool | None,
    epochs: int | None,
    host: Collection[str],
    batched: bool,
    workers: int,
    read_options: Any,
) -> FeedSource:
    """The way to read `source`: by plan if it has a length, else as a stream."""
    check_policy(policy)
    if epochs is not None and not is_count(epochs, 1):
        raise FeedError(f"epochs={epochs!r} is not a number of epochs", remedy="None goes on without end")
    if not is_count(workers, 0):
        raise FeedError(f"workers={workers!r} is not a number of processes")
    by_number = None if batched else readable(source, host)
    if by_number is not None:
        plan = EpochPlan(by_number.records, global_batch, policy, seed, shuffle is not False)
        if not workers and read_options is None:
            return PlannedSource(by_number, plan, epochs, rows_of)
        if not isinstance(by_number, RecordSource):
            raise FeedError(
                "workers and read_options are for records that must be decoded; columns are read in blocks without them"
            )
        return GrainSource(by_number, plan, epochs, rows_of, workers, read_options)
    _check_stream(shuffle, epochs, workers, read_options)
    check_sizes(("global_batch", global_batch))
    check_seed(seed)
    return StreamedSource(Stream(source, int(global_batch), batched, host), policy, int(seed), rows_of)


def _check_stream(shuffle: bool | None, epochs: int | None, workers: int, read_options: Any) -> None:
    wrong: list[Offence] = []
    if shuffle:
        wrong.append(Offence("shuffle", "a stream has the order that it has"))
    if epochs != 1:
        wrong.append(Offence("epochs", "a stream is one epoch: iterate over the feed again for another"))
    if workers or read_options is not None:
        wrong.append(Offence("workers", "a stream reads itself: give its workers to it"))
    if wrong:
        raise FeedError("this source is a stream", wrong, "give a source with a length to have these")
