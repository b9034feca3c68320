"""What a shell offers while a command is typed: programs and targets. Nothing is imported or run for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def complete_program(incomplete: str) -> Iterator[str]:
    """Python files, then the functions of the one that is named which need no argument.

    >>> list(complete_program("no_such_file.py:"))
    []
    """
    path, separator, begun = incomplete.partition(":")
    if not separator:
        folder = Path(path).parent if not path.endswith("/") else Path(path)
        found = sorted(folder.glob("*.py")) if folder.is_dir() else []
        yield from (f"{name}:" for name in map(str, found) if name.startswith(path))
        return
    for name in _functions(Path(path)):
        if name.startswith(begun):
            yield f"{path}:{name}"


def _functions(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            needed = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
            if needed <= 0 and None not in node.args.kw_defaults:
                yield node.name


def complete_target(incomplete: str) -> list[str]:
    """Targets that begin so: one chip's topologies once the chip is named.

    >>> complete_target("tpu:v6e:2")
    ['tpu:v6e:2x2', 'tpu:v6e:2x4']
    """
    from shardax.proving.chips import chips
    from shardax.proving.target import tpu_shapes

    known = ["cpu:8", "gpu:local:8"]
    for found in chips().values():
        if found.platform == "gpu":
            known += [f"gpu:{found.name}:{count}" for count in ("8", "2x8", "4x8", "8x8")]
        else:
            known += [f"tpu:{found.name}:{'x'.join(map(str, shape))}" for shape in tpu_shapes(found.name)]
    return [text for text in known if text.startswith(incomplete)]
