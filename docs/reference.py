"""mkdocs hook: the API reference, one page a room, from the index of public names (`shardax/__init__.pyi`).

Nothing is listed twice: what the index names is documented, from the docstrings, in the order of the index.
"""

import ast
from pathlib import Path

from mkdocs.structure.files import File, Files

INDEX = Path(__file__).parents[1] / "src" / "shardax" / "__init__.pyi"
TESTING = INDEX.parent / "testing" / "__init__.py"
PYTEST = [f"shardax.testing.{name}" for name in ("plugin.process_pool", "locks.sharding_lock", "locks.SharedLock")]
ROOMS = ("names", "arrays", "state", "cluster", "data", "proving", "report")


def imported(index: Path) -> list[str]:
    """The full name of everything that an index imports, in its order."""
    found = [node for node in ast.parse(index.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in found for alias in node.names]


def public_names() -> dict[str, list[str]]:
    """Full names by page: those of a room, error classes, and what tests use; `Table` stands with the reports."""
    found: dict[str, list[str]] = {page: [] for page in (*ROOMS, "errors")}
    for name in imported(INDEX):
        page = name.split(".")[1]
        found[page if page in found else "report"].append(name)
    return {**found, "testing": [*imported(TESTING), *PYTEST]}


def page_text(page: str, names: list[str]) -> str:
    """The source of one page: a heading and one directive a name."""
    lead = ["::: shardax.testing\n    options: {members: false, show_root_heading: false}"] if page == "testing" else []
    return "\n\n".join([f"# {page}", *lead, *(f"::: {name}" for name in names)])


def on_files(files: Files, config: object) -> Files:
    """Add the generated pages to the site."""
    for page, names in public_names().items():
        files.append(File.generated(config, f"reference/{page}.md", content=page_text(page, names)))
    return files
