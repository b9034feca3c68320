"""shard_map over Flax NNX modules as arguments: flax's contract, and where flax's own fails."""

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

nnx = pytest.importorskip("flax.nnx", reason="needs flax")

MESH = sx.make_mesh("x=8")
TENSOR = sx.StateSharding({nnx.PathContains("kernel"): P(None, "x"), nnx.PathContains("bias"): P("x")})


def linear(**options):
    return nnx.Linear(4, 16, rngs=nnx.Rngs(0), **options)


def test_a_module_under_a_state_sharding():
    model, x = linear(), jnp.ones((2, 4))
    want = model(x)

    def apply(model, x):
        assert model.kernel.shape == (4, 2) and model.bias.shape == (2,)
        return model(x)

    np.testing.assert_allclose(
        sx.shard_map(apply, mesh=MESH, in_specs=(TENSOR, P()), out_specs=P(None, "x"))(model, x), want, rtol=1e-6
    )
    assert model.kernel[...].sharding == NamedSharding(MESH, P(None, "x"))
    assert model.bias[...].sharding.spec == P("x")


@pytest.mark.parametrize("graph", [True, False])
def test_nnx_prefix_and_flax_state_sharding_say_the_same(graph):
    model = linear()
    by_path = {nnx.PathContains("kernel"): P(None, "x"), nnx.PathContains("bias"): P("x")}
    for spec in (nnx.prefix(model, by_path, graph=graph), nnx.StateSharding(by_path)):
        out = sx.shard_map(lambda m: m.kernel[...], mesh=MESH, in_specs=(spec,), out_specs=P(None, "x"))(model)
        np.testing.assert_array_equal(out, model.kernel[...])


def test_what_a_module_writes_comes_back_and_what_it_only_reads_stays():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.BatchStat(jnp.zeros(()))
            self.rows = nnx.Param(jnp.arange(8.0))

    def step(model, x):
        model.count[...] += jax.lax.psum(x.sum(), "x")
        return model.rows[...] * x

    model = Counter()
    mapped = sx.shard_map(
        step,
        mesh=MESH,
        in_specs=(sx.StateSharding({"rows": P(), nnx.Param: P("x"), ...: P()}), P("x")),
        out_specs=P("x"),
    )
    mapped(model, jnp.ones(8))
    rows = model.rows[...]
    np.testing.assert_allclose(mapped(model, jnp.ones(8)), np.arange(8))
    assert float(model.count[...]) == 16 and model.rows[...] is rows


def test_structure_may_change_inside():
    model = linear()

    def grow(model, x):
        model.seen = nnx.Variable(jax.lax.pmean(x.sum(), "x"))
        model.note = "grown"
        return x

    sx.shard_map(grow, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))(model, jnp.ones(8))
    assert float(model.seen[...]) == 1 and model.note == "grown"


def test_shared_variables_are_one():
    shared = nnx.Param(jnp.ones(()))
    pair = nnx.List([nnx.Dict(a=shared), nnx.Dict(b=shared)])

    def step(pair):
        pair[0]["a"][...] += 1
        return pair[1]["b"][...]

    assert float(sx.shard_map(step, mesh=MESH, in_specs=P(), out_specs=P())(pair)) == 2
    assert pair[0]["a"] is pair[1]["b"] is shared and float(shared[...]) == 2


def test_one_variable_under_two_specs_names_both_paths():
    shared = nnx.Param(jnp.ones(8))
    with pytest.raises(sx.StateShardingError, match=r"Inconsistent aliasing in in_specs(.|\n)*a\['p'\] and b\['q'\]"):
        sx.shard_map(lambda a, b: None, mesh=MESH, in_specs=(P("x"), P()), out_specs=None)({"p": shared}, {"q": shared})


def test_an_uncovered_variable():
    with pytest.raises(ValueError, match="No axis found for"):
        sx.shard_map(lambda m: None, mesh=MESH, in_specs=(sx.StateSharding({nnx.BatchStat: P()}),), out_specs=None)(
            linear()
        )


def test_modules_are_returned():
    def make(x):
        model = linear()
        model.bias[...] += jax.lax.pmean(x.sum(), "x")
        return model

    model = sx.shard_map(make, mesh=MESH, in_specs=P("x"), out_specs=P())(jnp.ones(8))
    assert isinstance(model, nnx.Linear) and model.kernel.shape == (4, 16) and float(model.bias[0]) == 1


