"""Equinox modules under shardax.jit and shard_map: as they are, functions and settings among their leaves, or with cells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

eqx = pytest.importorskip("equinox", reason="needs equinox")

MESH = sx.make_mesh("x=8")


def mlp(width=8):
    return eqx.nn.MLP(4, 2, width, 1, key=jax.random.key(0))


class Counted(eqx.Module):
    """A module with a cell, a setting and a static field."""

    inner: eqx.nn.MLP
    calls: sx.State
    scale: float = 2.0
    mode: str = eqx.field(static=True, default="train")

    def __call__(self, x):
        self.calls.value += 1
        return self.inner(x) * self.scale


def test_a_module_is_an_argument_and_a_result_without_filters():
    model, x, traces = mlp(), jnp.ones((3, 4)), []

    @sx.jit
    def apply(model, x):
        traces.append(None)
        return model, jax.vmap(model)(x)

    same, out = apply(model, x)
    np.testing.assert_allclose(out, jax.vmap(model)(x), rtol=1e-6)
    assert type(same) is eqx.nn.MLP and same.activation is model.activation
    apply(jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, model), x)
    assert len(traces) == 1
    apply(eqx.tree_at(lambda m: m.activation, model, jnp.tanh), x)
    assert len(traces) == 2  # a function is structure


def test_numbers_in_a_module_are_settings():
    class Scaled(eqx.Module):
        weight: jax.Array
        power: int
        act: object = jnp.tanh

        def __call__(self, x):
            return self.act(x * self.weight) if self.power == 1 else self.act(x * self.weight) ** self.power

    step = sx.jit(lambda model, x: model(x))
    for power in (1, 2):  # an `if` on it works: it is not traced
        np.testing.assert_allclose(step(Scaled(jnp.ones(()), power), 0.5), np.tanh(0.5) ** power, rtol=1e-6)


def test_a_cell_in_a_module():
    model = Counted(mlp(), sx.State(0))
    step = sx.jit(lambda model, x: jax.vmap(model.inner)(x).sum() + model(x[0]).sum())
    step(model, jnp.ones((3, 4)))
    step(model, jnp.ones((3, 4)))
    assert int(model.calls.value) == 2
    bound = sx.jit(model)
    bound(jnp.ones(4))
    assert int(model.calls.value) == 3


def test_training_matches_filter_jit():
    optax = pytest.importorskip("optax", reason="needs optax")
    optimizer = optax.adam(1e-2)
    x, y = jax.random.normal(jax.random.key(1), (16, 4)), jnp.ones((16, 2))

    def step(model, state):
        loss, gradients = eqx.filter_value_and_grad(lambda m: ((jax.vmap(m)(x) - y) ** 2).mean())(model)
        updates, state = optimizer.update(gradients, state, model)
        return eqx.apply_updates(model, updates), state, loss

    def run(wrap):
        model = mlp()
        state, losses, compiled = optimizer.init(eqx.filter(model, eqx.is_array)), [], wrap(step)
        for _ in range(4):
            model, state, loss = compiled(model, state)
            losses.append(float(loss))
        return losses

    np.testing.assert_allclose(run(sx.jit), run(eqx.filter_jit), rtol=1e-5)


def test_equinox_state_is_threaded_by_hand_as_ever():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    step = sx.jit(lambda n, s, x: jax.vmap(n, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, s))
    out, state = step(norm, state, jnp.arange(12.0).reshape(3, 4))
    np.testing.assert_allclose(out.mean(0), np.zeros(4), atol=1e-5)


@pytest.mark.parametrize("with_cell", [False, True])
def test_shard_map_data_parallel(with_cell):
    model = Counted(mlp(), sx.State(0)) if with_cell else mlp()
    x = jax.random.normal(jax.random.key(2), (16, 4))
    mapped = sx.shard_map(lambda m, x: jax.vmap(m.inner if with_cell else m)(x), MESH, (P(), P("x")), P("x"))
    want = jax.vmap(model.inner if with_cell else model)(x)
    np.testing.assert_allclose(mapped(model, x), want, rtol=1e-5)
    np.testing.assert_allclose(sx.jit(mapped)(model, x), want, rtol=1e-5)


def test_shard_map_with_specs_in_the_shape_of_the_module():
    model = mlp(16)
    specs = jax.tree.map(lambda leaf: P() if eqx.is_array(leaf) else None, model)
    specs = eqx.tree_at(lambda m: (m.layers[0].weight, m.layers[0].bias), specs, (P("x"), P("x")))
    specs = eqx.tree_at(lambda m: m.layers[1].weight, specs, P(None, "x"))

    def apply(m, x):
        assert m.layers[0].weight.shape == (2, 4)
        hidden = m.activation(x @ m.layers[0].weight.T + m.layers[0].bias)
        return jax.lax.psum(hidden @ m.layers[1].weight.T, "x") + m.layers[1].bias

    x = jnp.ones((3, 4))
    np.testing.assert_allclose(sx.shard_map(apply, MESH, (specs, P()), P())(model, x), jax.vmap(model)(x), rtol=1e-5)


def test_a_layout_places_a_module_and_jit_keeps_it_there():
    model = Counted(mlp(16), sx.State(0))
    arrays, rest = eqx.partition(model.inner, eqx.is_array)
    layout = sx.layout(arrays, [("layers/0/weight", P("x")), (".*", P())], mesh=MESH)
    model = eqx.tree_at(lambda m: m.inner, model, eqx.combine(sx.put(arrays, layout), rest))
    shrunk = sx.jit(lambda m: jax.tree.map(lambda leaf: leaf * 0.5 if eqx.is_array(leaf) else leaf, m.inner))(model)
    assert shrunk.layers[0].weight.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 2)
    assert shrunk.layers[0].weight.shape == (16, 4)


def test_layouts_and_proofs_call_a_cell_what_its_place_is_called():
    model = Counted(mlp(16), sx.State({"steps": jnp.zeros(8)}))
    layout = sx.layout({"calls": model.calls}, [("calls/steps", P("x"))], mesh=MESH)
    assert layout["calls/steps"].spec == P("x") and layout.specs == {"calls": {"steps": P("x")}}
    assert sx.put({"calls": model.calls}, layout)["calls"]["steps"].sharding.spec == P("x")
    step = sx.jit(lambda calls: calls.value["steps"].sum())
    proof = sx.Case(step, (model.calls,), [("calls/steps", P("x"))], mesh=MESH).prove(target="cpu:8")
    assert list(proof.ledger.by_op()) == ["all-reduce"]
