"""shard_map over closed-over states and plain arrays: every line of its contract, and where brainstate's fails."""

import logging
import warnings
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = sx.make_mesh("x=8")
GRID = sx.make_mesh("data=4,model=2")


def sharded(value, *axes, mesh=MESH):
    return jax.device_put(value, NamedSharding(mesh, P(*axes)))


@contextmanager
def count_compilations():
    """Every program that JAX compiles meanwhile, by name."""
    compiled = []

    class Listener(logging.Handler):
        def emit(self, record):
            if "Compiling" in record.getMessage():
                compiled.append(record.getMessage()[:60])

    listener, logger = Listener(), logging.getLogger("jax")
    logger.addHandler(listener)
    try:
        with jax.log_compiles():
            yield compiled
    finally:
        logger.removeHandler(listener)


# ---- states ---------------------------------------------------------------------------------------------------------


def test_states_read_and_written_in_the_closure():
    scale, total = sx.State(jnp.float32(3)), sx.State(jnp.zeros(()))

    def step(block):
        total.value += jax.lax.psum(block.sum(), "x")
        return block * scale.value

    mapped = sx.shard_map(step, MESH, in_specs=(P("x"),), out_specs=P("x"))
    out = mapped(jnp.arange(16.0))
    np.testing.assert_allclose(out, 3 * np.arange(16))
    assert out.sharding.is_equivalent_to(NamedSharding(MESH, P("x")), 1)
    mapped(jnp.arange(16.0))
    assert float(total.value) == 240 and float(scale.value) == 3


def test_a_state_with_a_spec_is_cut_and_comes_back_cut():
    buffer = sx.State(jnp.zeros(16))

    def accumulate(block):
        assert buffer.value.shape == (2,)
        buffer.value = buffer.value + block

    sx.shard_map(accumulate, MESH, P("x"), None, state_in_specs={buffer: P("x")})(jnp.arange(16.0))
    np.testing.assert_allclose(buffer.value, np.arange(16))
    assert buffer.value.sharding.spec == P("x")


def test_the_out_spec_of_a_state_is_its_in_spec_unless_given():
    rows, whole = sx.State(jnp.ones(8)), sx.State(jnp.zeros(8))

    def swap(block):
        rows.value = rows.value + block
        whole.value = block  # written cut, though it was read whole

    sx.shard_map(swap, MESH, P("x"), None, state_in_specs={rows: P("x")}, state_out_specs={whole: P("x")})(
        jnp.arange(8.0)
    )
    np.testing.assert_allclose(rows.value, 1 + np.arange(8))
    np.testing.assert_allclose(whole.value, np.arange(8))
    assert rows.value.sharding.spec == whole.value.sharding.spec == P("x")


def test_one_spec_for_all_states():
    states = [sx.State(jnp.full(8, float(n))) for n in range(3)]

    def step(block):
        for state in states:
            assert state.value.shape == (1,)
            state.value = state.value + block

    sx.shard_map(step, MESH, P("x"), None, state_in_specs=P("x"), state_out_specs=P("x"))(jnp.ones(8))
    assert [float(state.value[0]) for state in states] == [1, 2, 3]


def test_a_state_that_holds_a_tree_has_one_spec():
    layer = sx.State({"w": jnp.ones((8, 2)), "b": jnp.zeros(8)})

    def step(x):
        assert layer.value["w"].shape == (1, 2) and layer.value["b"].shape == (1,)
        layer.value = {**layer.value, "b": layer.value["b"] + 1}
        return x @ layer.value["w"].T

    sx.shard_map(step, MESH, P(), P(None, "x"), state_in_specs={layer: P("x")})(jnp.ones((3, 2)))
    np.testing.assert_allclose(layer.value["b"], np.ones(8))


