"""why_retraced: every reason for which a function is traced again, in the words of the caller's arguments."""

import jax
import jax.numpy as jnp
import pytest

import shardax as sx


class Model:
    def __init__(self):
        self.weight, self.scale = sx.State(jnp.ones(3), tag="w"), 2
        self.layers = [sx.State(jnp.zeros(2))]


def why(change, *, function=lambda model, x, **rest: model.weight.value.sum() * x, **options):
    """What is said after one call, a change that may return other arguments, and a second call."""
    model = Model()
    jitted = sx.jit(function, **options)
    assert jitted.why_retraced() == ""
    jitted(model, jnp.float32(1), **({"mode": "a"} if options else {}))
    assert jitted.why_retraced() == "the first call"
    args, kwargs = change(model) or ((model, jnp.float32(1)), {})
    jitted(*args, **kwargs)
    return jitted.why_retraced()


def setter(**attributes):
    return lambda model: [setattr(model, name, value) for name, value in attributes.items()] and None


REASONS = {
    "nothing": (lambda model: None, "the first call"),
    "an attribute": (setter(scale=3), "model.scale: 2 → 3"),
    "its type": (setter(scale=2.0), "model.scale: 2 → 2.0"),
    "a new one": (setter(extra="text"), "model.extra: 'text' is new"),
    "one gone": (lambda model: delattr(model, "scale"), "model.scale: 2 is gone"),
    "a longer list": (lambda model: model.layers.append(sx.State(1.0)), "model.layers[1]: State() is new"),
    "sharing": (lambda model: model.layers.append(model.weight), "model.layers[1]: the same as model.weight is new"),
    "metadata": (setter(weight=sx.State(jnp.ones(3), tag="v")), "model.weight: State(tag='w') → State(tag='v')"),
    "a shape": (setter(weight=sx.State(jnp.ones(4), tag="w")), "model.weight: float32[3] → float32[4]"),
    "a dtype": (lambda model: ((model, jnp.int32(1)), {}), "x: float32[] → int32[]"),
    "a keyword": (lambda model: ((model, jnp.float32(1)), {"more": jnp.ones(2)}), "more: float32[2] is new"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_is_named(reason):
    change, said = REASONS[reason]
    assert said in why(change).splitlines()


def test_a_static_argument():
    assert "mode: 'a' → 'b'" in why(
        lambda model: ((model, jnp.float32(1)), {"mode": "b"}),
        function=lambda model, x, mode: x,
        static_argnames="mode",
    )


def test_a_closed_over_cell():
    holder = {"cell": sx.State(1.0)}
    jitted = sx.jit(lambda x: holder["cell"].value + x)
    jitted(1.0)
    holder["cell"] = sx.State(2.0)
    jitted(1.0)
    assert "closed over" in jitted.why_retraced() or "closed-over" in jitted.why_retraced()


def test_the_context():
    cell = sx.State(jnp.ones((4, 4)))
    jitted = sx.jit(lambda cell: cell.value @ cell.value)
    jitted(cell)
    with jax.default_matmul_precision("float32"):
        jitted(cell)
    assert jitted.why_retraced() == "the context: jax_default_matmul_precision: None → float32"
    with jax.set_mesh(sx.make_mesh("a=8")):
        jitted(cell)
    assert "the context: mesh: None → AbstractMesh('a': 8" in jitted.why_retraced()


def test_clear_cache_forgets():
    cell, calls = sx.State(1.0), []
    jitted = sx.jit(lambda cell: (calls.append(None), cell.value)[1])
    jitted(cell)
    jitted(cell)
    jitted.clear_cache()
    jitted(cell)
    assert len(calls) == 2
