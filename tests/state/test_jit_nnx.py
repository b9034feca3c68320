"""shardax.jit over unmodified Flax NNX: training steps equal nnx.jit's, and every sort of Variable and container."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

MESH = sx.make_mesh("a=4,b=2")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def state_of(*nodes):
    return jax.tree.map(
        lambda leaf: np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf),
        [nnx.to_pure_dict(nnx.state(node)) for node in nodes],
    )


def assert_same_state(nodes, others):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state_of(*nodes), state_of(*others)
    )


def train(model, optimizer, x, y):
    def loss(model):
        return ((model(x) - y) ** 2).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def test_training_steps_equal_those_of_nnx():
    """BatchNorm, Dropout with its Rngs, and an Optimizer with optax state: losses and final state are the same."""
    x, y = jnp.ones((8, 4)) * jnp.arange(8.0)[:, None], jnp.zeros((8, 2))
    ours, theirs = sx.jit(train), nnx.jit(train)
    sets = []
    for step in (ours, theirs):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
        losses = [float(step(model, optimizer, x, y)) for _ in range(4)]
        sets.append((losses, model, optimizer))
    np.testing.assert_allclose(sets[0][0], sets[1][0], rtol=1e-5)
    assert_same_state(sets[0][1:], sets[1][1:])
    assert ours.why_retraced() == "the first call"


@pytest.mark.parametrize(
    "inside",
    [
        lambda model, optimizer, x: nnx.grad(lambda model: model(x).sum())(model) and None,
        lambda model, optimizer, x: train(model, optimizer, x, jnp.zeros((8, 2))),
        lambda model, optimizer, x: nnx.remat(lambda model, x: model(x))(model, x),
        lambda model, optimizer, x: nnx.update(model, jax.tree.map(lambda a: a, nnx.split(model)[1])),
        lambda model, optimizer, x: nnx.jit(lambda model: model(x))(model),
    ],
    ids=["grad", "train", "remat", "split and update", "nnx.jit"],
)
def test_transforms_taken_inside_are_no_change_of_structure(inside):
    """flax leaves the attributes of what it merges sorted: were that a change, every call would carry it out again."""
    jitted, model = sx.jit(inside), Net(nnx.Rngs(0))
    model.scales = nnx.List([nnx.Param(jnp.ones(1)) for _ in range(11)])  # "10" is after "9"
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    for _ in range(2):
        jitted(model, optimizer, jnp.ones((8, 4)))
    (lifted,) = jitted._lift.lifted.values()
    assert lifted.traces == 1 and lifted.last.recipe is None


def test_eval_mode_is_another_structure_and_says_so():
    model = Net(nnx.Rngs(0))
    forward = sx.jit(lambda model, x: model(x))
    x = jnp.ones((2, 4))
    forward(model, x)
    model.eval()
    np.testing.assert_allclose(forward(model, x), model(x), rtol=1e-5)
    why = forward.why_retraced()
    assert "model.drop.deterministic: False → True" in why and "model.norm.use_running_average: False → True" in why


def test_rngs_move_on_as_they_do_eagerly():
    eager, jitted = nnx.Rngs(0, params=1), nnx.Rngs(0, params=1)
    draw = sx.jit(lambda rngs: (rngs.params(), rngs.dropout()))
    for _ in range(3):
        ours, theirs = draw(jitted), (eager.params(), eager.dropout())
        assert all((jax.random.key_data(a) == jax.random.key_data(b)).all() for a, b in zip(ours, theirs, strict=True))


def test_a_changed_attribute_retraces_and_is_named():
    """flax's `cached_partial` and `jit_partial` keep the old structure here, silently."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.weight, self.scale = nnx.Param(jnp.float32(2)), 2

        def __call__(self, x):
            return self.weight * x * self.scale

    model = Scaled()
    forward = sx.jit(lambda model, x: model(x))
    assert float(forward(model, 1.0)) == 4
    model.scale = 3
    assert float(forward(model, 1.0)) == 6
    assert forward.why_retraced() == "model.scale: 2 → 3"
    model.scale = 2
    assert float(forward(model, 1.0)) == 4


def test_attributes_added_removed_and_replaced_outside():
    class Box(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.float32(1))

    box = Box()
    total = sx.jit(lambda box: sum(jax.tree.leaves(nnx.state(box, nnx.Param))))
    assert float(total(box)) == 1
    box.more = nnx.Param(jnp.float32(10))
    assert float(total(box)) == 11 and "box.more" in total.why_retraced() and "is new" in total.why_retraced()
    box.weight = nnx.Param(jnp.float32(5))  # another cell, the same structure
    assert float(total(box)) == 15
    box.weight = box.more
    assert float(total(box)) == 10 and "the same as" in total.why_retraced()
    del box.more
    assert float(total(box)) == 10