def test_states_reached_through_objects_and_lists_and_hidden_ones():
    class Model:
        def __init__(self):
            self.layers = [sx.State(jnp.ones(())), {"inner": sx.State(jnp.ones(()))}]

    model, hidden = Model(), sx.State(jnp.ones(()))
    table = {"f": lambda: setattr(hidden, "value", hidden.value + 1)}  # nothing that a walk of the closure opens

    class Opaque:
        __slots__ = ("act",)

    opaque = Opaque()
    opaque.act = table["f"]

    def step(x):
        opaque.act()
        model.layers[1]["inner"].value = model.layers[0].value + 1
        return x

    mapped = sx.shard_map(step, MESH, P("x"), P("x"))
    mapped(jnp.ones(8))
    mapped(jnp.ones(8))
    assert float(hidden.value) == 3 and float(model.layers[1]["inner"].value) == 2


def test_a_state_of_an_argument_follows_the_spec_of_the_argument():
    cell = sx.State(jnp.arange(8.0))

    def step(cell, x):
        assert cell.value.shape == (1,)
        cell.value = cell.value * x
        return cell.value

    out = sx.shard_map(step, MESH, (P("x"), P()), P("x"))(cell, 2.0)
    np.testing.assert_allclose(out, cell.value)
    assert cell.value.sharding.spec == P("x")


def test_states_move_to_the_mesh_once():
    weight = sx.State(jnp.ones((8, 4)))
    mapped = sx.shard_map(lambda x: x @ weight.value.T, MESH, P(), P(None, "x"), state_in_specs={weight: P("x")})
    mapped(jnp.ones((2, 4)))
    placed = weight.value
    assert placed.sharding == NamedSharding(MESH, P("x"))
    mapped(jnp.ones((2, 4)))
    assert weight.value is placed


# ---- arguments and results ------------------------------------------------------------------------------------------


def test_one_spec_serves_all_arguments():
    out = sx.shard_map(lambda a, b: a + b, MESH, P("x"), P("x"))(jnp.arange(8.0), np.ones(8))
    np.testing.assert_allclose(out, 1 + np.arange(8))


def test_trees_of_specs():
    def step(batch, rate):
        assert batch["x"].shape == (2, 3) and batch["pair"][0].shape == (1,) and batch["pair"][1].shape == (4,)
        return {"x": batch["x"] * rate, "mean": jax.lax.pmean(batch["pair"][0], "x")}

    in_specs = ({"x": P("x"), "pair": (P("x"), P())}, None)
    mapped = sx.shard_map(step, MESH, in_specs, {"x": P("x"), "mean": P()})
    out = mapped({"x": jnp.ones((16, 3)), "pair": (jnp.arange(8.0), jnp.ones(4))}, 2.0)
    assert out["x"].shape == (16, 3) and float(out["mean"][0]) == 3.5


def test_keyword_arguments_are_replicated_and_configuration_stays_what_it_is():
    def step(x, *, shift, mode):
        assert shift.shape == (4,) and mode == "add"
        return x + shift.sum()

    mapped = sx.shard_map(step, MESH, P("x"), P("x"))
    np.testing.assert_allclose(mapped(jnp.zeros(8), shift=jnp.ones(4), mode="add"), np.full(8, 4))


@pytest.mark.parametrize("mesh", ["x=8", "x=2", {"x": 4}], ids=str)
def test_meshes_by_text_take_the_devices_of_the_mesh_in_force(mesh):
    concrete = sx.make_mesh(mesh)
    with jax.set_mesh(concrete):
        out = sx.shard_map(lambda x: x + jax.lax.axis_size("x"), mesh, P("x"), P("x"))(jnp.zeros(8))
    assert float(out[0]) == concrete.size


