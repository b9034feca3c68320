"""`MODULE:FN`: from what is written on the command line to the `Case` that it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardax.cli.files import require_file
from shardax.errors import CommandError, Offence, did_you_mean
from shardax.proving.case import Case
from shardax.proving.compiling import quiet_start

DEFAULT = "case"


@dataclass(frozen=True)
class Program:
    """A module, by its dotted name or its file, and a function in it that returns a `Case`."""

    module: str
    function: str = DEFAULT

    @classmethod
    def of(cls, text: str) -> Program:
        """The two parts of `MODULE:FN`; the function is `case` where none is named.

        >>> Program.of("train.py:small"), Program.of("package.train")
        (Program(module='train.py', function='small'), Program(module='package.train', function='case'))
        """
        module, separator, function = text.rpartition(":")
        if not (module if separator else text):
            raise CommandError(f"{text!r} names no module", remedy="write MODULE:FN, like train.py:case")
        return cls(module, function or DEFAULT) if separator else cls(text)

    @property
    def is_file(self) -> bool:
        """Is the module given by its file?"""
        return self.module.endswith(".py") or "/" in self.module or self.module.startswith(".")

    def below(self, folder: Path) -> Program:
        """The same program, with a file that is relative to a folder."""
        return Program(str(folder / self.module), self.function) if self.is_file else self

    def seen_from(self, folder: Path) -> Program:
        """The inverse: a file as a path from that folder, so that a lock beside it means the same everywhere."""
        if not self.is_file:
            return self
        return Program(Path(os.path.relpath(self.module, folder)).as_posix(), self.function)

    def load(self) -> Case:
        """Import the module, call the function, look at what it returns; what it prints goes to standard error."""
        with quiet_start(), _no_exit(self.module), redirect_stdout(sys.stderr):
            module = _import_file(Path(self.module)) if self.is_file else _import(self.module)
            found = self._find(module)
            made = found if isinstance(found, Case) else self._call(found)
        if not isinstance(made, Case):
            raise CommandError(
                f"{self} gives {type(made).__name__}, not a Case", remedy="return sx.Case(step, args, rules)"
            )
        return made

    def _find(self, module: ModuleType) -> Any:
        found: Any = module
        for name in self.function.split("."):
            if not hasattr(found, name):
                able = [name for name, _ in candidates(module)]
                listed = f"it has {', '.join(able[:8])}" if able else "it has no function without arguments"
                raise CommandError(
                    f"{self.module} has no {self.function!r}{did_you_mean(self.function, able)}",
                    [Offence(self.module, listed)],
                    "a function that returns sx.Case(step, args, rules)",
                )
            found = getattr(found, name)
        return found

    def _call(self, found: Any) -> Any:
        if not callable(found):
            return found
        if inspect.iscoroutinefunction(found):
            raise CommandError(f"{self} is async", remedy="a plain function returns the Case")
        needed = [parameter.name for parameter in _required(found)]
        if needed:
            raise CommandError(
                f"{self} needs arguments: {', '.join(needed)}", remedy="give them defaults, or wrap it in a function"
            )
        return found()

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


@contextmanager
def _no_exit(module: str) -> Generator[None]:
    """A script that ends the process when it is imported is no module."""
    try:
        yield
    except SystemExit as error:
        raise CommandError(
            f"{module} exits when it is imported (code {error.code})",
            remedy='keep what runs below `if __name__ == "__main__":`',
        ) from None


def load(text: str) -> Case:
    """The case that `MODULE:FN` names."""
    return Program.of(text).load()


def candidates(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions of a module that can be called without arguments, in the order they are written."""
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if own and not list(_required(value)):
            yield name, value


def _required(function: Any) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            yield parameter


def _import(name: str) -> ModuleType:
    """A module by its name, found from here as by `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        near = [str(path) for path in sorted(Path().glob("*.py"))]
        raise CommandError(
            f"there is no module {name!r}{did_you_mean(f'{name}.py', near)}",
            remedy="a module is found from here or among the installed packages; a file is named with its .py",
        ) from None


def _import_file(path: Path) -> ModuleType:
    """A file as a module: beside it are the modules that it imports, as when it is run."""
    require_file(path)
    place = path.resolve()
    if str(place.parent) not in sys.path:
        sys.path.insert(0, str(place.parent))
    known = sys.modules.get(place.stem)
    if known is not None and getattr(known, "__file__", None) == str(place):
        return known
    name = place.stem if known is None else f"{place.stem}_of_{place.parent.name}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
