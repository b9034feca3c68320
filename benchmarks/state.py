"""State: what a call costs when arrays live in cells, against `jax.jit` on the flat list of the same arrays.

CPU time is counted on a CPU, where a call is one thread of Python; the wall clock on an accelerator and for `shard_map`,
whose devices are threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.timing import ROUNDS, Race, Result, race, simulate_devices

DEVICES = 8
UPDATE_GOAL = (
    "own State ≤ 1.10× (N = 10: 1.2×), nnx.Module ≤ 1.30× (1.5×), with StateSharding + 0.1×, brainstate ≤ 1.3× (2×), "
    "donated ≤ 0.9×, a tenth touched ≤ 0.5×"
)
READ_GOAL = (
    "own State ≤ 1.10× (N = 10: 1.2×), nnx.Module ≤ 1.40× (1.5×), with StateSharding + 0.1×, brainstate ≤ 1.3× (2×)"
)


def run(quick: bool) -> list[Result]:
    simulate_devices(DEVICES)
    return races(quick, "cpu")


def races(quick: bool, clock: Any) -> list[Result]:
    """Everything, on whatever backend JAX has."""
    from benchmarks import _mapped, _models, _training

    sizes = (10, 100) if quick else (10, 100, 1_000, 5_000)
    results: list[Result] = []
    for size in sizes:
        results += [dispatch(size, reads, quick, clock) for reads in (False, True)]
    results += [compiled(size, quick, clock) for size in ((10, 100) if quick else (10, 1_000))]
    results.append(_training.training(quick, clock))
    for count in (1, 20) if quick else (1, 20, 200):
        results += _mapped.eager(count, quick)
    return [*results, *_models.lowering(quick, clock)]


def dispatch(size: int, reads: bool, quick: bool, clock: Any) -> Race:
    from benchmarks import _contenders as c

    work = c.Work(size, reads)
    wanted: dict[str, tuple[str | None, Callable[[], c.Contender]]] = {
        "jax.jit, flat list": (None, partial(c.flat_list, work)),
        "jax.jit, nested dict": (None, partial(c.nested_dict, work)),
        "shardax.jit, State closed over": (None, partial(c.own_closed_over, work)),
        "shardax.jit, State as argument": (None, partial(c.own_argument, work)),
        "shardax.jit, nnx.Module": ("flax", partial(c.nnx_shardax, work)),
        "shardax.jit, brainstate closed over": ("brainstate", partial(c.brainstate_shardax, work)),
    }
    if size <= 1_000:  # XLA takes its time to compile functions of 5,000 results
        wanted["shardax.jit, nnx.Module, StateSharding"] = ("flax", partial(c.nnx_shardax_sharded, work))
    if size <= 1_000 and not reads:
        tenth = c.Work(size, reads, share=10)
        wanted |= {
            "jax.jit, flat list, donated": (None, partial(c.flat_list, work, donate_argnums=0)),
            "shardax.jit, State closed over, donated": (None, partial(c.own_closed_over, work, donate="state")),
            "shardax.jit, State as argument, donated": (None, partial(c.own_argument, work, donate="state")),
            "shardax.jit, nnx.Module, donated": ("flax", partial(c.nnx_shardax, work, donate="state")),
            "shardax.jit, State closed over, a tenth touched": (None, partial(c.own_closed_over, tenth)),
            "shardax.jit, nnx.Module, a tenth touched": ("flax", partial(c.nnx_shardax, tenth)),
        }
    wanted |= {
        "nnx.jit": ("flax", partial(c.nnx_peer, work)),
        "nnx.jit(graph=False)": ("flax", partial(c.nnx_peer, work, graph=False)),
        "brainstate.transform.jit": ("brainstate", partial(c.brainstate_peer, work)),
        "equinox.filter_jit": ("equinox", partial(c.equinox_peer, work)),
    }
    does = "read all of" if reads else "add 1 to all of"
    return _race(f"{does} {size:,} parameters", wanted, size, reads, quick, clock, READ_GOAL if reads else UPDATE_GOAL)


def compiled(size: int, quick: bool, clock: Any) -> Race:
    """`lower().compile()` once, called again and again."""
    from benchmarks import _contenders as c

    work = c.Work(size)
    wanted: dict[str, tuple[str | None, Callable[[], c.Contender]]] = {
        "jax Compiled, flat list": (None, partial(c.flat_list_compiled, work)),
        "shardax Compiled, State as argument": (None, partial(c.own_compiled, work)),
        "shardax Compiled, nnx.Module": ("flax", partial(c.nnx_compiled, work)),
        "nnx Compiled": ("flax", partial(c.nnx_peer_compiled, work)),
    }
    title = f"Compiled.__call__, add 1 to all of {size:,} parameters"
    return _race(title, wanted, size, False, quick, clock, "at most 1.2× of jax's")


def _race(title: str, wanted: Mapping[str, Any], size: int, reads: bool, quick: bool, clock: Any, goal: str) -> Race:
    from benchmarks import _contenders as c

    found = c.present(wanted)
    for name, contender in found.items():
        _check(name, contender, reads)
    loops = max(3, (200 if quick else 1_000) // size)
    rounds = 7 if quick else ROUNDS if size < 1_000 else 15 if size == 1_000 else 7
    calls = {name: contender.sample(loops) for name, contender in found.items()}
    return race(title, calls, rounds=rounds, per=loops, unit="call", goal=goal, clock=clock)


def _check(name: str, contender: Any, reads: bool) -> None:
    """Two calls, and the first parameter, which was 0, is 2 (or its reader has returned 1): all do the same work."""
    out = [contender.call(), contender.call()][1]
    got = float((out if reads else contender.first())[0])
    if got != (1.0 if reads else 2.0):
        raise AssertionError(f"{name} computed {got}")
