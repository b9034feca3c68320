"""A value that is in force: entered in a context, or the last one made; and part of the key of every jit cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, final

from shardax.errors import NoManagerError
from shardax.names.trace_key import TraceKey

T = TypeVar("T")


@final
class Ambient(Generic[T]):
    """The innermost value entered in this context (thread or task), and the last one made anywhere.

    A function that `jax.jit` traced under one value must not be reused under another. So the key of the value (an
    integer) is part of the key of jit: of the one entered always, of the last one made once that has been asked for.

    >>> ambient = Ambient[str]("greeting")
    >>> ambient.enter("hello", 1), ambient.current(), ambient.leave("hello"), ambient.current()
    (None, 'hello', None, None)
    """

    def __init__(self, name: str) -> None:
        self._entered: ContextVar[tuple[tuple[T, int], ...]] = ContextVar(name, default=())
        self._traced_under = TraceKey()
        self._thread = _Thread()
        self._last: T | None = None
        self._last_was_asked_for = False

    def current(self) -> T | None:
        """The innermost value entered in this context, or None."""
        entered = self._entered.get()
        return entered[-1][0] if entered else None

    def last(self) -> T | None:
        """The last value made in this process, or None."""
        self._last_was_asked_for = True
        return self._last

    def made(self, value: T, key: int) -> None:
        """Remember the last value, and no other."""
        self._last = value
        if self._last_was_asked_for:
            self._traced_under.set_everywhere(key)

    def enter(self, value: T, key: int) -> None:
        """Put a value in force, inside those already entered."""
        self._entered.set((*self._entered.get(), (value, key)))
        self._thread.entered.append((value, key))
        self._publish()

    def leave(self, value: T) -> None:
        """Take the value out of force, once."""
        if not any(other is value for other, _ in self._entered.get()):
            raise NoManagerError(f"{value!r} is left in a context where it was not entered")
        self._entered.set(tuple(_without_last(self._entered.get(), value)))
        self._thread.entered = _without_last(self._thread.entered, value)
        self._publish()

    def _publish(self) -> None:
        """Tell JAX, which keeps the keys of jit per thread, what is in force in this one."""
        if self._thread.entered:
            context = self._traced_under.enter(self._thread.entered[-1][1])
            self._thread.outermost = self._thread.outermost or context
        elif self._thread.outermost:
            # Tasks may leave in another order than they entered: what leads back is the first context, not the last.
            self._thread.outermost.__exit__(None, None, None)
            self._thread.outermost = None


class _Thread(threading.local):
    """What is entered in one thread, over all its tasks, and the way back to the key of jit without any of it."""

    def __init__(self) -> None:
        self.entered: list[tuple[Any, int]] = []
        self.outermost: Any = None


def _without_last(entered: Sequence[tuple[Any, int]], value: Any) -> list[tuple[Any, int]]:
    places = [place for place, (other, _) in enumerate(entered) if other is value]
    return [pair for place, pair in enumerate(entered) if place not in places[-1:]]
