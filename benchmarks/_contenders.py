"""One piece of work over N small parameters, done by every tool that can hold them: plain JAX, shardax, and the peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import shardax as sx

SHAPE = (4,)
PER_LAYER = 10
Get = Callable[[Any], Any]
Set = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Work:
    """Add one to every cell (or to one in `share`), or read them all and return the first plus one.

    What is read is not computed with: XLA would need minutes to compile a sum of 5,000 arguments, and the passing of
    arguments is what is measured. `keep_unused` makes every contender really pass them.
    """

    size: int
    reads: bool = False
    share: int = 1

    @property
    def options(self) -> dict[str, Any]:
        return {"keep_unused": True} if self.reads else {}

    def arrays(self) -> list[jax.Array]:
        return [jnp.full(SHAPE, number, jnp.float32) for number in range(self.size)]

    def on_cells(self, cells: Sequence[Any], get: Get, set: Set) -> Any:
        """The work, for whatever is written in place."""
        if self.reads:
            first, *_ = [get(cell) for cell in cells]
            return first + 1
        for cell in cells[: max(1, self.size // self.share)]:
            set(cell, get(cell) + 1)
        return None

    def on_arrays(self, arrays: Sequence[Any]) -> Any:
        """The work, for whatever is handed on."""
        if self.reads:
            return arrays[0] + 1
        return [array + 1 for array in arrays]


@dataclass(frozen=True)
class Contender:
    """One call, and the first array: what to wait for, and what shows how many calls there were."""

    call: Callable[[], Any]
    first: Callable[[], jax.Array]

    def sample(self, loops: int) -> Callable[[], None]:
        """Some calls one after another, as a training loop makes them, and one wait."""
        call, first = self.call, self.first

        def run() -> None:
            out = None
            for _ in range(loops):
                out = call()
            jax.block_until_ready((out, first()))

        return run


class Box:
    """What a functional contender carries from call to call."""

    def __init__(self, jitted: Callable[[Any], Any], state: Any, work: Work, first: Callable[[Any], Any]) -> None:
        self.jitted, self.state, self.first, self.reads = jitted, state, first, work.reads

    def contender(self) -> Contender:
        def write() -> None:
            self.state = self.jitted(self.state)

        return Contender((lambda: self.jitted(self.state)) if self.reads else write, lambda: self.first(self.state))


# ---- plain jax ------------------------------------------------------------------------------------------------------


def flat_list(work: Work, **options: Any) -> Contender:
    jitted = jax.jit(lambda arrays: work.on_arrays(arrays), **options, **work.options)
    return Box(jitted, work.arrays(), work, lambda state: state[0]).contender()


def flat_list_compiled(work: Work) -> Contender:
    lowered = jax.jit(lambda arrays: work.on_arrays(arrays), **work.options).lower(work.arrays())
    return Box(lowered.compile(), work.arrays(), work, lambda state: state[0]).contender()


def nested_dict(work: Work) -> Contender:
    arrays = work.arrays()
    layers = [arrays[start : start + PER_LAYER] for start in range(0, work.size, PER_LAYER)]
    tree = {f"layer{n}": {f"p{place}": array for place, array in enumerate(layer)} for n, layer in enumerate(layers)}

    def run(tree: Any) -> Any:
        if work.reads:
            return tree["layer0"]["p0"] + 1
        return {name: {key: array + 1 for key, array in layer.items()} for name, layer in tree.items()}

    return Box(jax.jit(run, **work.options), tree, work, lambda state: state["layer0"]["p0"]).contender()


# ---- own cells ------------------------------------------------------------------------------------------------------


def own_cells(work: Work) -> list[Any]:
    return [sx.State(array) for array in work.arrays()]


def _set_value(cell: Any, value: Any) -> None:
    cell.value = value


_value = attrgetter("value")


def own_closed_over(work: Work, **options: Any) -> Contender:
    cells = own_cells(work)
    jitted = sx.jit(lambda: work.on_cells(cells, _value, _set_value), **options, **work.options)
    return Contender(jitted, lambda: cells[0].value)


def own_argument(work: Work, **options: Any) -> Contender:
    cells = own_cells(work)
    jitted = sx.jit(lambda cells: work.on_cells(cells, _value, _set_value), **options, **work.options)
    return Contender(lambda: jitted(cells), lambda: cells[0].value)


def own_compiled(work: Work) -> Contender:
    cells = own_cells(work)
    jitted = sx.jit(lambda cells: work.on_cells(cells, _value, _set_value), **work.options)
    compiled = jitted.lower(cells).compile()
    return Contender(lambda: compiled(cells), lambda: cells[0].value)


# ---- flax.nnx -------------------------------------------------------------------------------------------------------


def nnx_model(work: Work) -> tuple[Any, Callable[[Any], list[Any]]]:
    """A module of modules of ten parameters each, and how to list the parameters of one like it."""
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, arrays: Sequence[jax.Array]) -> None:
            self.width = len(arrays)
            for place, array in enumerate(arrays):
                setattr(self, f"p{place}", nnx.Param(array))

    class Model(nnx.Module):
        def __init__(self, arrays: Sequence[jax.Array]) -> None:
            starts = range(0, len(arrays), PER_LAYER)
            self.layers = nnx.List([Layer(arrays[start : start + PER_LAYER]) for start in starts])

    def parameters(model: Any) -> list[Any]:
        return [getattr(layer, f"p{place}") for layer in model.layers for place in range(layer.width)]

    return Model(work.arrays()), parameters


def _nnx(work: Work, jit: Callable[..., Any], aot: bool = False, **options: Any) -> Contender:
    model, parameters = nnx_model(work)
    get, set = (lambda cell: cell.get_value()), (lambda cell, value: cell.set_value(value))
    called: Any = jit(lambda model: work.on_cells(parameters(model), get, set), **options, **work.options)
    if aot:
        called = called.lower(model).compile()
    first = parameters(model)[0]
    return Contender(lambda: called(model), first.get_value)


def nnx_shardax(work: Work, **options: Any) -> Contender:
    return _nnx(work, sx.jit, **options)


def nnx_shardax_sharded(work: Work) -> Contender:
    """One device, and still every variable is asked for and compared with the sharding it should have."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    sharding = sx.StateSharding({...: NamedSharding(mesh, PartitionSpec())})
    return _nnx(work, sx.jit, in_shardings=(sharding,))


