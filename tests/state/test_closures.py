"""Modules that a function closes over: their attributes are structure, and what happens to them inside happens."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardax as sx

nnx = pytest.importorskip("flax.nnx")
brainstate = pytest.importorskip("brainstate")
optax = pytest.importorskip("optax")


class Scale(nnx.Module):
    def __init__(self):
        self.factor = 2


def linear(rows=4, columns=1):
    return nnx.Linear(rows, columns, rngs=nnx.Rngs(0))


def test_a_static_attribute_of_a_closed_over_module_is_structure():
    scale, weighted = Scale(), linear()
    weighted.factor = 2
    plain = sx.jit(lambda: scale.factor * jnp.ones(()))
    held = sx.jit(lambda: weighted.factor * (1 + 0 * weighted.bias[...].sum()))
    assert (plain(), held()) == (2, 2)
    scale.factor = weighted.factor = 3
    assert (plain(), held()) == (3, 3)
    assert plain.why_retraced() == "closed-over scale.factor: 2 → 3"
    assert held.why_retraced() == "closed-over weighted.factor: 2 → 3"
    weighted.extra = "new"
    held()
    assert held.why_retraced() == "closed-over weighted.extra: 'new' is new"


def test_a_closed_over_model_can_be_switched_to_evaluation():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    call = sx.jit(lambda x: 1 * dropout(x))
    assert (call(jnp.ones(32)) == 0).any()
    dropout.eval()
    assert (call(jnp.ones(32)) == 1).all()
    node = brainstate.nn.Linear(2, 2)
    node.factor = 2
    read = sx.jit(lambda: node.factor * jnp.ones(()))
    read()
    node.factor = 3
    assert read() == 3


def test_frameworks_own_transforms_take_closed_over_modules():
    model = linear()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x, y = jnp.ones((2, 4)), jnp.zeros((2, 1))

    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    other = linear()
    other_optimizer = nnx.Optimizer(other, optax.sgd(0.1), wrt=nnx.Param)
    over = sx.jit(lambda: step(model, optimizer))
    for _ in range(3):
        assert jnp.allclose(over(), step(other, other_optimizer), atol=1e-6)
    assert jnp.allclose(model.kernel[...], other.kernel[...], atol=1e-6)


def test_a_change_of_structure_in_a_closed_over_module_is_carried_out():
    model = linear()

    @sx.jit
    def change(x):
        model.note, model.steps = "changed", nnx.Variable(x * 2)
        return model

    assert change(1.0) is model
    assert model.note == "changed"
    assert model.steps[...] == 2
    with pytest.warns(UserWarning, match=r"closed-over model\.steps is put there anew.*write to a cell"):
        change(2.0)
    assert model.steps[...] == 4
    model.more = 1


def test_shapes_of_a_change_leave_a_closed_over_module_alone():
    model = linear()

    @sx.jit
    def change(x):
        model.steps = nnx.Variable(x)
        return model

    assert change.eval_shape(1.0).steps.get_value().shape == ()
    change.lower(1.0)
    assert not hasattr(model, "steps")


def test_an_exception_leaves_a_closed_over_module_as_it_was():
    model = linear()
    model.factor = 2

    @sx.jit
    def fail():
        model.factor, model.extra = 3, nnx.Variable(model.bias[...] * 2)
        raise KeyError("no")

    with pytest.raises(KeyError):
        fail()
    assert model.factor == 2
    assert not hasattr(model, "extra")
    model.factor = 4  # it belongs to the caller again


def test_an_array_put_into_a_closed_over_node_arrives_with_a_warning():
    node = brainstate.nn.Linear(2, 2)

    @sx.jit
    def keep(x):
        node.last = 2 * x

    with pytest.warns(UserWarning, match=r"closed-over node\.last is put there anew"):
        keep(jnp.ones(2))
    assert (node.last == 2).all()


def test_gradients_of_a_closed_over_module_in_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    model, x = linear(4, 4), jnp.ones((8, 4))

    @sx.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
    def norm(block):
        gradients = nnx.grad(lambda model: (model(block) ** 2).mean())(model)
        return ((gradients["kernel"][...] / 8) ** 2).sum()  # jax sums over the shards where what is weighed is whole

    expected = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    assert jnp.allclose(norm(x), (expected["kernel"][...] ** 2).sum(), rtol=1e-5)


def in_threads(call, count=8):
    """Call from many threads at once; returns what they raised."""
    errors, barrier = [], threading.Barrier(count)

    def work(number):
        barrier.wait()
        try:
            call(number)
        except Exception as error:  # noqa: BLE001  handed to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    return errors


@pytest.fixture
def eager_switches():
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
def test_threads_may_trace_over_one_module():
    for _ in range(3):
        model = linear(4, 4)
        kernel = model.kernel[...]
        call = sx.jit(lambda x, model=model: model(x))
        assert in_threads(lambda number, call=call: call(jnp.ones((number + 1, 4)))) == []
        assert model.kernel[...] is not None
        assert (model.kernel[...] == kernel).all()


@pytest.mark.usefixtures("eager_switches")
def test_threads_that_nest_one_function_in_another_do_not_wait_for_each_other():
    for _ in range(3):
        state = brainstate.State(jnp.ones(3))
        inner = sx.jit(lambda x, state=state: state.value * x.sum())

        def slow(x, state=state, inner=inner):
            threading.Event().wait(0.02)
            return inner(x) + state.value

        outer = sx.jit(slow)
        pair = (inner, outer)
        assert in_threads(lambda number, pair=pair: pair[number % 2](jnp.ones(4))) == []
