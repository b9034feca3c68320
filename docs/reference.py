"""mkdocs hook: the API reference, one page a room, from the index of public names (`shardax/__init__.pyi`).

Nothing is listed twice: what the index names is documented, from the docstrings, in the order of the index.
"""

import ast
from pathlib import Path

from mkdocs.structure.files import File, Files

INDEX = Path(__file__).parents[1] / "src" / "shardax" / "__init__.pyi"
ROOMS = ("names", "arrays", "state", "cluster", "data", "proving", "report")


def public_names() -> dict[str, list[str]]:
    """Full names by room; what lives in no room stands under `front_doors`, error classes under `errors`."""
    found: dict[str, list[str]] = {page: [] for page in (*ROOMS, "front_doors", "errors")}
    for node in ast.parse(INDEX.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            room = [*node.module.split("."), ""][1]
            page = room if room in found else "front_doors"
            found[page] += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def page_text(page: str, names: list[str]) -> str:
    """The source of one page: a heading and one directive a name."""
    title = "Front doors" if page == "front_doors" else page
    if page == "front_doors":
        names = [*names, "shardax.testing"]
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)])


def on_files(files: Files, config: object) -> Files:
    """Add the generated pages to the site."""
    for page, names in public_names().items():
        files.append(File.generated(config, f"reference/{page}.md", content=page_text(page, names)))
    return files
