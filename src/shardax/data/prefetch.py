"""`Prefetcher`: runs an iterator ahead in a thread that sees the caller's mesh."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from shardax._compat import context_manager_mesh
from shardax.data.assemble import device_dtype

Item = TypeVar("Item")

PATIENCE = 10.0
"""Seconds that closing, and the program's end, wait for a thread that is inside the user's source."""


def captured_mesh() -> Callable[[], AbstractContextManager[Any]]:
    """A way to enter the mesh that is in force here in another thread: JAX keeps it per thread."""
    concrete = jax.sharding.get_mesh()
    if not concrete.empty:
        return partial(jax.set_mesh, concrete)
    entered = context_manager_mesh()
    return (lambda: entered) if not entered.empty else nullcontext


def captured_context() -> Callable[[], AbstractContextManager[Any]]:
    """The same for the mesh and the width of numbers: `with jax.enable_x64(True):` holds per thread, too."""
    mesh, wide = captured_mesh(), device_dtype(np.int64) == np.int64

    @contextmanager
    def enter() -> Generator[None]:
        with mesh(), jax.enable_x64(wide):
            yield

    return enter


class Prefetcher(Generic[Item]):
    """At most `depth` items ahead of the consumer; an exception arrives in order, as the last item.

    >>> ahead = Prefetcher((n for n in range(3)), depth=2)
    >>> list(ahead)
    [0, 1, 2]
    """

    def __init__(self, items: Generator[Item], depth: int) -> None:
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, args=(items, depth, captured_context()), name="shardax feed", daemon=True
        )
        self._thread.start()

    def _run(self, items: Generator[Item], depth: int, context: Callable[[], AbstractContextManager[Any]]) -> None:
        ended: BaseException = StopIteration()
        try:
            with context(), closing(items):
                while self._wait_for_room(depth):
                    self._offer(next(items))
        except BaseException as error:  # noqa: BLE001 — whatever it is, the consumer gets it
            ended = error
        with self._changed:
            self._ended = ended
            self._changed.notify_all()

    def _wait_for_room(self, depth: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < depth)
            return not self._closed

    def _offer(self, item: Item) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended is not None or self._closed)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            raise self._ended if self._ended is not None else StopIteration

    def close(self, patience: float = PATIENCE) -> None:
        """Stop the thread and forget what it had ready; any number of times."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(patience)
