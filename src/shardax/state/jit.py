"""`shardax.jit`: `jax.jit` for functions whose arguments, closures and results hold cells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from shardax.state.forms import chosen
from shardax.state.lift import Gathered, Lift, Options
from shardax.state.lifted import Lifted


class JitWrapped:
    """A function wrapped by `jit`."""

    def __init__(
        self, function: Callable[..., Any], *, static_argnums: Any = None, static_argnames: Any = None
    ) -> None:
        functools.update_wrapper(self, function)
        options = Options(
            getattr(function, "__name__", "jit"), chosen(function, "static", static_argnums, static_argnames)
        )
        self._lift = Lift(function, options, self._compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._lift(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _compile(self, lifted: Lifted, gathered: Gathered) -> Callable[..., Any]:
        return jax.jit(lifted.run)


def jit(function: Callable[..., Any], **options: Any) -> JitWrapped:
    """Compile a function that may read and write cells."""
    return JitWrapped(function, **options)
