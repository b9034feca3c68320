"""What `jax.jit` must not forget: an integer of ours in the key of every jit cache."""

from __future__ import annotations

import threading
from typing import Any, final

import jax


@final
class TraceKey:
    """A state that traced functions depend on without seeing it; when it changes, they are traced again.

    A static argument whose hash changes is not enough: jax 0.10 compares an object with itself and finds it equal,
    whatever the hash says. A user context is part of every key. It is made when first needed, since making one
    already has everything traced again that was traced before.

    >>> key, traced = TraceKey(), []
    >>> jitted = jax.jit(lambda x: traced.append(x) or x)
    >>> for state in (1, 2, 2, 1):
    ...     key.set_everywhere(state)
    ...     _ = jitted(0.0)
    >>> len(traced)
    2
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Any = None

    def set_everywhere(self, key: int) -> None:
        """The state of every thread that has not entered its own."""
        with self._lock:
            if self._context is None:
                self._context = jax.make_user_context(key)
            else:
                self._context.set_global(key)

    def enter(self, key: int) -> Any:
        """Set the state of this thread; the result's `__exit__` undoes it."""
        with self._lock:
            if self._context is None:
                self._context = jax.make_user_context(0)
        entered = self._context(key)
        entered.__enter__()
        return entered
