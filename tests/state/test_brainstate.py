"""brainstate, unmodified: its States and Modules under shardax.jit and shard_map, inside and around its own transforms."""

import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

bs = pytest.importorskip("brainstate", reason="needs brainstate")

MESH = sx.make_mesh("x=8")

KINDS = [bs.State, bs.ParamState, bs.ShortTermState, bs.LongTermState, bs.HiddenState, bs.BatchState, bs.DelayState]


# ---- jit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_closed_over_states_of_every_sort(kind):
    state = kind(jnp.zeros(3))

    @sx.jit
    def step(x):
        state.value = state.value + x
        return state.value.sum()

    assert [float(step(jnp.ones(3))) for _ in range(3)] == [3, 6, 9]
    assert not isinstance(state.value, jax.core.Tracer) and type(state) is kind


def test_group_and_tree_states_keep_their_names():
    group = bs.HiddenGroupState(jnp.zeros((2, 3)))
    tree = bs.HiddenTreeState({"v": jnp.zeros(2), "w": jnp.ones(2)})

    @sx.jit
    def step(x):
        group.set_value({"0": x})
        tree.set_value({"v": tree.get_value("w") + x})

    step(jnp.ones(2))
    np.testing.assert_array_equal(group.get_value("0"), np.ones(2))
    np.testing.assert_array_equal(tree.get_value("v"), np.full(2, 2))


def test_states_hold_trees_and_units():
    unit = pytest.importorskip("brainunit", reason="needs brainunit")
    layer = bs.ParamState({"w": jnp.ones((2, 2)), "b": jnp.zeros(2)})
    voltage = bs.HiddenState(jnp.ones(2) * unit.mV)

    @sx.jit
    def step(x):
        layer.value = {"w": layer.value["w"] * 2, "b": layer.value["b"] + x}
        voltage.value = voltage.value + 2 * unit.mV

    step(jnp.ones(2))
    step(jnp.ones(2))
    np.testing.assert_array_equal(layer.value["w"], np.full((2, 2), 4))
    assert unit.math.allclose(voltage.value, 5 * jnp.ones(2) * unit.mV)


def test_only_what_was_written_returns():
    read, written = bs.ParamState(jnp.ones(3)), bs.State(jnp.zeros(3))

    @sx.jit
    def step():
        written.value = read.value * 2

    step()
    before = read.value
    step()
    assert read.value is before
    assert len(jax.tree.leaves(step.eval_shape())) == 0
    assert step.lower().compile().memory_analysis().output_size_in_bytes < 3 * 4 + 16


def test_metadata_names_and_tags_are_structure():
    state = bs.ParamState(jnp.ones(()), name="gain", tag="slow")
    traces = []

    @sx.jit
    def step():
        traces.append((state.name, state.tag))
        return state.value

    step(), step()
    state.add_tag("fast")
    step()
    state.name = "gain2"
    step(), step()
    assert len(traces) == 3 and traces[-1] == ("gain2", {"slow", "fast"})


def test_modules_are_arguments_and_may_grow():
    model = bs.nn.Sequential(bs.nn.Linear(4, 8), bs.nn.ReLU(), bs.nn.Linear(8, 2))
    x = jnp.ones((3, 4))
    want = model(x)
    before = model.layers[0].weight

    @sx.jit
    def step(model, x):
        model.seen = bs.ShortTermState(x.sum())
        weight = model.layers[0].weight
        weight.value = jax.tree.map(jnp.zeros_like, weight.value)
        return want

    np.testing.assert_allclose(sx.jit(lambda model, x: model(x))(model, x), want, rtol=1e-6)
    step(model, x)
    assert model.layers[0].weight is before and float(before.value["weight"].sum()) == 0
    assert isinstance(model.seen, bs.ShortTermState) and float(model.seen.value) == 12
    assert set(map(type, model.states().values())) == {bs.ParamState, bs.ShortTermState}


def test_modules_are_results():
    @sx.jit
    def make(scale):
        model = bs.nn.Linear(2, 3)
        model.weight.value = jax.tree.map(lambda leaf: leaf * 0 + scale, model.weight.value)
        return model

    model = make(2.0)
    np.testing.assert_allclose(model(jnp.ones(2)), np.full(3, 6))
    model.weight.value = jax.tree.map(jnp.zeros_like, model.weight.value)  # a State like any other


def test_shared_states_are_one_and_a_closed_over_argument_is_itself():
    shared = bs.ParamState(jnp.ones(()))

    @sx.jit
    def step(pair):
        pair["a"].value = pair["a"].value + 1
        return pair["b"].value + shared.value

    assert float(step({"a": shared, "b": shared})) == 4
    assert float(shared.value) == 2