@pytest.mark.parametrize("wrap", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_meshes_by_text_take_the_devices_that_are_there(wrap):
    out = wrap(sx.shard_map(lambda x: x + jax.lax.axis_size("x"), "x=4", P("x"), P("x")))(jnp.zeros(8))
    assert float(out[0]) == 4 == len(out.sharding.device_set)
    huge = sx.shard_map(lambda x: jax.lax.psum(x, "x"), "x=4096", P("x"), P())
    assert jax.eval_shape(huge, jax.ShapeDtypeStruct((8192,), jnp.float32)).shape == (2,)


def test_without_a_mesh_the_one_in_force_counts_and_may_change():
    mapped = sx.shard_map(lambda x: x * jax.lax.axis_size("x"), in_specs=P("x"), out_specs=P("x"))
    for size in (8, 4):
        with jax.set_mesh(sx.make_mesh(f"x={size}")):
            assert float(mapped(jnp.ones(8))[0]) == size
    with pytest.warns(DeprecationWarning), sx.make_mesh("x=2"):
        assert float(mapped(jnp.ones(8))[0]) == 2
    with pytest.raises(sx.NoMeshError, match=r"shard_map needs a mesh"):
        mapped(jnp.ones(8))


def test_arrays_committed_elsewhere_are_placed():
    x = jax.device_put(jnp.arange(8.0), jax.devices()[3])
    state = sx.State(jax.device_put(jnp.ones(8), jax.devices()[5]))
    mapped = sx.shard_map(lambda x: x + state.value, MESH, P("x"), P("x"), state_in_specs=P("x"))
    for _ in range(2):
        np.testing.assert_allclose(mapped(x), 1 + np.arange(8))


def test_results_lie_as_out_specs_say():
    out = sx.shard_map(lambda x: (x, jax.lax.psum(x, "x")), MESH, P("x"), (P("x"), P(None)))(jnp.ones(8))
    assert [part.sharding for part in out] == [NamedSharding(MESH, P("x")), NamedSharding(MESH, P(None))]


def test_decorators_methods_inner_and_older_spellings():
    class Model:
        def __init__(self):
            self.count = sx.State(0)

        @sx.shard_map(mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
        def step(self, x):
            self.count.value += 1
            return x + self.count.value

    model = Model()
    np.testing.assert_allclose(model.step(jnp.zeros(8)), np.ones(8))
    assert int(model.count.value) == 1

    double = sx.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_rep=False)
    np.testing.assert_allclose(double.inner(jnp.ones(8)), np.full(8, 2))
    assert double.__name__ == "<lambda>" and "shard_map(" in repr(double)
    untyped = sx.shard_map(lambda x: x.sum(), MESH, P("x"), P(), check_rep=False)  # check_vma would refuse
    assert float(untyped(jnp.ones(8))) == 1
    partly = sx.shard_map(lambda x: x * jax.lax.axis_size("data"), GRID, P("data"), P("data"), auto={"model"})
    np.testing.assert_allclose(jax.jit(partly)(jnp.ones(8)), np.full(8, 4))


# ---- under transforms -----------------------------------------------------------------------------------------------


def make_step():
    weight, count = sx.State(jnp.float32(2)), sx.State(0)

    def step(x):
        count.value += 1
        return x * weight.value

    return sx.shard_map(step, MESH, P("x"), P("x")), weight, count


def test_under_shardax_jit():
    mapped, weight, count = make_step()

    @sx.jit
    def outer(x):
        weight.value = weight.value + 1
        return mapped(mapped(x)).sum()

    assert float(outer(jnp.ones(8))) == 8 * 9
    assert float(outer(jnp.ones(8))) == 8 * 16
    assert (float(weight.value), int(count.value)) == (4, 4)


def test_under_shardax_jit_with_donation():
    buffer = sx.State(sharded(jnp.zeros(1024), "x"))

    def add(x):
        buffer.value = buffer.value + x

    outer = sx.jit(sx.shard_map(add, MESH, P("x"), None, state_in_specs=P("x")), donate="state")
    outer(jnp.ones(1024))
    before = buffer.value
    outer(jnp.ones(1024))
    assert before.is_deleted() and float(buffer.value[0]) == 2 and buffer.value.sharding.spec == P("x")
    assert outer.lower(jnp.ones(1024)).compile().memory_analysis().alias_size_in_bytes == 1024 * 4 // 8


def test_under_grad_and_vmap():
    weight = sx.State(jnp.float32(3))
    mapped = sx.shard_map(lambda x: weight.value * x**2, MESH, P("x"), P("x"))
    np.testing.assert_allclose(jax.grad(lambda x: mapped(x).sum())(jnp.arange(8.0)), 6 * np.arange(8))
    np.testing.assert_allclose(jax.vmap(mapped)(jnp.ones((4, 8))), np.full((4, 8), 3))
    with pytest.warns(UserWarning, match="is read under a jax transformation"):
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: mapped(x).sum()))(jnp.arange(8.0)), 6 * np.arange(8))


