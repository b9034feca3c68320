"""Which cells a function closes over: every way to reach one, what is watched, and what is left alone."""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.state.environment import closed_over, names_of
from shardax.state.lift import Lift, Options

COUNT = sx.State(jnp.float32(0))
LAYERS = [sx.State(jnp.float32(1)), sx.State(jnp.float32(2))]
MODULE = types.SimpleNamespace(cell=sx.State(jnp.float32(3)))


def helper(by):
    COUNT.value += by
    return COUNT.value


def uses_helper(by):
    return helper(by)


def uses_list():
    return sum(cell.value for cell in LAYERS)


def uses_namespace():
    return MODULE.cell.value


def nested():
    def inner():
        return COUNT.value

    return inner()


def default(cell=COUNT):
    return cell.value


class Caller:
    def __init__(self):
        self.cell = COUNT

    def __call__(self):
        return self.cell.value

    def method(self):
        return self.cell.value


@functools.wraps(helper)
def decorated(by):
    return helper(by)


CLOSED = COUNT


REACHES = {
    "a helper": (uses_helper, [COUNT]),
    "a list": (uses_list, LAYERS),
    "a namespace": (uses_namespace, [MODULE.cell]),
    "a nested function": (nested, [COUNT]),
    "a default": (default, [COUNT]),
    "a partial": (functools.partial(lambda cell, x: cell.value + x, COUNT), [COUNT]),
    "a callable": (Caller(), [COUNT]),
    "a method": (Caller().method, [COUNT]),
    "a decorated function": (decorated, [COUNT]),
    "nothing": (jnp.sin, []),
    "a library": (np.linalg.norm, []),
}


def watching(function):
    """Asks whether the places through which a function reaches its cells still hold what they held."""
    lift = Lift(function, Options("function"), compile=lambda lifted, gathered: lifted.run)
    lift.prepare((), {})
    return lambda: lift.find((), {}) is not None


@pytest.mark.parametrize("way", REACHES)
def test_the_cells_that_are_reached(way):
    function, cells = REACHES[way]
    found, _ = closed_over(function)
    assert {id(cell) for cell in found} == {id(cell) for cell in cells} and watching(function)()


def test_attributes_do_not_count_as_globals():
    found, _ = closed_over(lambda thing: thing.COUNT)
    assert found == []


def test_every_place_on_the_way_is_watched():
    first, second = sx.State(1), sx.State(2)
    places = {"list": [first], "dict": {"a": first}, "object": types.SimpleNamespace(cell=first)}
    changes = {
        "list": lambda: places["list"].append(second),
        "dict": lambda: places["dict"].update(a=second),
        "object": lambda: setattr(places["object"], "cell", second),
    }
    for name, change in changes.items():
        place = places[name]
        holds = watching(lambda place=place: place)
        assert holds()
        change()
        assert not holds()
    cell = first
    holds = watching(lambda: cell)
    assert holds()
    cell = second
    assert not holds()


def test_a_variable_that_is_gone_is_missed():
    cell = sx.State(1)
    holds = watching(lambda: cell)  # noqa: F821  gone is what it is to be
    assert holds()
    del cell
    assert not holds()


def test_changes_that_lead_to_no_cell_are_not_watched():
    """Plain configuration that a function closes over is read once, as under jax.jit."""
    config = {"scale": 2.0}
    holds = watching(lambda: (config, COUNT))
    config["scale"] = 3.0
    assert holds()


def test_recursive_functions_and_cyclic_objects_end():
    loop = [COUNT]
    loop.append(loop)

    def again(n):
        return again(n - 1) if n else loop

    found, _ = closed_over(again)
    assert [id(cell) for cell in found] == [id(COUNT)]


def test_names():
    local = {"deep": [sx.State(1)]}
    function = lambda: (local, COUNT, uses_list)  # noqa: E731
    stranger = sx.State(jnp.ones(2), tag="far")
    assert names_of(function, [local["deep"][0], COUNT, stranger]) == [
        "local['deep'][0]",
        "COUNT",
        "State(float32[2], tag='far')",
    ]


def test_a_global_that_is_rebound_is_another_cell():
    global CLOSED  # noqa: PLW0603
    CLOSED = sx.State(jnp.float32(1))
    read = sx.jit(lambda: CLOSED.value)
    assert float(read()) == 1
    CLOSED = sx.State(jnp.float32(2))
    assert float(read()) == 2


def test_state_is_threaded_through_every_way():
    bump = sx.jit(uses_helper)
    before = float(COUNT.value)
    assert float(bump(2.0)) == before + 2 and float(bump(2.0)) == before + 4 and float(COUNT.value) == before + 4
