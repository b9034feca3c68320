"""What `jit` and `shard_map` make of a function: an object that is copied and pickled as functions are."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Self


class Wrapped:
    """A function with options. What was compiled of it stays behind when it travels.

    >>> import copy, shardax as sx
    >>> double = sx.jit(lambda x: 2 * x)
    >>> copy.deepcopy(double) is double
    True
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], options: Any) -> None:
        mine: Any = self
        functools.update_wrapper(mine, function)
        self._function, self._options = function, options

    def __reduce__(self) -> Any:
        return self._global_name() or (type(self), (self._function, self._options))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        function = copy.deepcopy(self._function, memo)  # of a method: of another instance
        return self if function is self._function else type(self)(function, self._options)

    def _global_name(self) -> str | None:
        """The name by which whoever imports its module finds it; `__main__` is another one elsewhere."""
        name = getattr(self, "__qualname__", None)
        module = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        try:
            return name if name and attrgetter(name)(module) is self else None
        except AttributeError:
            return None
