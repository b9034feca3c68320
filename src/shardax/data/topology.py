"""Where a sharder reads its place among the processes: live, every time, and overridable for tests and simulation."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, overload

import jax

from shardax.errors import SharderError


class LiveNumber(int):
    """An int that also answers like the variable of the original: `value`, `get_value()`, `set_value(n)`."""

    _override: Callable[[int | None], None]

    @property
    def value(self) -> int:
        """The plain number."""
        return int(self)

    @value.setter
    def value(self, number: int) -> None:
        self._override(number)

    def get_value(self) -> int:
        """The plain number."""
        return int(self)

    def set_value(self, number: int | None) -> None:
        """Pretend to be elsewhere; None returns to what JAX says."""
        self._override(number)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # a copy or a pickle is the number, not the way to override it


class LiveField:
    """Reads the jax function of this name whenever it is asked; a number overrides it, None or `del` ends that.

    The overrides of an object stand in its `_overrides`, so that a checkpoint can leave them out.
    """

    def __init__(self, name: str, least: int) -> None:
        self.name, self.least = name, least

    @overload
    def __get__(self, instance: None, owner: type) -> LiveField: ...
    @overload
    def __get__(self, instance: object, owner: type) -> LiveNumber: ...
    def __get__(self, instance: Any, owner: type) -> LiveField | LiveNumber:
        if instance is None:
            return self
        number = LiveNumber(self._read(instance))
        number._override = partial(self.__set__, instance)  # pyright: ignore[reportPrivateUsage]
        return number

    def __set__(self, instance: Any, number: Any) -> None:
        if number is None:
            self.__delete__(instance)
            return
        read = getattr(number, "get_value", None)  # a framework's variable
        given = read() if read is not None else number
        try:
            plain = operator.index(given)
        except TypeError:
            raise SharderError(f"{self.name} cannot be {given!r}: it is a whole number") from None
        if plain < self.least:
            raise SharderError(f"{self.name} cannot be {plain}: it is at least {self.least}")
        instance._overrides[self.name] = plain

    def __delete__(self, instance: Any) -> None:
        instance._overrides.pop(self.name, None)

    def plain(self, instance: Any) -> int:
        """The number as a plain int: what hot paths ask for."""
        if getattr(type(instance), self.name) is not self:  # replaced by a subclass or a test
            return operator.index(getattr(instance, self.name))
        return self._read(instance)

    def _read(self, instance: Any) -> int:
        overridden = instance._overrides.get(self.name)
        return getattr(jax, self.name)() if overridden is None else overridden
