"""The small GPT of `examples/gpt.py`: beside the package in a checkout, inside it where a wheel is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shardax.errors import CommandError, Offence

NEEDED = {"flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint"}
NAME = "gpt"


def place() -> Path:
    """The file of the example."""
    here = Path(__file__).parent
    inside, beside = here / "examples", here.parents[2] / "examples"
    found = next((folder for folder in (inside, beside) if (folder / f"{NAME}.py").is_file()), None)
    if found is None:
        looked = [Offence(str(folder), f"has no {NAME}.py") for folder in (inside, beside)]
        raise CommandError("the example of the demo is not here", looked, "install shardax again, or use a checkout")
    return found / f"{NAME}.py"


def require() -> None:
    """Everything that the example imports, or one error that names what is missing."""
    absent = [Offence(name, "not installed") for module, name in NEEDED.items() if not _is_there(module)]
    if absent:
        raise CommandError("the demo trains a Flax model", absent, 'pip install "shardax[demo]"')


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def load() -> ModuleType:
    """The example as a module."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, place())
        assert spec is not None and spec.loader is not None
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]
