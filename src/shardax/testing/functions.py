"""A function as a value that another process can find: its file, its module's name, its qualified name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class FunctionAddress:
    """Where a function is written. Made by `address_of`, followed by `load`."""

    file: str
    module: str
    name: str

    def load(self) -> Callable[..., Any]:
        """The function, its module executed once per process (with pytest's rewritten asserts where pytest is)."""
        found: Any = sys.modules.get(self.module) or _execute(self.module, Path(self.file))
        for part in self.name.split("."):
            found = getattr(found() if inspect.isclass(found) else found, part)
        return found


def address_of(function: Callable[..., Any]) -> FunctionAddress:
    """The address of a function that is written at the top of a module (or is a method of a class there).

    >>> address_of(address_of).name
    'address_of'
    >>> address_of(lambda: 1)
    Traceback (most recent call last):
    ...
    ValueError: '<lambda>' cannot run in other processes: they find a function by its name at the top of its file
    """
    name = function.__qualname__
    if "<" in name:
        raise ValueError(
            f"{name!r} cannot run in other processes: they find a function by its name at the top of its file"
        )
    return FunctionAddress(inspect.getfile(inspect.unwrap(function)), function.__module__, name)


def _execute(name: str, path: Path) -> ModuleType:
    if not path.name.startswith("test_") and _origin(name) == str(path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile(_tree(path), str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _tree(path: Path) -> ast.Module:
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    if importlib.util.find_spec("pytest"):
        from _pytest.assertion.rewrite import rewrite_asserts  # a failing assert shows its values here too

        rewrite_asserts(tree, source, str(path))
    return tree


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return None
    return spec.origin if spec else None
