"""Whole trees to their devices and back: `put` against one batched `jax.device_put`, `gather` against `jax.device_get`.

Time (of the processor: all threads of this process, whoever else is on the machine) and the peak of memory, of a tree of
many small arrays and of one of fewer large ones. Peaks are those of a process of its own for every contender.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.timing import Facts, Race, Result, race, simulate_devices

MESH = "dp=2,tp=4"


@dataclass(frozen=True)
class Size:
    """A tree of `count` float32 arrays of one shape, sharded over all devices."""

    name: str
    count: int
    shape: tuple[int, int]
    rounds: int

    @property
    def title(self) -> str:
        return f"{self.count:,} × {self.name}"


SIZES = (Size("4 KB", 5_000, (32, 32), 9), Size("1 MB", 300, (512, 512), 15))
QUICK = (Size("4 KB", 500, (32, 32), 5), Size("1 MB", 40, (512, 512), 5))


def run(quick: bool) -> list[Result]:
    simulate_devices(8)
    results: list[Result] = []
    for size in QUICK if quick else SIZES:
        results += [_putting(size), _gathering(size)]
    results.append(_peaks(QUICK if quick else SIZES))
    return results


# ---- trees ----------------------------------------------------------------------------------------------------------


def _tree(size: Size) -> dict[str, Any]:
    import numpy as np

    numbers = np.random.default_rng(0)
    return {f"layer_{i}": {"kernel": numbers.random(size.shape, np.float32)} for i in range(size.count)}


def _layout(tree: Any) -> Any:
    from jax.sharding import PartitionSpec as P

    import shardax as sx

    return sx.layout(tree, [("kernel", P("dp", "tp"))], sx.make_mesh(MESH))


# ---- time -----------------------------------------------------------------------------------------------------------


def _putting(size: Size) -> Race:
    import jax

    import shardax as sx

    tree = _tree(size)
    layout = _layout(tree)
    shardings = layout.shardings
    shard_fns, _ = sx.make_shard_and_gather_fns(layout)

    def contender(put: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(put())

    return race(
        f"put of {size.title}",
        {
            "jax.device_put(tree, shardings)": contender(lambda: jax.device_put(tree, shardings)),
            "sx.put(tree, layout)": contender(lambda: sx.put(tree, layout)),
            "sx.put(tree, shardings)": contender(lambda: sx.put(tree, shardings)),
            "sx.make_shard_and_gather_fns, leaf by leaf": contender(
                lambda: jax.tree.map(lambda shard, leaf: shard(leaf), shard_fns, tree)
            ),
        },
        rounds=size.rounds,
        per=size.count,
        unit="array",
        clock="cpu",
        goal="sx.put at most 1.1× (eformer, measured before: 4–13×, and nothing at all for NumPy arrays)",
    )


def _gathering(size: Size) -> Race:
    import jax

    import shardax as sx

    tree = _tree(size)
    layout = _layout(tree)
    shardings = layout.shardings
    _, gather_fns = sx.make_shard_and_gather_fns(layout)

    def fresh() -> Any:  # an array that has been read keeps its host copy
        return jax.block_until_ready(jax.device_put(tree, shardings))

    contenders: dict[str, Callable[[Any], Any]] = {
        "jax.device_get(tree)": jax.device_get,
        "sx.gather(tree)": sx.gather,
        "sx.make_shard_and_gather_fns, leaf by leaf": lambda placed: jax.tree.map(
            lambda gather, leaf: gather(leaf), gather_fns, placed
        ),
    }
    return race(
        f"gather of {size.title}",
        contenders,
        rounds=size.rounds,
        per=size.count,
        unit="array",
        clock="cpu",
        prepare=dict.fromkeys(contenders, fresh),
        goal="sx.gather at most 1.2× (eformer, measured before: 24.7 s for 300 arrays, more than 300 s for 5,000)",
    )


# ---- memory ---------------------------------------------------------------------------------------------------------

WORK = ("jax.device_put", "sx.put", "jax.device_get", "sx.gather")


def _peaks(sizes: tuple[Size, ...]) -> Facts:
    rows: list[tuple[str | int | float, ...]] = []
    for size in sizes:
        megabytes = {work: _in_a_process(work, size) for work in WORK}
        for ours, floor in (("sx.put", "jax.device_put"), ("sx.gather", "jax.device_get")):
            cells = (f"{megabytes[work]:.0f} MB" for work in (floor, ours))
            rows.append((size.title, f"{ours} against {floor}", *cells, f"{megabytes[ours] / megabytes[floor]:.2f}×"))
    return Facts(
        "Peak resident memory while it runs, above what the process held before",
        ("tree", "work", "floor", "shardax", "ratio"),
        tuple(rows),
        goal="sx.put at most 1.1× of the floor's",
    )


def _in_a_process(work: str, size: Size) -> float:
    command = [sys.executable, "-m", "benchmarks.placement", work, json.dumps([size.name, size.count, size.shape])]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True, timeout=120
    )
    return float(done.stdout.split()[-1])


def _report_peak(work: str, size: Size) -> None:
    """Print by how many megabytes the process grew at most while the work ran (arrays made before do not count)."""
    simulate_devices(8)
    import jax

    import shardax as sx

    tree = _tree(size)
    layout = _layout(tree)
    calls: dict[str, Callable[[Any], Any]] = {
        "jax.device_put": lambda tree: jax.device_put(tree, layout.shardings),
        "sx.put": lambda tree: sx.put(tree, layout),
        "jax.device_get": jax.device_get,
        "sx.gather": sx.gather,
    }
    few = {"layer_0": tree["layer_0"]}
    jax.block_until_ready(jax.device_put(few, _layout(few).shardings))  # threads, allocators: not part of the work
    given = tree if "put" in work else jax.block_until_ready(jax.device_put(tree, layout.shardings))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    jax.block_until_ready(calls[work](given))
    print((_status("VmHWM") - before) / 1e3)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    _name, _count, _shape = json.loads(sys.argv[2])
    _report_peak(sys.argv[1], Size(_name, _count, tuple(_shape), 1))