def nnx_compiled(work: Work) -> Contender:
    return _nnx(work, sx.jit, aot=True)


def nnx_peer(work: Work, **options: Any) -> Contender:
    from flax import nnx

    return _nnx(work, nnx.jit, **options)


def nnx_peer_compiled(work: Work) -> Contender:
    from flax import nnx

    return _nnx(work, nnx.jit, aot=True)


# ---- brainstate, equinox --------------------------------------------------------------------------------------------


def _brainstate(work: Work, jit: Callable[..., Any], **options: Any) -> Contender:
    import brainstate

    cells = [brainstate.ParamState(array) for array in work.arrays()]
    jitted = jit(lambda: work.on_cells(cells, _value, _set_value), **options, **work.options)
    return Contender(jitted, lambda: cells[0].value)


def brainstate_shardax(work: Work, **options: Any) -> Contender:
    return _brainstate(work, sx.jit, **options)


def brainstate_peer(work: Work) -> Contender:
    import brainstate

    return _brainstate(work, brainstate.transform.jit)


def equinox_peer(work: Work) -> Contender:
    import equinox

    class Model(equinox.Module):
        layers: list[Any]

    model = Model(work.arrays())

    def run(model: Any) -> Any:
        if work.reads:
            return model.layers[0] + 1
        return Model([array + 1 for array in model.layers])

    return Box(equinox.filter_jit(run, **work.options), model, work, lambda state: state.layers[0]).contender()


# ---- who is there ---------------------------------------------------------------------------------------------------

Build = Callable[[], Any]


def present(wanted: Mapping[str, tuple[str | None, Build]]) -> dict[str, Any]:
    """Build the contenders whose package is installed; say which are left out, and why."""
    found: dict[str, Any] = {}
    for name, (package, build) in wanted.items():
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"left out: {name} ({package} is not installed)", flush=True)
            continue
        try:
            found[name] = build()
        except (TypeError, AttributeError, NotImplementedError) as error:
            if name.startswith(("jax", "shardax")):
                raise
            print(f"left out: {name} ({type(error).__name__}: {error})", flush=True)
    return found