def test_gradient_of_a_state_through_jit():
    weight = sx.State(jnp.float32(3))
    mapped = sx.shard_map(lambda w, x: w * x, MESH, (P(), P("x")), P("x"))

    @sx.jit
    def step(x):
        loss = lambda w: mapped(w, x).sum()  # noqa: E731
        weight.value = weight.value - 0.5 * jax.grad(loss)(weight.value)

    step(jnp.arange(8.0))
    assert float(weight.value) == 3 - 14


def test_inside_another_shard_map_over_the_other_axis():
    offset = sx.State(jnp.arange(2.0))
    inner = sx.shard_map(
        lambda x: x + offset.value, None, P("model"), P("model"), state_in_specs=P("model"), axis_names={"model"}
    )
    outer = sx.shard_map(inner, GRID, P("data"), P("data"), axis_names={"data"})
    with jax.set_mesh(GRID):
        out = sx.jit(outer)(jnp.zeros((8,)))
    np.testing.assert_allclose(out, np.tile([0.0, 1.0], 4))


# ---- meshes of every type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["auto", "explicit", ("explicit", "auto"), ("auto", "explicit")], ids=str)
def test_every_axis_type_eagerly_and_jitted(types):
    mesh = sx.make_mesh("data=4,model=2", axis_types=types)
    weight, seen = sx.State(jnp.arange(4.0)), sx.State(jnp.zeros(8))

    def step(x):
        seen.value = seen.value + x[:, 0]
        return x * weight.value

    mapped = sx.shard_map(
        step, mesh, P("data", "model"), P("data", "model"),
        state_in_specs={weight: P("model"), seen: P("data")}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        for call in (mapped, sx.jit(mapped)):
            out = call(jnp.ones((8, 4)))
            np.testing.assert_allclose(out, np.tile(np.arange(4.0), (8, 1)))
    np.testing.assert_allclose(seen.value, np.full(8, 2))
    assert seen.value.sharding.spec == P("data")


def test_some_axes_stay_automatic():
    weight = sx.State(sharded(jnp.ones((4, 4)), None, "model", mesh=GRID))

    def step(x):
        assert x.shape == (2, 4)
        weight.value = weight.value * 2
        return jax.lax.psum(x @ weight.value, "data")

    mapped = sx.shard_map(step, GRID, P("data"), P(), axis_names={"data"})
    with jax.set_mesh(GRID):
        for call in (sx.jit(mapped), mapped):
            np.testing.assert_allclose(call(jnp.ones((8, 4)))[0, 0], 16 * float(weight.value[0, 0]))
    assert float(weight.value[0, 0]) == 4


# ---- better: local shapes, no recompilation -------------------------------------------------------------------------


def test_discovery_is_at_local_shapes():
    hidden = sx.State(jnp.arange(64.0).reshape(8, 8))

    class Opaque:
        __slots__ = ("read",)

    opaque = Opaque()
    opaque.read = lambda: hidden.value

    def transpose(x):
        assert x.shape == (1, 8)
        mine = opaque.read()
        assert mine.shape in ((1, 8), (8, 8))  # whole while nobody knows of it, then cut
        hidden.value = jax.lax.all_to_all(mine, "x", 1, 0, tiled=True)
        return jax.lax.all_to_all(x, "x", 1, 0, tiled=True)

    data = jnp.arange(64.0).reshape(8, 8)
    out = sx.shard_map(transpose, MESH, P("x"), P(None, "x"), state_in_specs=P("x"), state_out_specs=P(None, "x"))(data)
    np.testing.assert_allclose(out, data)
    np.testing.assert_allclose(hidden.value, data)


def test_a_second_eager_call_never_compiles():
    traces = []
    state, count = sx.State(np.zeros(8, np.float32)), sx.State(0)

    def step(x, scale):
        traces.append(x.shape)
        state.value = state.value + x.sum()
        count.value += 1
        return x * scale

    mapped = sx.shard_map(step, MESH, (P("x"), P()), P("x"), check_vma=False)
    mapped(jnp.ones(8), 2.0)
    once = len(traces)
    with count_compilations() as compiled:
        for n in range(4):
            mapped(jnp.ones(8), float(n))
    assert not compiled, compiled
    assert len(traces) == once
    mapped(jnp.ones(16), 2.0)
    assert traces[-1] == (2,) and len(traces) == once + 1


def test_rebinding_the_state_is_seen():
    state = sx.State(jnp.float32(1))
    mapped = sx.shard_map(lambda x: x * state.value, MESH, P("x"), P("x"))
    assert float(mapped(jnp.ones(8))[0]) == 1
    state = sx.State(jnp.float32(5))
    assert float(mapped(jnp.ones(8))[0]) == 5


# ---- better: foreign transforms -------------------------------------------------------------------------------------


def test_a_read_state_under_a_foreign_jit_warns_once():
    state = sx.State(jnp.float32(5))
    mapped = sx.shard_map(lambda x: x * state.value, MESH, P("x"), P("x"))
    with pytest.warns(
        UserWarning, match=r"State\(float32\[\]\) is read under a jax transformation that is not shardax's"
    ):
        np.testing.assert_allclose(jax.jit(mapped)(jnp.ones(8)), np.full(8, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: mapped(x) + 1)(jnp.ones(8))


def test_a_written_state_under_a_foreign_jit_is_an_error():
    mapped, _, count = make_step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(sx.ForeignTraceError, match=r"written under a jax transformation(.|\n)*use shardax.jit"):
            jax.jit(mapped)(jnp.ones(8))
    assert count.value == 0


# ---- better: random numbers -----------------------------------------------------------------------------------------


def draws(rng, **options):
    draw = sx.shard_map(lambda: jax.random.normal(rng.split(), (1,)), MESH, (), P("x"), **options)
    return np.asarray(draw()), np.asarray(draw())


def test_every_shard_draws_its_own_numbers():
    first, second = draws(sx.RngState(0))
    assert len(np.unique([first, second])) == 16
    again = draws(sx.RngState(0))
    np.testing.assert_array_equal([first, second], again)


@pytest.mark.parametrize(("rng", "options"), [(sx.RngState(0, fold=False), {}), (sx.RngState(0), {"fold_rng": False})])
def test_unless_told_not_to(rng, options):
    first, second = draws(rng, check_vma=False, **options)
    assert len(np.unique(first)) == len(np.unique(second)) == 1 and first[0] != second[0]


def test_a_key_that_is_cut_is_not_folded():
    rng = sx.RngState(jax.random.split(jax.random.key(0), 8))
    draw = sx.shard_map(lambda: jax.random.normal(rng.value[0], (1,)), MESH, (), P("x"), state_in_specs=P("x"))
    np.testing.assert_allclose(draw(), jax.vmap(lambda key: jax.random.normal(key, (1,)))(rng.value)[:, 0])


def test_a_new_seed_set_inside_stays():
    rng = sx.RngState(0)

    def reseed(x):
        rng.value = jax.random.key(7)
        return x

    sx.shard_map(reseed, MESH, P("x"), P("x"))(jnp.ones(8))
    assert (jax.random.key_data(rng.value) == jax.random.key_data(jax.random.key(7))).all()


def test_folded_draws_over_two_axes_and_batches_of_keys():
    rng = sx.RngState(jax.random.split(jax.random.key(0), 3))
    draw = sx.shard_map(lambda: jax.vmap(jax.random.normal)(rng.value)[None], GRID, (), P(("data", "model")))
    assert np.unique(draw()).size == 24


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_failure_leaves_every_state_as_it_was():
    first, second = sx.State(jnp.zeros(8)), sx.State(jnp.zeros(()))

    def step(x):
        first.value = first.value + x
        second.value = second.value + 1
        raise RuntimeError("midway")

    before = first.value, second.value
    with pytest.raises(RuntimeError, match="midway"):
        sx.shard_map(step, MESH, P("x"), P("x"), state_in_specs={first: P("x")})(jnp.ones(8))
    np.testing.assert_array_equal(first.value, before[0])
    assert not isinstance(second.value, jax.core.Tracer) and float(second.value) == 0


def test_whole_state_against_cut_data_says_so():
    buffer = sx.State(jnp.zeros(16))

    def accumulate(x):
        buffer.value = buffer.value + x

    mapped = sx.shard_map(accumulate, MESH, P("x"), P())
    with pytest.raises(sx.ShardMapError, match=r"closed-over buffer: is replicated(.|\n)*state_in_specs=") as caught:
        mapped(jnp.ones(16))
    assert "every shard holds these states whole" in str(caught.value) and caught.value.__cause__ is not None
    np.testing.assert_array_equal(buffer.value, np.zeros(16))


def test_shards_that_write_different_things_to_one_state():
    total = sx.State(jnp.zeros(2))

    def add(x):
        total.value = total.value + x

    with pytest.raises(
        sx.ShardMapError, match=r"closed-over total: is written with what depends on the shard(.|\n)*psum"
    ):
        sx.shard_map(add, MESH, P("x"), None)(jnp.ones(16))
    assert float(total.value.sum()) == 0


@pytest.mark.parametrize(
    ("in_specs", "args", "message"),
    [
        ((P("x"),), 2, r"in_specs has 1 entries for 2 positional arguments(.|\n)*one entry per positional argument"),
        ((P("x"), P(), P()), 2, r"in_specs has 3 entries for 2 positional"),
        ((P("y"), P()), 2, r"a: 'y' is no axis of the mesh \('x',\)"),
        ((P("x"), P("xx")), 2, r"b: 'xx' is no axis of the mesh \('x',\); did you mean 'x'"),
        (({"p": P("x")}, P()), 2, r"(?i)prefix|structure|pytree"),
        ((sx.StateSharding({...: P("x")}), P()), 2, r"StateSharding(.|\n)*argument that holds no state"),
    ],
)
def test_bad_specs(in_specs, args, message):
    with pytest.raises((sx.StateError, sx.UnknownAxisError, ValueError), match=message):
        sx.shard_map(lambda a, b: a + b, MESH, in_specs, P())(*[jnp.ones(8)] * args)


def test_every_array_that_does_not_divide_is_listed():
    state = sx.State(jnp.ones((8, 3)))
    mapped = sx.shard_map(
        lambda a, b: state.value, GRID, (P("data"), {"k": P(None, "model")}), None, state_in_specs=P(None, "model")
    )
    with pytest.raises(sx.SpecError) as caught:
        mapped(jnp.ones(6), {"k": jnp.ones((2, 5))})
    text = str(caught.value)
    assert "shard_map cannot cut these arrays evenly" in text
    assert "a: dim 0: 6 does not divide by 'data' (4)" in text
    assert "b['k']: dim 1: 5 does not divide by 'model' (2)" in text
    assert "closed-over state: dim 1: 3 does not divide by 'model' (2)" in text


def test_arguments_that_are_no_arrays():
    mapped = sx.shard_map(lambda x, mode: x, MESH, (P("x"), None), P("x"))
    with pytest.raises(sx.ArgumentError, match=r"mode\['how'\]: 'add' \(str\) is no array(.|\n)*keyword argument"):
        mapped(jnp.ones(8), {"how": "add"})


def test_states_that_are_no_arrays():
    name = sx.State("adam")
    with pytest.raises(sx.NonArrayStateError, match=r"closed-over name: 'adam' \(str\) is no array"):
        sx.shard_map(lambda x: x * len(name.value), MESH, P("x"), P("x"))(jnp.ones(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"state_in_specs": ["x"]},
            r"state_in_specs is list(.|\n)*a PartitionSpec for all, or \{state: PartitionSpec\}",
        ),
        ({"state_out_specs": {"a": P()}}, r"state_out_specs maps str(.|\n)*states, or what holds some, as keys"),
        ({"axis_names": {"z"}}, r"axis_names: 'z' is no axis of the mesh"),
    ],
)
def test_bad_options(arguments, message):
    with pytest.raises(sx.ShardaxError, match=message):
        sx.shard_map(lambda x: x, MESH, P("x"), P("x"), **arguments)(jnp.ones(8))