def test_states_are_returned_under_specs_of_their_own():
    def make(x):
        return {"s": sx.State(x * 2), "n": nnx.Param(x), "y": jax.lax.psum(x, "x")}

    out = sx.shard_map(make, MESH, P("x"), {"s": P("x"), "n": P("x"), "y": P()})(jnp.arange(8.0))
    np.testing.assert_array_equal(out["s"].value, 2 * np.arange(8))
    assert out["n"][...].sharding.spec == P("x") and float(out["y"][0]) == 28


def test_closed_over_variables_and_modules_have_specs():
    model, head = linear(), nnx.Param(jnp.ones(16))
    x = jnp.ones((2, 4))
    want = model(x).sum(-1)

    def apply(x):
        assert model.kernel.shape == (4, 2) and head.shape == (2,)
        return jax.lax.psum(model(x) @ head[...], "x")

    mapped = sx.shard_map(apply, MESH, P(), P(), state_in_specs=[(model, TENSOR), (head, P("x"))])
    np.testing.assert_allclose(mapped(x), want, rtol=1e-5)
    assert model.bias[...].sharding.spec == P("x")


def test_frameworks_mix_in_one_function():
    brainstate = pytest.importorskip("brainstate", reason="needs brainstate")
    own, inside, outside = sx.State(jnp.zeros(8)), brainstate.State(jnp.zeros(())), brainstate.ParamState(jnp.ones(()))
    closed, model = nnx.BatchStat(jnp.zeros(())), linear()

    def step(model, outside, x):
        own.value = own.value + 1
        inside.value = inside.value + 1
        outside.value = outside.value * 2
        closed[...] += 1
        return model(x)

    mapped = sx.shard_map(step, MESH, (P(), P(), P("x")), P("x"), state_in_specs={own: P("x")})
    for call in (mapped, mapped, sx.jit(mapped)):
        call(model, outside, jnp.ones((8, 4)))
    assert [float(v) for v in (own.value[0], inside.value, outside.value, closed[...])] == [3, 3, 8, 3]


def test_keyword_arguments_work_also_modules():
    model = linear()
    mapped = sx.shard_map(lambda x, *, model, scale: model(x) * scale, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_allclose(mapped(jnp.ones((8, 4)), model=model, scale=2.0), 2 * model(jnp.ones((8, 4))), rtol=1e-6)


def test_an_optimizer_steps_data_parallel_like_on_one_device():
    optax = pytest.importorskip("optax", reason="needs optax")

    def make():
        model = linear()
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model, optimizer, x, mean):
        loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, jax.tree.map(mean, gradients))
        return mean(loss)

    x = jax.random.normal(jax.random.key(0), (16, 4))
    alone, optimizer = make()
    want = [step(alone, optimizer, x, lambda g: g) for _ in range(3)]
    model, optimizer = make()
    mapped = sx.shard_map(
        lambda m, o, x: step(m, o, x, lambda g: jax.lax.pmean(g, "x")), mesh=MESH, in_specs=(P(), P(), P("x")), out_specs=P(), check_vma=False
    )  # fmt: skip
    got = [mapped(model, optimizer, x) for _ in range(3)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], alone.kernel[...], rtol=1e-4)
    assert int(optimizer.step[...]) == 3


def test_under_jit_and_grad():
    model = linear()
    mapped = sx.shard_map(lambda m, x: m(x), mesh=MESH, in_specs=(TENSOR, P()), out_specs=P(None, "x"))

    @sx.jit
    def step(model, x):
        gradients = nnx.grad(lambda m: mapped(m, x).sum())(model)
        model.kernel[...] -= gradients.kernel[...]

    before = model.kernel[...]
    step(model, jnp.ones((2, 4)))
    np.testing.assert_allclose(before - model.kernel[...], np.full((4, 16), 2))


def test_a_failure_leaves_the_module_as_it_was():
    model = linear()
    before = model.kernel[...]

    def step(model):
        model.kernel[...] *= 2
        model.extra = nnx.Param(jnp.ones(()))
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        sx.shard_map(step, mesh=MESH, in_specs=P(), out_specs=None)(model)
    np.testing.assert_array_equal(model.kernel[...], before)
    assert not hasattr(model, "extra")


# ---- where flax's own differs ---------------------------------------------------------------------------------------


