"""The table of benchmarks on the front page: a few rows of the saved results, none of them typed by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.timing import RESULTS, Race, load

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks: python -m benchmarks --readme -->", "<!-- end of benchmarks -->"


@dataclass(frozen=True)
class Line:
    """One row: what is done, in which race of which result, who of the contenders is ours and who are others."""

    work: str
    result: str
    race: str
    ours: str
    floor: str
    others: dict[str, str] = field(default_factory=dict[str, str])
    apart: str = ""
    """The race that others run in, where they would take too long for ours."""

    def cells(self) -> tuple[str, ...] | None:
        """The row; None where nobody has measured it yet."""
        races = _races(self.result)
        race = races.get(self.race)
        if race is None:
            return None
        found = {label: _ratio(races.get(self.apart or self.race), name) for label, name in self.others.items()}
        named = ", ".join(f"{label} {ratio}" for label, ratio in found.items() if ratio)
        return self.work, self.floor, f"**{_ratio(race, self.ours)}**", named or "—"


LINES = (
    Line(
        "specs for 100,000 leaves, 20 rules",
        "rules",
        "99,992 leaves × 20 rules",
        "shardax: match_partition_rules, cold",
        "a walk over nested dicts",
        {"eformer": "eformer: match_partition_rules", "`tree_flatten_with_path`": "jax: tree_flatten_with_path + join"},
    ),
    Line(
        "600 constraints while tracing",
        "constraints",
        "600 constraints in a chain, traced under `with mesh:`",
        "sx.constrain, spec",
        "`lax.with_sharding_constraint`",
        {"eformer": "eformer: with_sharding_constraint", "linen": "linen: with_logical_constraint"},
    ),
    Line("put 5,000 × 4 KB", "placement", "put of 5,000 × 4 KB", "sx.put(tree, layout)", "`jax.device_put(tree, …)`"),
    Line("gather 5,000 × 4 KB", "placement", "gather of 5,000 × 4 KB", "sx.gather(tree)", "`jax.device_get(tree)`"),
    Line(
        "update an `nnx.Module` of 1,000 parameters",
        "state",
        "add 1 to all of 1,000 parameters",
        "shardax.jit, nnx.Module",
        "`jax.jit`, flat list",
        {"`nnx.jit`": "nnx.jit"},
    ),
    Line(
        "update 1,000 parameters in own `State`",
        "state",
        "add 1 to all of 1,000 parameters",
        "shardax.jit, State closed over",
        "`jax.jit`, flat list",
        {"brainstate": "brainstate.transform.jit", "Equinox": "equinox.filter_jit"},
    ),
    Line(
        "eager `shard_map` of 20 states, second call",
        "state",
        "shard_map called eagerly a second time, 20 states, 8 devices",
        "shardax.shard_map, State closed over",
        "`jit(jax.shard_map)`",
        {"NNX": "nnx.shard_map, eager", "brainstate": "brainstate.transform.shard_map, eager"},
        apart="shard_map called eagerly a second time, 20 states, 8 devices: without shardax",
    ),
    Line(
        "one shuffled batch of 1,024 × 1 KB",
        "data",
        "one shuffled batch of 1024 records of 1 KB from a memmap of 200,000",
        "Feed, no prefetch",
        "NumPy index + `device_put`",
    ),
)


def _races(result: str) -> dict[str, Race]:
    """The races of a full run; a quick one only says that the script works."""
    path = RESULTS / f"{result}.json"
    if not path.exists():
        return {}
    record, results = load(path)
    return {} if record["quick"] else {race.title: race for race in results if isinstance(race, Race)}


def _ratio(race: Race | None, name: str) -> str:
    """The median ratio to the floor, with as many figures as it deserves."""
    found = {row.name: row.ratio for row in race.rows} if race else {}
    if name not in found:
        return ""
    return f"{found[name]:.2f}×" if found[name] < 10 else f"{found[name]:,.0f}×"


def table() -> str:
    """The table in Markdown, from the saved results alone."""
    rows = [("work", "floor = 1", "shardax", "others, same run"), ("---", "---", "---", "---")]
    rows += [cells for line in LINES if (cells := line.cells())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write() -> None:
    """Put the table where the front page keeps it."""
    text = README.read_text(encoding="utf-8")
    block = f"{BEGIN}\n{table()}\n{END}"
    README.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL), "utf-8")
