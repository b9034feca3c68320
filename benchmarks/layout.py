"""Layouts of large trees: a decision for every leaf, with its rule and its fit; and how the cost grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.rules import TWENTY, tree_of, walk_by_hand
from benchmarks.timing import ROUNDS, Facts, Race, Result, once, race
from shardax.names.matching import matcher_of
from shardax.names.spec import fit_cached

LEAVES = 10_000
MESH = "dp=16,fsdp=64,tp=4"  # 4,096 devices that are not there
SEMANTIC = [(pattern, ("batch_axis", "head_axis") if len(spec) == 2 else None) for pattern, spec in TWENTY]


def run(quick: bool) -> list[Result]:
    return [one_layout(7 if quick else ROUNDS), growth((1_000, 10_000) if quick else (1_000, 10_000, 100_000))]


def forget() -> None:
    """What earlier calls have left behind: the index of the rules, and every fit."""
    matcher_of.cache_clear()
    fit_cached.cache_clear()


def one_layout(rounds: int) -> Race:
    tree = tree_of(LEAVES, jax.ShapeDtypeStruct((256, 1024), "bfloat16"))
    paths, _ = walk_by_hand(tree)
    specs = {path: P("fsdp", "tp") for path in paths}
    mesh = sx.MeshSpec.of(MESH).abstract()
    first = sx.layout(tree, TWENTY, mesh, on_misfit="adapt")
    moments = {"count": jax.ShapeDtypeStruct((), "int32"), "mu": tree, "nu": tree}

    def by_hand() -> list[P]:
        return [specs[path] for path in walk_by_hand(tree)[0]]

    def cold(rules: Any) -> Callable[[], Any]:
        def call() -> Any:
            forget()
            return sx.layout(tree, rules, mesh, on_misfit="adapt")

        return call

    return race(
        f"layout() of {len(paths):,} abstract leaves × 20 rules on {MESH}",
        {
            "walk and one dict lookup per leaf": by_hand,
            "shardax: layout, cold": cold(TWENTY),
            "shardax: layout of semantic axes, cold": cold(SEMANTIC),
            "shardax: layout, the second one": lambda: sx.layout(tree, TWENTY, mesh, on_misfit="adapt"),
            "shardax: optimizer_layout of Adam's state": lambda: sx.optimizer_layout(moments, first),
            "shardax: .shardings": lambda: first.shardings,
        },
        rounds=rounds,
        per=len(paths),
        unit="leaf",
        clock="cpu",
        goal="layout, with its fits and decisions, under 25 µs per leaf (optimizer_layout decides two leaves per leaf here)",
    )


def growth(sizes: tuple[int, ...]) -> Facts:
    """Microseconds per leaf of a cold layout as trees grow, on a small and on a large mesh."""
    rows: list[tuple[str | int | float, ...]] = []
    for text in ("fsdp=8", MESH):
        mesh, cells = sx.MeshSpec.of(text).abstract(), []
        for size in sizes:
            tree = tree_of(size, jax.ShapeDtypeStruct((256, 1024), "bfloat16"))
            count = len(walk_by_hand(tree)[0])

            def cold(tree: Any = tree, mesh: Any = mesh) -> None:
                forget()
                sx.layout(tree, TWENTY, mesh, on_misfit="adapt")

            cells.append(f"{min(once(cold, 'cpu') for _ in range(3)) * 1e6 / count:.2f}")
        rows.append((text, *cells))
    columns = ("mesh", *(f"µs per leaf at {size:,} leaves" for size in sizes))
    return Facts(
        "How a cold layout grows (best of 3)",
        columns,
        tuple(rows),
        "linear in leaves, and blind to the size of the mesh",
    )
