"""Eager `shard_map`, called again: every contender adds a sharded batch's sum to each of its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks._contenders import Contender, present
from benchmarks.timing import ROUNDS, Race, race


def eager(count: int, quick: bool) -> list[Race]:
    """Ours against the jitted floor, and, apart, the peers: they compile every operation at every call."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(jnp.ones(8 * len(jax.devices())), jax.sharding.NamedSharding(mesh, P("x")))
    states = f"{count} state{'s' if count > 1 else ''}"
    floor = {"jit(jax.shard_map), flat list": (None, partial(_flat, mesh, batch, count, True))}
    ours = present(
        {
            **floor,
            "shardax.shard_map, State closed over": (None, partial(_own, mesh, batch, count)),
            "shardax.shard_map, nnx.Module": ("flax", partial(_nnx, mesh, batch, count, sx.shard_map)),
            "shardax.shard_map, brainstate closed over": (
                "brainstate",
                partial(_brainstate, mesh, batch, count, sx.shard_map),
            ),
        }
    )
    loops, rounds = max(1, (20 if quick else 50) // count), 7 if quick else ROUNDS
    title = f"shard_map called eagerly a second time, {states}, {mesh.size} device{'s' if mesh.size > 1 else ''}"
    calls = {name: contender.sample(loops) for name, contender in ours.items()}
    own = race(title, calls, rounds=rounds, per=loops, goal="at most 1.5× of jit(jax.shard_map)")
    _check(ours, batch, (rounds + 1) * loops)
    if count > (1 if quick else 20):
        return [own]  # a peer takes some 60 ms for each operation on each state
    peers = present(
        {
            **floor,
            "jax.shard_map, eager": (None, partial(_flat, mesh, batch, count, False)),
            "nnx.shard_map, eager": ("flax", partial(_nnx_peer, mesh, batch, count)),
            "brainstate.transform.shard_map, eager": ("brainstate", partial(_brainstate_peer, mesh, batch, count)),
        }
    )
    calls = {name: contender.sample(1) for name, contender in peers.items()}
    others = race(f"{title}: without shardax", calls, rounds=3)
    _check(peers, batch, 4)
    return [own, others]


def _check(contenders: dict[str, Contender], batch: jax.Array, calls: int) -> None:
    """Every contender has counted its calls."""
    for name, contender in contenders.items():
        if float(contender.first()) != calls * float(batch.sum()):
            raise AssertionError(f"{name} computed {contender.first()} in {calls} calls")


def _flat(mesh: Any, batch: Any, count: int, jitted: bool) -> Contender:
    def step(states: list[Any], x: Any) -> list[Any]:
        total = jax.lax.psum(x.sum(), "x")
        return [state + total for state in states]

    mapped: Callable[..., Any] = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    mapped = jax.jit(mapped) if jitted else mapped
    states = [jnp.zeros(()) for _ in range(count)]

    def call() -> None:
        states[:] = mapped(states, batch)

    return Contender(call, lambda: states[0])


def _add(cells: Sequence[Any], x: Any) -> None:
    total = jax.lax.psum(x.sum(), "x")
    for cell in cells:
        cell.value = cell.value + total


def _own(mesh: Any, batch: Any, count: int) -> Contender:
    cells = [sx.State(jnp.zeros(())) for _ in range(count)]
    mapped = sx.shard_map(lambda x: _add(cells, x), mesh, in_specs=P("x"), out_specs=P())
    return Contender(lambda: mapped(batch), lambda: cells[0].value)


def _nnx(mesh: Any, batch: Any, count: int, shard_map: Callable[..., Any]) -> Contender:
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.totals = nnx.List([nnx.Param(jnp.zeros(())) for _ in range(count)])

    def step(model: Any, x: Any) -> None:
        total = jax.lax.psum(x.sum(), "x")
        for cell in model.totals:
            cell.set_value(cell.get_value() + total)

    model = Model()
    mapped = shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    return Contender(lambda: mapped(model, batch), model.totals[0].get_value)


def _nnx_peer(mesh: Any, batch: Any, count: int) -> Contender:
    from flax import nnx

    return _nnx(mesh, batch, count, nnx.shard_map)


def _brainstate(mesh: Any, batch: Any, count: int, shard_map: Callable[..., Any]) -> Contender:
    import brainstate

    cells = [brainstate.ParamState(jnp.zeros(())) for _ in range(count)]
    mapped = shard_map(lambda x: _add(cells, x), mesh, in_specs=P("x"), out_specs=P())
    return Contender(lambda: mapped(batch), lambda: cells[0].value)


def _brainstate_peer(mesh: Any, batch: Any, count: int) -> Contender:
    import brainstate

    return _brainstate(mesh, batch, count, brainstate.transform.shard_map)