def test_structure_changed_inside_is_carried_out():
    class Grow(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])
            self.cache = nnx.data(None)
            self.calls = 0

        @sx.jit
        def step(self, x):
            self.layers.append(nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
            self.cache = nnx.Cache(x)
            self.alias = self.layers[0]
            self.calls += 1
            return self.layers[-1](x)

    model = Grow()
    first, layers = model.layers[0], model.layers
    model.step(jnp.ones(2))
    assert model.layers is layers and len(layers) == 2 and layers[0] is first and model.alias is first
    assert model.calls == 1 and isinstance(model.cache, nnx.Cache)
    np.testing.assert_allclose(model.cache[...], [1, 1])
    model.step(jnp.ones(2))
    assert len(layers) == 3 and model.calls == 2
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))


def test_modules_in_containers_returned_and_created():
    make = sx.jit(lambda seed: {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), "old": None})
    model = make(jax.random.key(0))["model"]
    assert isinstance(model, nnx.Linear) and model.kernel.shape == (2, 3)

    @sx.jit
    def step(tree, x):
        tree[0]["model"].bias[...] += x
        return [tree[0]["model"], (tree[0]["model"].kernel,)]

    returned, (kernel,) = step([{"model": model}], 1.0)
    assert returned is model and kernel is model.kernel
    np.testing.assert_allclose(model.bias[...], np.ones(3))


def test_shared_and_cyclic_modules():
    class Node(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.float32(1))
            self.other = nnx.data(None)

    a, b = Node(), Node()
    a.other, b.other = b, a
    b.weight = a.weight

    @sx.jit
    def step(a, b):
        assert a.other is b and b.other is a and a.weight is b.weight
        a.weight[...] += 1
        b.weight[...] += 1

    step(a, b)
    step(b, a)
    assert float(a.weight[...]) == 5 and a.other is b


def test_variables_that_hold_trees_and_variables_of_other_types():
    class Odd(nnx.Module):
        def __init__(self):
            self.tree = nnx.Variable({"m": jnp.zeros(2), "v": jnp.ones(3)})
            self.count = nnx.BatchStat(jnp.int32(0))

    model = Odd()

    @sx.jit
    def step(model):
        tree = model.tree.get_value()
        model.tree.set_value({"m": tree["m"] + 1, "v": tree["v"]})
        model.count[...] += 1

    step(model)
    step(model)
    np.testing.assert_allclose(model.tree.get_value()["m"], [2, 2])
    assert int(model.count[...]) == 2


def test_ref_variables():
    class Held(nnx.Module):
        def __init__(self):
            self.ref = nnx.Variable(jnp.zeros(2), ref=True)
            self.plain = nnx.Param(jnp.ones(2))

    held = Held()
    ref = held.ref

    @sx.jit
    def step(held):
        held.ref[...] += held.plain[...]

    step(held)
    step(held)
    assert held.ref is ref
    np.testing.assert_allclose(held.ref[...], [2, 2])


def test_hijax_variables_are_shared_and_returned_by_identity():
    box = nnx.Variable(jnp.float32(1), hijax=True)

    @sx.jit
    def look(tree, same):
        assert tree["box"] is same
        return tree["box"], same[...] * 2

    out, value = look({"box": box}, box)
    assert out is box and float(value) == 2


def test_metadata_changed_inside_and_outside():
    variable = nnx.Param(jnp.ones(2), note="old")

    @sx.jit
    def step(variable):
        variable.set_metadata(note="new")
        variable[...] += 1

    step(variable)
    assert variable.note == "new" and float(variable[...][0]) == 2
    step(variable)
    assert "note" in step.why_retraced() and float(variable[...][0]) == 3


def test_static_attributes_that_do_not_hash():
    class Fixed(nnx.Module):
        def __init__(self, options):
            self.weight, self.options = nnx.Param(jnp.float32(2)), nnx.static(options)

    options = {"by": [3]}
    model = Fixed(options)
    read = sx.jit(lambda model: model.weight[...] * model.options["by"][0])
    assert float(read(model)) == 6
    model.options = {"by": [4]}
    assert float(read(model)) == 8


def test_closed_over_modules():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    count = nnx.Variable(jnp.int32(0))

    @sx.jit
    def step(x):
        count[...] += 1
        model.bias[...] += 1
        return model(x)

    first, second = step(jnp.ones(2)), step(jnp.ones(2))
    np.testing.assert_allclose(second - first, [1, 1], rtol=1e-6)
    assert int(count[...]) == 2


def test_an_exception_midway_leaves_modules_as_they_were():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    closed = nnx.Variable(jnp.float32(0))
    kernel, attributes = model.kernel[...], dict(vars(model))

    @sx.jit
    def fail(model):
        model.kernel[...] += 1
        closed[...] += 1
        model.extra = nnx.Param(jnp.ones(1))
        model.kernel = nnx.Param(jnp.zeros(1))
        raise RuntimeError("midway")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="midway"):
            fail(model)
    assert vars(model) == attributes and model.kernel[...] is kernel and float(closed[...]) == 0