def test_state_sharding_finds_states_by_type_and_tag():
    model = bs.nn.Linear(8, 16)
    model.weight.add_tag("wide")
    for where in ({"wide": P("x")}, {bs.ParamState: P("x")}, {lambda path, _: path == ("weight",): P("x")}):
        step = sx.jit(lambda model, x: model(x), in_shardings=(sx.StateSharding({**where, ...: P()}), P()))
        with jax.set_mesh(MESH):
            step(model, jnp.ones((2, 8)))
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(model.weight.value)} == {P("x")}


def test_donation():
    state = bs.State(jnp.zeros(64))

    @sx.jit(donate="state")
    def step():
        state.value = state.value + 1

    step()
    before = state.value
    step()
    assert before.is_deleted() and float(state.value[0]) == 2


def test_the_default_generator_is_found_and_moves_on():
    @sx.jit
    def draw():
        return bs.random.rand(2)

    bs.random.seed(3)
    first = [draw(), draw()]
    assert len(np.unique(np.concatenate(first))) == 4
    assert not isinstance(bs.random.DEFAULT.value, jax.core.Tracer)
    bs.random.seed(3)
    np.testing.assert_array_equal([draw(), draw()], first)
    bs.random.seed(3)
    plain = [bs.random.rand(2), bs.random.rand(2)]
    np.testing.assert_allclose(plain, first, rtol=1e-6)


def test_a_generator_of_ones_own_and_one_that_was_deleted():
    rng = bs.random.RandomState(0)
    draw = sx.jit(lambda: rng.uniform(size=2))
    first = draw()
    jax.block_until_ready(rng.value)
    rng.value.delete()
    assert not np.array_equal(draw(), first)  # brainstate seeds it anew when it is read


def test_inside_and_around_brainstates_own_transforms():
    weight, count = bs.ParamState(jnp.float32(2)), bs.State(0)

    @sx.jit
    def inner(x):
        count.value += 1
        return weight.value * x

    @bs.transform.jit
    def outer(x):
        return inner(x) + inner(x)

    assert float(outer(3.0)) == 12 and float(outer(1.0)) == 4 and int(count.value) == 4

    @sx.jit
    def trained(x):
        gradients = bs.transform.grad(lambda: weight.value * x, weight)()
        weight.value = weight.value - gradients
        return bs.transform.for_loop(lambda _: count.value, jnp.arange(2))

    trained(0.5)
    assert float(weight.value) == 1.5

    gradients = bs.transform.grad(lambda: inner(3.0), weight)()
    assert float(gradients) == 3 and int(count.value) == 5


def test_a_trace_stack_sees_the_states_of_a_compiled_call():
    read, written = bs.State(jnp.ones(())), bs.State(jnp.zeros(()))

    @sx.jit
    def step():
        written.value = written.value + read.value

    step()
    with bs.StateTraceStack() as stack:
        step()
    assert set(stack.get_write_states()) == {written} and read in stack.states
    assert float(written.value) == 2


def test_hooks_see_what_is_written():
    state, seen = bs.State(jnp.zeros(())), []
    state.register_hook("write_after", lambda context: seen.append(context.value))

    @sx.jit
    def step():
        state.value = state.value + 1

    step(), step()
    concrete = [float(value) for value in seen if not isinstance(value, jax.core.Tracer)]
    assert concrete == [1, 2]


def test_exceptions_leave_states_and_stacks_as_they_were():
    state, hidden = bs.State(jnp.zeros(())), bs.State(jnp.zeros(()))

    class Opaque:
        __slots__ = ("act",)

    opaque = Opaque()
    opaque.act = lambda: setattr(hidden, "value", hidden.value + 1)

    @sx.jit
    def step():
        state.value = state.value + 1
        opaque.act()
        bs.transform.grad(lambda: state.value, state)()
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        step()
    assert float(state.value) == float(hidden.value) == 0
    with bs.StateTraceStack() as stack:
        assert not stack.states


def test_the_tree_check_of_brainstate_holds_inside():
    state = bs.State({"a": jnp.zeros(())})

    @sx.jit
    def step():
        with bs.check_state_value_tree():
            state.value = {"b": jnp.zeros(())}

    with pytest.raises(ValueError, match="does not match with the origin tree structure"):
        step()
    assert set(state.value) == {"a"}