def test_what_cannot_be_mapped():
    class Model:
        pass

    for what in (Model, 3, "f"):
        with pytest.raises(sx.ArgumentError, match="shard_map needs a function"):
            sx.shard_map(what, MESH, P(), P())
    with pytest.raises(sx.ArgumentError, match="shard_map needs out_specs"):
        sx.shard_map(lambda x: x, MESH, P())


def test_types_of_axes_are_left_alone():
    mesh = sx.make_mesh("x=8", axis_types="explicit")
    out = sx.shard_map(lambda x: x, mesh, P("x"), P("x"))(jnp.ones(8))
    assert out.sharding.mesh.axis_types == (AxisType.Explicit,)


# ---- specs that cannot be meant -------------------------------------------------------------------------------------


def test_specs_that_are_none_are_named():
    with pytest.raises(sx.ShardMapError, match=r"in_specs\[0\]\['a'\]: 'x' \(str\) is no spec"):
        sx.shard_map(lambda x: x, MESH, in_specs=({"a": "x"},), out_specs=P("x"))
    with pytest.raises(sx.ShardMapError, match=r"out_specs: 'x' \(str\) is no spec"):
        sx.shard_map(lambda x: x, MESH, in_specs=P("x"), out_specs="x")


def test_trees_of_other_specs_are_named():
    x = jnp.arange(8.0)
    with pytest.raises(
        sx.ShardMapError, match=r"(?s)do not match the arguments.*tree: PyTreeDef\({'a': \*}\) is given"
    ):
        sx.shard_map(lambda tree: tree["a"], MESH, in_specs=({"b": P("x")},), out_specs=P("x"))({"a": x})
    with pytest.raises(sx.ShardMapError, match=r"(?s)key path\n +shard_map out_specs\nAt"):
        sx.shard_map(lambda x: x, MESH, in_specs=P("x"), out_specs=(P("x"), P("x")))(x)
    with pytest.raises(sx.ShardMapError, match=r"out_specs is P\(\) which implies"):
        sx.shard_map(lambda x: x.sum(), MESH, in_specs=P("x"), out_specs=P())(x)


def test_auto_names_axes_of_the_mesh_and_agrees_with_axis_names():
    with pytest.raises(sx.UnknownAxisError, match="auto: 'modle' is no axis"):
        sx.shard_map(lambda x: x, GRID, P("data"), P("data"), auto={"modle"})
    with pytest.raises(sx.ArgumentError, match=r"auto=\['model'\] leaves \['data'\] to map over"):
        sx.shard_map(lambda x: x, GRID, P("data"), P("data"), auto={"model"}, axis_names={"model"})
    both = sx.shard_map(lambda x: 2 * x, GRID, P("data"), P("data"), auto={"model"}, axis_names={"data"})
    assert both(jnp.ones(4)).tolist() == [2] * 4
