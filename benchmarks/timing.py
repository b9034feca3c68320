"""The one way we measure: contenders interleaved in random order, ratios to a floor of the same run.

The machines are noisy, so a time alone says little; a ratio of neighbours in one round does. A benchmark module exposes

    def run(quick: bool) -> list[Race | Facts]

and gets its races from `race(...)`. Nothing here imports jax, so a module may call `simulate_devices` first.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
ROUNDS = 31
PACKAGES = ("shardax", "jax", "jaxlib", "numpy", "flax", "brainstate", "equinox", "grain", "orbax-checkpoint", "optax")
PEERS = ("eformer", "datarax")


@dataclass(frozen=True)
class Row:
    """One contender: its median time, and the median and 10–90 % range of (its time / the floor's) round by round."""

    name: str
    median_us: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Race:
    """Contenders measured against a floor in one process; `per` units (leaves, calls) make one call of a contender."""

    title: str
    floor: str
    rounds: int
    per: int
    unit: str
    rows: tuple[Row, ...]
    goal: str = ""
    clock: str = "wall"
    kind: str = field(default="race", init=False)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def each_us(self, name: str) -> float:
        """Median microseconds of one unit."""
        return self[name].median_us / self.per

    def grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        columns = ("contender", "median", f"per {self.unit}", "ratio to floor", "10–90 %")
        cells = [
            (
                f"{row.name} (floor)" if row.name == self.floor else row.name,
                show_us(row.median_us),
                show_us(row.median_us / self.per),
                f"{row.ratio:.2f}×",
                f"{row.low:.2f}–{row.high:.2f}",
            )
            for row in self.rows
        ]
        return (columns, cells) if self.per > 1 else ((*columns[:2], *columns[3:]), [(*c[:2], *c[3:]) for c in cells])


@dataclass(frozen=True)
class Facts:
    """Figures that are no race: peak memory, a time taken once, a slope. Cells are shown as they are."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    goal: str = ""
    kind: str = field(default="facts", init=False)

    def grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return self.columns, [tuple(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row) for row in self.rows]


Result = Race | Facts


def race(
    title: str,
    contenders: Mapping[str, Callable[..., object]],
    *,
    floor: str | None = None,
    rounds: int = ROUNDS,
    loops: int = 1,
    per: int = 1,
    unit: str = "call",
    prepare: Mapping[str, Callable[[], object]] | None = None,
    warmup: int = 1,
    goal: str = "",
    clock: Literal["wall", "cpu"] = "wall",
    seed: int = 0,
) -> Race:
    """Run every contender once a round, in random order, and compare it with the floor of the same round.

    `floor` is the first contender unless named. `loops` calls make one sample (for very short calls). `prepare[name]`
    runs untimed before each sample and its result is the contender's argument (fresh inputs to donate, a cold cache).
    Contenders that work asynchronously must block on their result themselves. `clock="cpu"` counts this process's own
    time: for work in one thread of Python, on a machine that others use too. The garbage collector is off inside a
    sample and run between rounds, as `timeit` does.
    """
    now = _CLOCKS[clock]
    names = list(contenders)
    floor = floor or names[0]
    prepare = prepare or {}
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(seed)

    def sample(name: str) -> float:
        call = contenders[name]
        arguments = (prepare[name](),) if name in prepare else ()
        start = now()
        for _ in range(loops):
            call(*arguments)
        return (now() - start) / loops

    for _ in range(warmup):
        for name in names:
            sample(name)
    enabled = gc.isenabled()
    try:
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            order.shuffle(names)
            for name in names:
                samples[name].append(sample(name))
    finally:
        if enabled:
            gc.enable()
    rows = tuple(_row(name, samples[name], samples[floor]) for name in contenders)
    return Race(title, floor, rounds, per, unit, rows, goal, clock)


def _row(name: str, own: Sequence[float], floor: Sequence[float]) -> Row:
    ratios = sorted(mine / theirs for mine, theirs in zip(own, floor, strict=True))
    tenth = len(ratios) // 10
    low, high = ratios[tenth], ratios[-1 - tenth]
    return Row(name, statistics.median(own) * 1e6, statistics.median(ratios), low, high)


_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def once(call: Callable[[], object], clock: Literal["wall", "cpu"] = "wall") -> float:
    """Seconds of one call, for work that is only ever done cold."""
    now = _CLOCKS[clock]
    start = now()
    call()
    return now() - start


def simulate_devices(count: int) -> None:
    """Make jax see `count` CPU devices; call it before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={count}"])


def show_us(microseconds: float) -> str:
    """Microseconds for people: ns below one, ms and s above a thousand."""
    for limit, scale, name in ((1, 1e-3, "ns"), (1e3, 1, "µs"), (1e6, 1e3, "ms")):
        if microseconds < limit:
            return f"{microseconds / scale:.3g} {name}"
    return f"{microseconds / 1e6:.3g} s"


def markdown(result: Result) -> str:
    """A result as a Markdown table, which also reads well in a terminal."""
    columns, cells = result.grid()
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [f"| {' | '.join(c.ljust(w) for c, w in zip(r, widths, strict=True))} |" for r in (columns, *cells)]
    lines.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    notes = [f"Goal: {result.goal}."] if result.goal else []
    if isinstance(result, Race):
        time_of = " of CPU time" if result.clock == "cpu" else ""
        notes.append(f"Medians{time_of} over {result.rounds} interleaved rounds.")
    return "\n".join([f"### {result.title}\n", *lines, "", " ".join(notes)]).rstrip() + "\n"


def versions() -> dict[str, str]:
    found: dict[str, str] = {"python": platform.python_version()}
    for package in (*PACKAGES, *PEERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save(name: str, results: Sequence[Result], quick: bool) -> Path:
    """Write `results/<name>.json` with what is needed to read the numbers later."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "quick": quick,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(),
        "results": [asdict(result) for result in results],
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def load(path: Path) -> tuple[dict[str, object], list[Result]]:
    """A saved record: its facts, and its results as values again."""
    record = json.loads(path.read_text())
    return record, [_revive(dict(result)) for result in record.pop("results")]


def _revive(data: dict[str, object]) -> Result:
    if data.pop("kind") == "race":
        rows = tuple(Row(**row) for row in data.pop("rows"))  # type: ignore[attr-defined]
        return Race(rows=rows, **data)  # type: ignore[arg-type]
    rows = tuple(map(tuple, data.pop("rows")))  # type: ignore[call-overload]
    return Facts(rows=rows, columns=tuple(data.pop("columns")), **data)  # type: ignore[arg-type]
