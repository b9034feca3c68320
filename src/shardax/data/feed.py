"""`Feed`: global batches whose rows follow from the mesh and the global step, on any number of processes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardax.data.batches import BatchPlacer
from shardax.data.exchange import job_folder, open_exchange
from shardax.data.feed_source import FeedSource, open_source
from shardax.data.host_batch import BatchWork, Transform
from shardax.data.plan import Policy, is_count
from shardax.data.prefetch import PATIENCE, Prefetcher
from shardax.data.progress import Progress, progress_of
from shardax.data.reading import START, Position
from shardax.data.same_stream import check_same_stream
from shardax.data.split import RowSplit
from shardax.errors import FeedError


class Feed:
    """Iterates over global `jax.Array` batches; each process loads exactly the rows that its devices hold.

    `source` is an array, a tree of arrays and lists (columns), any sequence of records, a Grain `MapDataset`, data
    source or `DataLoader`, or an iterable of records. `layout_or_sharding` says how a batch lies on the mesh: a
    sharding for all leaves, a `PartitionSpec`, a `Layout`, or a tree of shardings.

    One `for` loop runs over `epochs` epochs (None: without end); the next one goes on. What a state holds is the
    place in the stream, not who read it: it can be restored on any number of processes, on any mesh.

    >>> import jax
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("dp",))
    >>> sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    >>> with Feed({"x": np.arange(10)}, sharding, 4, seed=0, policy="pad", shuffle=False) as feed:
    ...     for batch in feed:
    ...         print(batch["x"], batch["mask"].sum())
    [0 1 2 3] 4
    [4 5 6 7] 4
    [8 9 0 1] 2
    """

    def __init__(
        self,
        source: Any,
        layout_or_sharding: Any,
        global_batch: int,
        *,
        seed: int,
        policy: Policy = "drop",
        transform: Transform | None = None,
        prefetch: int = 2,
        epochs: int | None = 1,
        shuffle: bool | None = None,
        host: Collection[str] = (),
        mask: str = "mask",
        batched: bool = False,
        workers: int = 0,
        read_options: Any = None,
        debug: bool = False,
        progress: bool | Callable[[int, int | None], None] = False,
    ) -> None:
        if not is_count(prefetch, 0):
            raise FeedError(
                f"prefetch={prefetch!r} is not a number of batches", remedy="0 reads in the caller's thread"
            )
        on_host = frozenset((host,) if isinstance(host, str) else host)
        self._placer = BatchPlacer(layout_or_sharding)
        self._source: FeedSource = open_source(
            source,
            self._placer.rows,
            global_batch=global_batch,
            policy=policy,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            host=on_host,
            batched=batched,
            workers=workers,
            read_options=read_options,
        )
        self._splits = self._placer.splits(global_batch)
        self._work = BatchWork(self._placer, transform, on_host, mask if policy == "pad" else None)
        self._prefetch, self._debug = prefetch, debug
        self._progress: Progress = progress_of(progress)
        self._members = sorted({process for split in self._splits for process in split.processes})
        self._folder, self._starts = job_folder("feed", self._members), itertools.count()
        self._position = START
        self._agreed, self._agreements = False, itertools.count()
        self._ended = False
        self._running: Generator[tuple[Any, Position]] | Prefetcher[tuple[Any, Position]] | None = None
        self._closing: weakref.finalize[Any, Any] | None = None

    # ---- iteration ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Feed:
        self._ended = False
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._running is None:
            self._start()
        assert self._running is not None
        try:
            batch, position = next(self._running)
        except StopIteration:
            self._stop()
            self._ended = True
            self._position = self._source.after_pass(self._position)
            raise
        except Exception:
            self._stop()  # the position stands before the batch that failed: the next call tries it again
            raise
        except BaseException:
            self._stop(at_once=True)  # Ctrl-C: nobody waits for a slow source now
            raise
        self._position = position
        self._progress.show(position.step - position.epoch_start or self.steps_per_epoch or 0, self.steps_per_epoch)
        return batch

    def __len__(self) -> int:
        """Batches in one epoch."""
        if self.steps_per_epoch is None:
            raise TypeError("a stream does not say how many batches it has")
        return self.steps_per_epoch

    def _start(self) -> None:
        if not self._agreed:
            self._agree()
        folder = f"{self._folder}/{next(self._starts)}"  # what was said before a restart must not be heard after it
        source, work = self._source, self._work
        check = open_exchange(f"{folder}/rows", self._members) if self._debug else None
        items = work.run(source.batches(self._position, open_exchange(f"{folder}/end", self._members)), check)
        self._running = Prefetcher(items, self._prefetch) if self._prefetch else items
        self._closing = weakref.finalize(self, self._running.close)

    def _agree(self) -> None:
        """Before the first batch, and after a restore: seed, sizes, policy and place must be everybody's."""
        place = {key: value for key, value in self.state().items() if key != "source"}  # an iterator's own is its own
        check_same_stream(f"{self._folder}/stream {next(self._agreements)}", self._members, place)
        self._agreed = True

    def _stop(self, at_once: bool = False) -> None:
        if self._closing is not None:
            self._closing.detach()
        if isinstance(self._running, Prefetcher):
            self._running.close(0.0 if at_once else PATIENCE)
        elif self._running is not None:
            self._running.close()
        self._running = self._closing = None

    def close(self) -> None:
        """Stop reading ahead; a feed that is asked again goes on after the last batch it gave."""
        self._stop()
        self._progress.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- place and state ------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Batches given so far, over all epochs."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position.epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in one epoch; None for a stream."""
        return self._source.steps_per_epoch

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows of a full global batch that this process loads: what its host leaves hold."""
        return self._placer.rows(self._splits[0].shape[0])

    @property
    def splits(self) -> tuple[RowSplit, ...]:
        """Who loads which rows: one split for each way in which the leaves' rows are sharded."""
        return tuple(self._splits)

    def state(self) -> dict[str, Any]:
        """The place after the last batch given, as JSON; nothing in it says how many processes there were."""
        return self._source.state(self._position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; one of another stream is an error, and the feed stays where it was."""
        position = self._source.restore(state, self._position)
        if position != self._position:
            self._stop()
            self._position, self._agreed = position, False
        self._ended = False

    def __repr__(self) -> str:
        steps = "a stream" if self.steps_per_epoch is None else f"{self.steps_per_epoch} steps per epoch"
        return f"Feed(global_batch={self._splits[0].shape[0]}, {steps}, global_step={self.global_step})"
