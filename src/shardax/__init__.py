"""shardax: name your axes once; lay out, prove, run and feed JAX programs on any mesh.

The index of public names is `__init__.pyi` beside this file: add a name there. Each is imported when it is first
used, so `import shardax` costs a few milliseconds however much there is.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

from shardax.tables import values_show as _values_show

__version__ = "0.1.0"


@cache
def _index() -> dict[str, str]:
    """Public name → the module it comes from, as the stub says."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(_index())
    module = _index().get(name) if not name.startswith("_") else None
    if module is None:
        from shardax.errors import did_you_mean

        raise AttributeError(f"module 'shardax' has no attribute {name!r}{did_you_mean(name, _index())}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_index()})


def _in_a_notebook(value: object) -> str:
    from shardax.report.html import fragment

    return fragment(value)


def _in_a_terminal(value: object) -> object:
    from shardax.report.text import renderable

    return renderable(value)


_values_show(_in_a_notebook, _in_a_terminal)
