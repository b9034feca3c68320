"""Records one after another: every process reads the same stream and keeps the rows that are its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardax.data.columns import columns_of, is_array
from shardax.data.stack import Stacker, check_records, column_of
from shardax.errors import FeedStateError, Offence, SourceError, plural

Choose: TypeAlias = Callable[[int], NDArray[np.int64]]
"""Records in the batch → the rows to keep."""


def _nothing(count: int) -> NDArray[np.int64]:
    del count
    return np.zeros(0, np.int64)


class Stream:
    """Global batches from an iterable, whose elements are records or (`batched`) whole global batches.

    An iterable that can be iterated again can be sought by reading on from its start; a Grain iterator by its own
    state, in no time.
    """

    def __init__(self, source: Any, global_batch: int, batched: bool, host: Collection[str] = ()) -> None:
        _refuse_sharded_loader(source)
        self.source, self.batch, self.batched, self._host = source, global_batch, batched, host
        self._stacker: Stacker | None = None
        self._iterator: Iterator[Any] | None = None
        self.step = 0
        """The batch that `take` reads next."""
        self._broken: Exception | None = None

    @property
    def once(self) -> bool:
        """Can it only be read once, from front to back?"""
        return hasattr(self.source, "__next__")

    def seek(self, step: int, saved: Any = None) -> None:
        """Stand before a batch: by a saved state of the source's iterator, else by reading up to it."""
        if self._iterator is not None and self._broken is None and self.step == step:
            return
        self.check_seek(step, saved)
        if saved is not None:
            self._iterator = iter(self.source)
            _set_state(self._iterator, saved)
            self.step, self._broken = step, None
            return
        if self._iterator is None or self._broken is not None or step < self.step:
            self._iterator, self.step, self._broken = iter(self.source), 0, None
        while self.step < step:
            if self.take(_nothing)[0] < self.batch:
                raise FeedStateError(
                    f"the stream ended before step {step}", [Offence("source", f"has no batch {self.step}")]
                )

    def check_seek(self, step: int, saved: Any = None) -> None:
        """An error if the stream cannot get there."""
        if not self.once or self._iterator is None or (saved is not None and hasattr(self.source, "set_state")):
            return
        if self._broken is not None or step < self.step:
            broke = [Offence("source", f"it has raised {self._broken!r}")] if self._broken is not None else []
            raise FeedStateError(
                f"cannot go to step {step}: this iterator stands before step {self.step} and only goes forward",
                [Offence("source", f"a {type(self.source).__name__} cannot be iterated again"), *broke],
                "give a fresh iterator to a new feed, or something that can be iterated again",
            )

    def state(self) -> Any:
        """The iterator's own state, if it has one that goes into JSON; else None."""
        get = getattr(self._iterator, "get_state", None)
        state = get() if get is not None else None
        return state.decode() if isinstance(state, bytes) else state

    def take(self, choose: Choose) -> tuple[int, Any]:
        """How many records the next batch has, and as columns those of them that `choose` picks, told how many."""
        if self._iterator is None:
            self.seek(0)
        try:
            count, columns = self._take_batch(choose) if self.batched else self._take_records(choose)
        except Exception as error:
            self._broken = error
            raise
        self.step += count > 0
        return count, columns

    def _take_records(self, choose: Choose) -> tuple[int, Any]:
        records = list(itertools.islice(cast("Iterator[Any]", self._iterator), self.batch))
        if not records:
            return 0, None
        first = self.step * self.batch
        check_records(records, lambda n: f"record {first + n}")
        if self._stacker is None:
            self._stacker = Stacker(records[0], self._host)
        mine: list[int] = choose(len(records)).tolist()
        if not mine:
            return len(records), None
        return len(records), self._stacker.stack([records[row] for row in mine], lambda n: f"record {first + mine[n]}")

    def _take_batch(self, choose: Choose) -> tuple[int, Any]:
        batch = next(cast("Iterator[Any]", self._iterator), _END)
        if batch is _END:
            return 0, None
        columns = columns_of(batch)
        misfits = columns.misfits()
        count = cast("int", columns.lengths[0]) if columns.lengths and not misfits else 0
        if misfits or count > self.batch or count == 0:
            raise SourceError(
                f"batch {self.step} of the stream is no global batch of {self.batch} rows",
                misfits or [Offence("", f"it has {plural(count, 'row')}")],
                "with batched=True every element is one global batch; otherwise every element is one record",
            )
        rows = choose(count)
        paths = zip(columns.paths, columns.values, strict=True)
        # A list is looked through whole: what it becomes must not depend on the rows that this process keeps.
        arrays = (np.asarray(v) if is_array(v) else column_of(list(v), path in self._host) for path, v in paths)
        return count, columns.rebuilt(array[rows] for array in arrays)


_END = object()


AN_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _set_state(iterator: Any, saved: Any) -> None:
    """Give an iterator its saved state, in the form that it has itself."""
    if not hasattr(iterator, "set_state"):
        problem = f"the state has one of an iterator's own, and a {type(iterator).__name__} takes none"
        raise FeedStateError("this state belongs to another stream of batches", [Offence("source", problem)])
    now = iterator.get_state()
    try:
        iterator.set_state(_readdressed(saved, now.decode()).encode() if isinstance(now, bytes) else saved)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(iterator).__name__} does not take it: {error!r}"
        raise FeedStateError("this state belongs to another stream of batches", [Offence("source", problem)]) from error


def _readdressed(saved: str, now: str) -> str:
    """Grain compares the text of data sources: one that shows its memory address is another one in every run."""
    with suppress(ValueError):
        then, here = json.loads(saved), json.loads(now)
        if isinstance(then, dict) and isinstance(here, dict):
            same = {
                key: here[key]
                for key, text in cast("dict[str, Any]", then).items()
                if isinstance(text, str) and AN_ADDRESS.sub("", text) == AN_ADDRESS.sub("", str(here.get(key)))
            }
            return json.dumps({**then, **same})
    return saved


def _refuse_sharded_loader(source: Any) -> None:
    """A Grain DataLoader that already gives every process other records would be cut twice."""
    options = getattr(source, "_shard_options", None)
    if getattr(options, "shard_count", 1) > 1:
        raise SourceError(
            f"this {type(source).__name__} already shards by process: {options}",
            remedy="build it with grain.sharding.NoSharding(): the feed picks each process's rows from the mesh",
        )
