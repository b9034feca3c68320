"""Tracing and lowering a deep model: what the threading of state adds to the work of JAX itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks._contenders import present
from benchmarks.timing import Race, race

WIDTH = 8
LAYERS = 100
PARTS = ("scale", "up", "bias", "down")


def arrays() -> list[dict[str, jax.Array]]:
    """The parameters of every layer."""
    shapes = {"scale": (WIDTH,), "up": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "down": (2 * WIDTH, WIDTH)}
    return [{name: jnp.ones(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def layer(x: Any, scale: Any, up: Any, bias: Any, down: Any) -> Any:
    """One residual block: norm, up, activation, down."""
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
    return x + jax.nn.gelu(normed @ up + bias) @ down


def lowering(quick: bool, clock: Any) -> list[Race]:
    """Trace and lower from nothing, a new function each time; as a jit and as a jitted shard_map."""
    rounds = 3 if quick else 9
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((8 * len(jax.devices()), WIDTH))
    title = f"trace + lower, {LAYERS} layers of {len(PARTS)} parameters"
    jitted = race(title, _jitted(x), rounds=rounds, goal="at most 1.1× of jax", clock=clock)
    mapped = race(f"{title}, shard_map", _mapped(mesh, x), rounds=rounds, goal="at most 1.2× of jax", clock=clock)
    return [jitted, mapped]


def _jitted(x: Any) -> dict[str, Callable[[], object]]:
    return present(
        {
            "jax.jit": (None, partial(_jax, x, jax.jit)),
            "shardax.jit, State closed over": (None, partial(_own, x, sx.jit)),
            "shardax.jit, nnx.Module": ("flax", partial(_nnx, x, sx.jit)),
            "shardax.jit, brainstate closed over": ("brainstate", partial(_brainstate, x, sx.jit)),
            "nnx.jit": ("flax", partial(_nnx_peer, x)),
            "brainstate.transform.jit": ("brainstate", partial(_brainstate_peer, x)),
            "equinox.filter_jit": ("equinox", partial(_equinox_peer, x)),
        }
    )


def _mapped(mesh: Any, x: Any) -> dict[str, Callable[[], object]]:
    def jax_way(function: Callable[..., Any]) -> Any:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))

    def closed(function: Callable[..., Any]) -> Any:
        return sx.jit(sx.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x")))

    def module(function: Callable[..., Any]) -> Any:
        return sx.jit(sx.shard_map(function, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))

    def nnx_way(function: Callable[..., Any]) -> Any:
        from flax import nnx

        return nnx.jit(nnx.shard_map(function, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")))

    return present(
        {
            "jit(jax.shard_map)": (None, partial(_jax, x, jax_way)),
            "shardax.jit(shardax.shard_map), State closed over": (None, partial(_own, x, closed)),
            "shardax.jit(shardax.shard_map), nnx.Module": ("flax", partial(_nnx, x, module)),
            "nnx.jit(nnx.shard_map)": ("flax", partial(_nnx, x, nnx_way)),
        }
    )


def _jax(x: Any, jit: Callable[..., Any]) -> Callable[[], object]:
    parameters = arrays()

    def lower() -> object:
        def forward(parameters: Any, x: Any) -> Any:
            for each in parameters:
                x = layer(x, **each)
            return x

        return jit(forward).lower(parameters, x)

    return lower


def _over(cells: Sequence[dict[str, Any]], x: Any) -> Any:
    for each in cells:
        x = layer(x, **{name: cell.value for name, cell in each.items()})
    return x


def _own(x: Any, jit: Callable[..., Any]) -> Callable[[], object]:
    cells = [{name: sx.State(array) for name, array in each.items()} for each in arrays()]
    return lambda: jit(lambda x: _over(cells, x)).lower(x)


def _nnx(x: Any, jit: Callable[..., Any]) -> Callable[[], object]:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, parameters: dict[str, jax.Array]) -> None:
            for name, array in parameters.items():
                setattr(self, name, nnx.Param(array))

        def __call__(self, x: Any) -> Any:
            return layer(x, **{name: getattr(self, name).get_value() for name in PARTS})

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Layer(each) for each in arrays()])

    model = Model()

    def lower() -> object:
        def forward(model: Any, x: Any) -> Any:
            for each in model.layers:
                x = each(x)
            return x

        return jit(forward).lower(model, x)

    return lower


def _nnx_peer(x: Any) -> Callable[[], object]:
    from flax import nnx

    return _nnx(x, nnx.jit)


def _brainstate(x: Any, jit: Callable[..., Any]) -> Callable[[], object]:
    import brainstate

    cells = [{name: brainstate.ParamState(array) for name, array in each.items()} for each in arrays()]
    return lambda: jit(lambda x: _over(cells, x)).lower(x)


def _brainstate_peer(x: Any) -> Callable[[], object]:
    import brainstate

    return _brainstate(x, brainstate.transform.jit)


def _equinox_peer(x: Any) -> Callable[[], object]:
    import equinox

    class Model(equinox.Module):
        layers: list[dict[str, Any]]

    model = Model(arrays())

    def lower() -> object:
        def forward(model: Any, x: Any) -> Any:
            for each in model.layers:
                x = layer(x, **each)
            return x

        return equinox.filter_jit(forward).lower(model, x)

    return lower