def test_streams_draw_other_numbers_on_every_shard():
    draw = lambda rngs: jax.random.normal(rngs.dropout(), (1,))  # noqa: E731
    spread = sx.shard_map(draw, mesh=MESH, in_specs=P(), out_specs=P("x"))
    rngs = nnx.Rngs(dropout=0)
    assert np.unique([spread(rngs), spread(rngs)]).size == 16
    assert int(rngs.dropout.count[...]) == 2
    assert (jax.random.key_data(rngs.dropout.key[...]) == jax.random.key_data(jax.random.key(0))).all()
    same = sx.shard_map(draw, mesh=MESH, in_specs=P(), out_specs=P("x"), fold_rng=False, check_vma=False)
    assert np.unique(same(nnx.Rngs(dropout=0))).size == 1


def test_dropout_masks_differ_between_shards():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    out = sx.shard_map(lambda m, x: m(x), mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))(model, jnp.ones((8, 64)))
    assert len(np.unique(np.asarray(out), axis=0)) == 8


def test_a_second_eager_call_never_compiles_for_any_module_of_the_structure():
    traces = []

    def apply(model, x):
        traces.append(None)
        return model(x)

    mapped = sx.shard_map(apply, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
    for _ in range(3):
        mapped(linear(), jnp.ones((8, 4)))
    assert len(traces) == 1
    mapped(linear(use_bias=False), jnp.ones((8, 4)))
    assert len(traces) == 2


def test_threads_with_modules_of_their_own():
    class Counter(nnx.Module):
        def __init__(self):
            self.counts = nnx.BatchStat(jnp.zeros(8))

    def step(model, x):
        model.counts[...] += x  # no collective: eight programs at once would wait for each other's devices

    mapped = sx.shard_map(step, mesh=MESH, in_specs=P("x"), out_specs=None)
    models = [Counter() for _ in range(8)]

    def work(place):
        for _ in range(10):
            mapped(models[place], jnp.full(8, float(place)))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(model.counts[0]) for model in models] == [10.0 * place for place in range(8)]


def test_a_foreign_jit_that_writes_is_refused_and_one_that_reads_is_warned_of():
    total, scale = nnx.Param(jnp.zeros(())), nnx.BatchStat(jnp.ones(()))

    def write(x):
        total[...] += 1
        return x

    mapped = sx.shard_map(write, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with (
        pytest.raises(sx.ForeignTraceError, match="Param is written under a jax transformation"),
        pytest.warns(UserWarning),
    ):
        jax.jit(mapped)(jnp.ones(8))
    assert float(total[...]) == 0
    read = sx.shard_map(lambda x: x * scale, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with pytest.warns(UserWarning, match="BatchStat is read under a jax transformation that is not shardax's"):
        jax.jit(read)(jnp.ones(8))


def test_tree_mode_refuses_shared_variables():
    shared = nnx.Param(jnp.ones(()))
    mapped = sx.shard_map(lambda a, b: None, mesh=MESH, in_specs=P(), out_specs=None, graph=False)
    with pytest.raises(sx.StateError, match=r"shard_map with graph=False(.|\n)*a\[0\] and b\[0\]"):
        mapped([shared], [shared])


def test_nothing_keeps_a_module_alive():
    model = linear()
    mapped = sx.shard_map(lambda m: m.kernel[...], mesh=MESH, in_specs=(TENSOR,), out_specs=P(None, "x"))
    mapped(model), mapped(model)
    gone = weakref.ref(model), weakref.ref(model.kernel[...])
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_bound_methods_of_modules_are_refused():
    with pytest.raises(ValueError, match=r"shard_map does not take bound methods of modules \(Linear.__call__\)"):
        sx.shard_map(linear().__call__, mesh=MESH, in_specs=None, out_specs=None)


def test_the_error_of_a_shared_state_names_its_path():
    def step(model, x):
        model.bias[...] += x

    with pytest.raises(sx.ShardMapError, match=r"model\.bias: is written with what depends on the shard"):
        sx.shard_map(step, mesh=MESH, in_specs=(P(), P("x")), out_specs=None)(linear(), jnp.ones(8))
    with pytest.raises(sx.SpecError, match=r"model\.kernel: dim 0: 4 does not divide by 'x' \(8\)"):
        sx.shard_map(lambda model: None, mesh=MESH, in_specs=P("x"), out_specs=None)(linear())
