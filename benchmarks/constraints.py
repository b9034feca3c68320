"""Constraints while a program is traced: what it costs to say where activations go, against saying it in plain JAX.

Two programs of 600 constraints: a chain of nothing else, which is the worst case, and 100 layers with six constraints
each between their products, as a model has them. Each sample traces anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.timing import ROUNDS, Race, Result, race, simulate_devices

CONSTRAINTS, LAYERS = 600, 100
SHAPE = (8, 16, 64)
GOAL = "every way of shardax at most 1.10× (others, measured before: eformer 1.5–2.4×, linen 1.5–1.7×)"

Constrain = Callable[[Any], Any]


def run(quick: bool) -> list[Result]:
    simulate_devices(8)
    import jax

    import shardax as sx

    mesh = sx.make_mesh("fsdp=2,tp=4")
    rounds = 7 if quick else ROUNDS
    chain, model = f"{CONSTRAINTS} constraints in a chain", f"{CONSTRAINTS} constraints in {LAYERS} layers"
    with jax.set_mesh(mesh):
        results: list[Result] = [
            _race(f"{chain}, traced", _chain, _ways(mesh), rounds),
            _race(f"{model}, traced", _model, _ways(mesh), rounds),
        ]
    others = _peers(mesh)
    if others:
        with mesh:  # eformer looks for no other mesh
            results.append(_race(f"{chain}, traced under `with mesh:`", _chain, {**_ways(mesh), **others}, rounds))
    return results


def _race(title: str, program: Callable[[Constrain, Any], Any], ways: dict[str, Constrain], rounds: int) -> Race:
    import jax

    x = jax.ShapeDtypeStruct(SHAPE, "float32")

    def tracing(way: Constrain) -> Callable[[], Any]:
        return lambda: jax.jit(lambda x: program(way, x)).trace(x)  # a new function: jax remembers what it has traced

    contenders = {name: tracing(way) for name, way in ways.items()}
    return race(title, contenders, rounds=rounds, per=CONSTRAINTS, unit="constraint", clock="cpu", warmup=2, goal=GOAL)


def _chain(constrain: Constrain, x: Any) -> Any:
    for _ in range(CONSTRAINTS):
        x = constrain(x)
    return x


def _model(constrain: Constrain, x: Any) -> Any:
    import jax.numpy as jnp

    for _ in range(LAYERS):
        h = constrain(x)
        q, k = constrain(jnp.sin(h)), constrain(jnp.cos(h))
        h = constrain(q * k + h)
        h = constrain(jnp.tanh(h) * 2.0)
        x = constrain(x + h)
    return x


def _ways(mesh: Any) -> dict[str, Constrain]:
    """The floor, and every front door to a constraint that shardax has."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardax as sx

    spec = P("fsdp", None, "tp")
    sharding = NamedSharding(mesh, spec)
    manager = sx.PartitionManager(sx.PartitionAxis())
    axes = [sx.BATCH, sx.LENGTH, sx.EMBED]
    return {
        "jax.lax.with_sharding_constraint": lambda x: jax.lax.with_sharding_constraint(x, sharding),
        "sx.with_sharding_constraint, spec": lambda x: sx.with_sharding_constraint(x, spec),
        "sx.with_sharding_constraint, NamedSharding": lambda x: sx.with_sharding_constraint(x, sharding),
        "sx.constrain, spec": lambda x: sx.constrain(x, spec),
        "sx.constrain, semantic axes": lambda x: sx.constrain(x, axes, on_misfit="adapt"),
        "PartitionManager.shard": lambda x: manager.shard(x, axes, sx.MODE_TRAIN),
        "PartitionManager.shard, dynamic axes": lambda x: manager.shard(x, dynamic_axes=sx.HiddenStateSharding),
    }


# ---- peers ----------------------------------------------------------------------------------------------------------


def _peers(mesh: Any) -> dict[str, Constrain]:
    """What others call a constraint; what is not installed is said and left out. (NNX has none of its own.)"""
    found: dict[str, Constrain] = {}
    for name, ways in (("eformer", _eformer), ("flax", lambda: _linen(mesh))):
        try:
            found.update(ways())
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def _eformer() -> dict[str, Constrain]:
    from eformer import escale
    from eformer.common_types import BATCH, EMBED, LENGTH, MODE_TRAIN
    from jax.sharding import PartitionSpec as P

    spec = P("fsdp", None, "tp")
    manager = escale.PartitionManager(escale.PartitionAxis())
    return {
        "eformer: with_sharding_constraint": lambda x: escale.with_sharding_constraint(x, spec),
        "eformer: PartitionManager.shard": lambda x: manager.shard(x, [BATCH, LENGTH, EMBED], MODE_TRAIN),
    }


def _linen(mesh: Any) -> dict[str, Constrain]:
    from flax import linen

    rules = (("batch", "fsdp"), ("length", None), ("embed", "tp"))

    def constrain(x: Any) -> Any:
        return linen.with_logical_constraint(x, ("batch", "length", "embed"), rules=rules, mesh=mesh)

    return {"linen: with_logical_constraint": constrain}
