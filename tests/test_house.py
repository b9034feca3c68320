"""The house stands: imports go down only, no cycles, one public name once, no stray prints, small modules."""

import ast
import re
import subprocess
import sys
from collections import Counter
from inspect import getdoc
from pathlib import Path
from types import FunctionType

import pytest

import shardax as sx

PACKAGE = Path(__file__).parent.parent / "src" / "shardax"

# A room may import what stands before it, never after it.
ROOMS = ["errors", "tables", "_compat", "names", "arrays", "state", "cluster", "data", "proving", "report"]
FRONT_DOORS = ["testing", "pytest_plugin", "demo", "cli", "__main__", "__init__"]
ORDER = {name: place for place, name in enumerate(ROOMS)} | {name: len(ROOMS) for name in FRONT_DOORS}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(["shardax", *(part for part in parts if part != "__init__")])


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


MODULES = {module_name(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Every shardax module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "shardax"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardax":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return found


GRAPH = {name: imports_of(path) for name, path in MODULES.items()}


def test_every_file_stands_in_a_known_room():
    assert {room_of(name) for name in MODULES} <= set(ORDER)


def test_imports_go_down_only():
    upward = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if ORDER[room_of(other)] > ORDER[room_of(name)]
    ]
    assert not upward, "\n".join(upward)


def test_no_import_cycles():
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, " -> ".join([*trail, name])
        state[name] = 1
        for other in sorted(GRAPH.get(name, ())):
            if other in MODULES and other != name:
                visit(other, (*trail, name))
        state[name] = 2

    for name in MODULES:
        if name != "shardax":
            visit(name, ())


def test_rooms_export_nothing():
    for room in ROOMS:
        init = PACKAGE / room / "__init__.py"
        if init.exists():
            assert not [n for n in ast.parse(init.read_text()).body if not isinstance(n, ast.Expr)], init


def test_public_names_are_listed_once_and_all_load():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    names = [
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert not [name for name, count in Counter(names).items() if count > 1]
    rooms = {path.stem for path in FILES if path.parent == PACKAGE} | {
        path.name for path in PACKAGE.iterdir() if path.is_dir()
    }
    assert not set(names) & rooms, "a public name shadows a module"
    assert sx.__all__ == sorted(names) and set(names) <= set(dir(sx))
    assert not [name for name in names if getattr(sx, name).__doc__ is None and callable(getattr(sx, name))]


def test_every_public_function_shows_an_example():
    functions = [name for name in sx.__all__ if isinstance(getattr(sx, name), FunctionType)]
    shown = [name for name in functions if re.search(r"^    ?\S|>>> ", getdoc(getattr(sx, name)) or "", re.MULTILINE)]
    assert len(functions) > 60 and set(functions) - set(shown) == {
        "estimate"
    }  # of what proofs are made of; they carry it


def test_a_mistyped_public_name_has_a_close_match():
    with pytest.raises(AttributeError, match="has no attribute 'make_mesg'; did you mean 'make_mesh'"):
        sx.make_mesg


def test_only_compat_knows_private_jax_names():
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if path.name != "_compat.py" and ("jax._src" in path.read_text() or "jaxlib." in path.read_text())
    ]
    assert not offenders


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_modules_stay_small(path):
    assert path.read_text().count("\n") <= 500


def test_only_report_and_front_doors_print():
    printing = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        if room_of(module_name(path)) not in {"report", *FRONT_DOORS}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing


IMPORT_PROBE = """
import time
start = time.perf_counter(); import jax; jax_seconds = time.perf_counter() - start
start = time.perf_counter(); import shardax; ours = time.perf_counter() - start
from shardax._compat import backend_initialised
import sys
heavy = [m for m in ("flax", "brainstate", "equinox", "grain", "orbax", "typer", "rich", "datarax", "eformer") if m in sys.modules]
print(backend_initialised(), ours / jax_seconds, ",".join(heavy))
"""


def test_import_touches_no_device_and_costs_little():
    results = []
    for _ in range(3):  # the least of three: these machines are noisy, and the cost cannot be less than it is
        out = subprocess.run(
            [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, check=True, timeout=120
        )
        initialised, ratio, heavy = (
            out.stdout.strip().split(" ") if out.stdout.strip().count(" ") == 2 else [*out.stdout.split(), ""]
        )
        assert initialised == "False"
        assert not heavy, f"import shardax pulled in {heavy}"
        results.append(float(ratio))
    assert min(results) < 0.10, results
