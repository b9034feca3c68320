"""One training step as people write it: a gradient taken inside, an optimiser that updates in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import shardax as sx
from benchmarks._contenders import Contender, present
from benchmarks.timing import Race, race

WIDTH, LAYERS, RATE = 4, 50, 1e-3


def training(quick: bool, clock: Any) -> Race:
    """Small layers, so that what is measured is the step's way in and out."""
    contenders = present(
        {
            "jax.jit, flat list": (None, flat),
            "shardax.jit, State closed over": (None, own),
            "shardax.jit, nnx.Module and Optimizer": ("flax", partial(nnx, sx.jit)),
            "nnx.jit": ("flax", nnx_peer),
        }
    )
    loops = 3 if quick else 10
    calls = {name: contender.sample(loops) for name, contender in contenders.items()}
    title = f"one training step, {LAYERS} linear layers: gradient and SGD with momentum"
    return race(title, calls, rounds=7 if quick else 31, per=loops, unit="call", clock=clock)


def kernels() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys]


def loss(kernels: Any, x: Any) -> Any:
    for kernel in kernels:
        x = x @ kernel
    return jnp.mean((x - 1) ** 2)


def descend(kernels: Any, momenta: Any, x: Any) -> tuple[list[Any], list[Any]]:
    momenta = [0.9 * old + new for old, new in zip(momenta, jax.grad(loss)(kernels, x), strict=True)]
    return [kernel - RATE * momentum for kernel, momentum in zip(kernels, momenta, strict=True)], momenta


def flat() -> Contender:
    x, held = jnp.ones((2, WIDTH)), [*kernels(), *(0 * kernel for kernel in kernels())]

    @jax.jit
    def step(arrays: list[Any], x: Any) -> list[Any]:
        kernels, momenta = descend(arrays[:LAYERS], arrays[LAYERS:], x)
        return [*kernels, *momenta]

    def call() -> None:
        held[:] = step(held, x)

    return Contender(call, lambda: held[0])


def own() -> Contender:
    x = jnp.ones((2, WIDTH))
    cells, momenta = [sx.State(kernel) for kernel in kernels()], [sx.State(0 * kernel) for kernel in kernels()]

    @sx.jit
    def step(x: Any) -> None:
        new = descend([cell.value for cell in cells], [cell.value for cell in momenta], x)
        for cell, value in zip((*cells, *momenta), (*new[0], *new[1]), strict=True):
            cell.value = value

    return Contender(lambda: step(x), lambda: cells[0].value)


def nnx(jit: Callable[..., Any]) -> Contender:
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])
            for layer, kernel in zip(self.layers, kernels(), strict=True):
                layer.kernel.set_value(kernel)

    def step(model: Any, optimizer: Any, x: Any) -> None:
        gradient = nnx.grad(lambda model: loss([layer.kernel.get_value() for layer in model.layers], x))(model)
        optimizer.update(model, gradient)

    model = Model()
    optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=0.9), wrt=nnx.Param)
    x, jitted = jnp.ones((2, WIDTH)), jit(step)
    return Contender(lambda: jitted(model, optimizer, x), model.layers[0].kernel.get_value)


def nnx_peer() -> Contender:
    from flax import nnx as flax_nnx

    return nnx(flax_nnx.jit)