def test_nested_with_the_transforms_of_nnx():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    count = nnx.Variable(jnp.int32(0))

    @sx.jit
    def inner(model, count, x):
        count[...] += 1
        return model(x).sum()

    @nnx.jit
    def outer(model, count, x):
        return inner(model, count, x) + inner(model, count, x)

    value = outer(model, count, jnp.ones(2))
    np.testing.assert_allclose(value, 2 * model(jnp.ones(2)).sum(), rtol=1e-5)
    assert int(count[...]) == 2
    gradients = nnx.grad(inner)(model, count, jnp.ones(2))
    assert int(count[...]) == 3
    np.testing.assert_allclose(gradients["kernel"][...], np.ones((2, 2)))

    @sx.jit
    def scanned(model, x):
        return nnx.scan(lambda carry, _: (carry + model(x), None), length=3)(jnp.zeros(2), None)[0]

    np.testing.assert_allclose(scanned(model, jnp.ones(2)), 3 * model(jnp.ones(2)), rtol=1e-5)


def test_donated_state_of_a_module():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    step = sx.jit(train, donate="state")
    x, y = jnp.ones((8, 4)), jnp.zeros((8, 2))
    before = model.first.kernel[...]
    compiled = step.lower(model, optimizer, x, y).compile()
    written = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngKey))))
    assert abs(compiled.memory_analysis().alias_size_in_bytes - written) <= 8
    for _ in range(2):
        step(model, optimizer, x, y)
    assert before.is_deleted() and np.isfinite(np.asarray(model.first.kernel[...])).all()


def test_what_is_only_read_is_not_returned():
    model = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(n)) for n in range(4)])
    values = list(jax.tree.leaves(nnx.state(model)))
    forward = sx.jit(lambda model, x: model(x))
    compiled = forward.lower(model, jnp.ones(16)).compile()
    assert compiled.memory_analysis().output_size_in_bytes == 64
    forward(model, jnp.ones(16))
    assert all(a is b for a, b in zip(values, jax.tree.leaves(nnx.state(model)), strict=True))


# ---- graph=False, graph_updates=False, cached_partial ---------------------------------------------------------------


def test_tree_mode_refuses_sharing_by_both_paths():
    shared = nnx.Param(jnp.float32(1))
    step = sx.jit(lambda a, b: None, graph=False)
    with pytest.raises(
        sx.StateError, match=r"(?s)does not support Variable aliasing.*found at paths.*a\['x'\] and b\[0\]"
    ):
        step({"x": shared}, [shared])
    with pytest.raises(sx.StateError, match=r"(?s)does not support Variable aliasing.*v and result\[0\]"):
        sx.jit(lambda v: [v], graph=False)(shared)
    loop = [nnx.Param(jnp.float32(1))]
    loop.append(loop)
    with pytest.raises(sx.StateError, match=r"(?s)loop and loop\[1\]: a node below itself"):
        sx.jit(lambda loop: None, graph=False)(loop)


def test_without_graph_updates_only_values_change():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.float32(1)), nnx.Param(jnp.float32(2))

    pair = Pair()
    a, b = pair.a, pair.b

    @sx.jit(graph=True, graph_updates=False)
    def swap(pair):
        pair.a[...] += 10
        pair.a, pair.b = pair.b, pair.a
        pair.more = nnx.Param(jnp.float32(0))

    swap(pair)
    assert pair.a is a and pair.b is b and not hasattr(pair, "more") and float(a[...]) == 11


def test_cached_partial_never_keeps_an_old_structure():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.scale = 2.0
    cached = nnx.cached_partial(sx.jit(lambda model, x: model(x) * model.scale), model)
    x = jnp.ones(2)
    np.testing.assert_allclose(cached(x), model(x) * 2, rtol=1e-6)
    model.bias[...] += 1
    np.testing.assert_allclose(cached(x), model(x) * 2, rtol=1e-6)


# ---- memory and threads ---------------------------------------------------------------------------------------------


def test_entries_do_not_keep_modules_alive():
    forward = sx.jit(lambda model, x: model(x))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    alive = weakref.ref(model)
    array = weakref.ref(model.kernel[...])
    for _ in range(3):
        forward(model, jnp.ones(2))
    forward.lower(model, jnp.ones(2)).compile()
    del model
    gc.collect()
    assert alive() is None and array() is None


def test_eight_threads_on_eight_modules():
    errors = []
    start = threading.Barrier(8)

    @sx.jit
    def step(model, x):
        model.bias[...] += 1
        return model(x)

    def work(n):
        try:
            model = nnx.Linear(2, 2 + n % 2, rngs=nnx.Rngs(n))
            expected = np.asarray(model(jnp.ones(2)))
            start.wait()
            for call in range(20):
                np.testing.assert_allclose(step(model, jnp.ones(2)), expected + call + 1, rtol=1e-5)
        except Exception as error:  # noqa: BLE001  reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_the_sharding_of_variables_is_kept():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    sharding = NamedSharding(MESH, P("a", "b"))
    model.kernel[...] = jax.device_put(model.kernel[...], sharding)

    @sx.jit
    def step(model, x):
        model.kernel[...] = model.kernel[...].T + x
        return model(x)

    for _ in range(3):
        step(model, jnp.ones(8))
        assert model.kernel[...].sharding.is_equivalent_to(sharding, 2)


def test_bound_methods_of_modules_are_refused():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        sx.ArgumentError, match=r"(?s)bound methods of modules \(Linear.__call__\).*jit\(Linear.__call__\)"
    ):
        sx.jit(model.__call__)