def test_foreign_transforms():
    state = bs.State(jnp.zeros(()), name="total")
    add = sx.jit(lambda x: setattr(state, "value", state.value + x))
    read = sx.jit(lambda x: state.value + x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(sx.ForeignTraceError, match=r"State 'total' is written under a jax transformation"):
            jax.jit(add)(1.0)
    assert float(state.value) == 0
    other = bs.State(jnp.ones(()), name="other")
    read = sx.jit(lambda x: other.value + x)
    with pytest.warns(UserWarning, match="State 'other' is read under a jax transformation that is not shardax's"):
        jax.jit(read)(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(read)(1.0)


def test_a_raw_transform_inside_that_writes_a_state_is_named():
    total = bs.State(jnp.zeros(()))

    def inner(x):
        total.value = x * 2
        return x

    with pytest.raises(sx.ForeignTraceError, match=r"closed-over total: was written under (.|\n)*return the value"):
        sx.jit(jax.grad(inner))(1.0)
    assert float(total.value) == 0


def test_threads_share_a_state():
    state = bs.State(jnp.zeros(()))
    steps = [sx.jit(lambda x, n=n: state.value + x + n) for n in range(8)]
    found = {}

    def work(n):
        found[n] = [float(steps[n](1.0)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [1.0 + n] * 20 for n in range(8)}
    assert not isinstance(state.value, jax.core.Tracer)


# ---- shard_map ------------------------------------------------------------------------------------------------------


def test_shard_map_reads_replicated_and_writes_cut_states():
    weight, buffer = bs.ParamState(jnp.float32(2)), bs.ShortTermState(jnp.zeros(16))

    def step(x):
        assert buffer.value.shape == (2,)
        buffer.value = buffer.value + x * weight.value
        return buffer.value

    mapped = sx.shard_map(step, MESH, (P("x"),), P("x"), state_in_specs={buffer: P("x")})
    mapped(jnp.arange(16.0))
    np.testing.assert_allclose(mapped(jnp.arange(16.0)), 4 * np.arange(16))
    assert buffer.value.sharding == NamedSharding(MESH, P("x"))
    assert float(weight.value) == 2


def test_shard_map_over_a_module_in_the_closure_and_as_argument():
    model = bs.nn.Linear(4, 8)
    x = jnp.ones((16, 4))
    want = model(x)
    by_closure = sx.shard_map(lambda x: model(x), MESH, P("x"), P("x"))  # noqa: PLW0108  a closure is meant
    by_argument = sx.shard_map(lambda model, x: model(x), MESH, (P(), P("x")), P("x"))
    np.testing.assert_allclose(by_closure(x), want, rtol=1e-6)
    np.testing.assert_allclose(by_argument(model, x), want, rtol=1e-6)


def test_every_shard_draws_its_own_numbers_from_the_default_generator():
    draw = sx.shard_map(lambda: bs.random.rand(1), MESH, (), P("x"))
    bs.random.seed(1)
    both = [draw(), draw()]
    assert np.unique(both).size == 16
    bs.random.seed(1)
    np.testing.assert_array_equal([draw(), draw()], both)
    same = sx.shard_map(lambda: bs.random.rand(1), MESH, (), P("x"), fold_rng=False, check_vma=False)
    assert np.unique(same()).size == 1


def test_a_second_eager_call_never_traces():
    traces = []
    state = bs.State(jnp.zeros(8))

    def step(x):
        traces.append(None)
        state.value = state.value + x

    mapped = sx.shard_map(step, MESH, P("x"), None, state_in_specs=P("x"))
    mapped(jnp.ones(8))
    count = len(traces)
    mapped(jnp.ones(8))
    assert len(traces) == count <= 2 and float(state.value[0]) == 2


def test_a_hidden_state_is_discovered_at_local_shapes():
    hidden = bs.State(jnp.arange(64.0).reshape(8, 8))

    class Opaque:
        __slots__ = ("state",)

    opaque = Opaque()
    opaque.state = hidden

    def transpose(x):
        opaque.state.value = jax.lax.all_to_all(opaque.state.value + 0 * x, "x", 1, 0, tiled=True)

    sx.shard_map(transpose, MESH, P("x"), None, state_in_specs=P("x"), state_out_specs=P(None, "x"))(jnp.ones((8, 8)))
    np.testing.assert_allclose(hidden.value, np.arange(64).reshape(8, 8))


def test_shard_map_under_brainstates_jit_and_grad():
    weight = bs.ParamState(jnp.float32(3))
    mapped = sx.shard_map(lambda x: weight.value * x, MESH, P("x"), P("x"))
    x = jnp.arange(8.0)
    np.testing.assert_allclose(bs.transform.jit(mapped)(x), 3 * np.arange(8))
    assert float(bs.transform.grad(lambda: mapped(x).sum(), weight)()) == 28
    assert float(weight.value) == 3


def test_clashes_and_shared_writes_name_the_state():
    model = bs.nn.Linear(4, 4)
    buffer = bs.State(jnp.zeros(16), name="buffer")

    def clash(x):
        buffer.value = buffer.value + x

    with pytest.raises(sx.ShardMapError, match=r"closed-over buffer: is replicated(.|\n)*state_in_specs"):
        sx.shard_map(clash, MESH, P("x"), None)(jnp.ones(16))

    def shared(x):
        model.weight.value = jax.tree.map(lambda leaf: leaf + x.sum(), model.weight.value)

    with pytest.raises(sx.ShardMapError, match=r"closed-over model\.weight: is written with what depends on the shard"):
        sx.shard_map(shared, MESH, P("x"), None)(jnp.ones(16))
    assert not isinstance(buffer.value, jax.core.Tracer) and float(buffer.value.sum()) == 0
