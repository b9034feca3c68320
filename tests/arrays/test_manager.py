"""PartitionManager: in force where it is entered, and arrays laid out by what their axes mean."""

import asyncio
import contextvars
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

TRAIN, DECODE = sx.MODE_TRAIN, sx.MODE_DECODE


@pytest.fixture(autouse=True)
def clean_registry():
    sx.PartitionAxis.clear_registered_axes()
    yield
    sx.PartitionAxis.clear_registered_axes()


@pytest.fixture
def mesh():
    mesh = sx.make_mesh("fsdp=2,tp=4")
    with jax.set_mesh(mesh):
        yield mesh


def manager_over(**fields):
    return sx.PartitionManager(sx.PartitionAxis(**fields))


# ---- Better: what the original gets wrong ---------------------------------------------------------------------------


def test_nested_with_does_not_leak_the_manager():
    outer, inner = manager_over(), manager_over(head_axis="x")
    assert sx.get_current_partition_manager() is None
    with outer:
        with inner, outer, inner:
            assert sx.get_current_partition_manager() is inner
        assert sx.get_current_partition_manager() is outer
        with outer:
            assert sx.get_current_partition_manager() is outer
        assert sx.get_current_partition_manager() is outer
    assert sx.get_current_partition_manager() is None


def test_one_manager_in_two_threads_at_once():
    manager, barrier = manager_over(), threading.Barrier(2, timeout=60)

    def work(_):
        assert sx.get_current_partition_manager() is None
        for _ in range(20):
            barrier.wait()
            with manager:
                barrier.wait()
                assert sx.get_current_partition_manager() is manager
            assert sx.get_current_partition_manager() is None

    with manager, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [None, None]


def test_jit_drops_stale_rules_after_override():
    """Also on jax 0.10, which takes a static argument for itself whatever its hash says."""
    manager, traced = manager_over(), []

    def lookup():
        return lambda manager, x: traced.append(manager.resolve(["custom"], TRAIN)) or x

    by_number, by_name = jax.jit(lookup(), static_argnums=0), jax.jit(lookup(), static_argnames="manager")
    sx.PartitionAxis.register("custom", "head_axis")
    for jitted in (by_number, by_name):
        jitted(manager, x=1.0), jitted(manager, x=1.0)
    assert traced == [P("tp"), P("tp")]
    sx.PartitionAxis.register("custom", "expert_axis", override=True)
    for jitted in (by_number, by_name):
        jitted(manager, x=1.0), jitted(manager, x=1.0)
    assert traced[2:] == [P("ep"), P("ep")]


def test_jit_drops_stale_rules_of_a_manager_it_closes_over(mesh):
    manager = manager_over()
    sx.PartitionAxis.register("rows", "fsdp")
    jitted = jax.jit(lambda x: manager.shard(x, ["rows"], TRAIN))
    x = jnp.ones((8, 8))
    assert jitted(x).sharding.spec == P("fsdp")
    sx.PartitionAxis.register("rows", "tp", override=True)
    assert jitted(x).sharding.spec == P("tp")


def test_the_hash_follows_the_registry():
    manager = manager_over()
    before = hash(manager)
    sx.PartitionAxis.register("custom", "head_axis")
    during = hash(manager)
    sx.PartitionAxis.register("custom", "expert_axis", override=True)
    assert len({before, during, hash(manager)}) == 3
    sx.PartitionAxis.clear_registered_axes()
    assert hash(manager) == before == hash(manager_over())
    assert hash(manager_over(head_axis="x")) != before


@pytest.mark.parametrize("mode", ["decode", "train", "", "TRAIN"])
def test_an_unknown_mode_is_an_error(mesh, mode):
    manager = manager_over()
    for call in (
        lambda: manager.resolve([sx.BATCH], mode),
        lambda: manager.shard(jnp.ones(8), [sx.BATCH], mode),
        lambda: sx.apply_logical_sharding(jnp.ones(8), manager, [sx.BATCH], mode),
    ):
        with pytest.raises(sx.AxisRuleError, match=f"Unknown mode '{mode}'"):
            call()


@pytest.mark.parametrize("auto_correct", [True, False])
def test_two_dimensions_on_one_mesh_axis_fail_before_jax_sees_them(mesh, auto_correct):
    with pytest.raises(sx.SpecError, match=r"'__HEAD__' \(dim 0\) and '__EMBED__' \(dim 1\) are both laid over 'tp'"):
        manager_over().shard(jnp.ones((8, 8)), [sx.HEAD, sx.EMBED], TRAIN, auto_correct=auto_correct)


# ---- making one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["dp", None, {"batch_axis": "dp"}, sx.PartitionAxis])
def test_only_a_partition_axis_makes_a_manager(wrong):
    with pytest.raises(TypeError, match="Expected PartitionAxis"):
        sx.PartitionManager(wrong)


def test_a_manager_is_compared_by_value_and_survives_pickling():
    manager = sx.PartitionManager(paxis=sx.PartitionAxis(head_axis="x"))
    assert manager.paxis == sx.PartitionAxis(head_axis="x")
    for twin in (pickle.loads(pickle.dumps(manager)), copy.copy(manager), copy.deepcopy(manager)):
        assert twin == manager and hash(twin) == hash(manager) and twin is not manager
    assert manager != manager_over() and manager != "manager"
    assert repr(manager) == "PartitionManager(PartitionAxis(head_axis='x'))"
    with pytest.raises(AttributeError):
        manager.paxis = sx.PartitionAxis()


def test_the_last_one_made_is_kept_and_no_other():
    first = manager_over()
    gone = weakref.ref(first)
    assert sx.get_partition_manager() is first
    second = manager_over(head_axis="x")
    with first:
        assert sx.get_partition_manager() is second, "entering is not making"
    del first
    gc.collect()
    assert gone() is None
    assert sx.get_partition_manager() is second


def test_equal_managers_share_one_trace():
    traces = []
    jitted = jax.jit(lambda manager, x: traces.append(manager) or x, static_argnums=0)
    jitted(manager_over(), 1.0), jitted(manager_over(), 1.0), jitted(manager_over(head_axis="x"), 1.0)
    assert len(traces) == 2


def test_a_manager_in_a_tree_is_static():
    leaves, treedef = jax.tree.flatten({"m": manager_over(), "p": sx.PartitionAxis(), "x": 1})
    assert leaves == [1] and treedef == jax.tree.structure({"m": manager_over(), "p": sx.PartitionAxis(), "x": 2})


# ---- in force -------------------------------------------------------------------------------------------------------


def test_with_gives_the_manager_and_lets_errors_through():
    manager = manager_over()
    with pytest.raises(RuntimeError, match="mine"), manager as entered:
        assert entered is manager
        raise RuntimeError("mine")
    assert sx.get_current_partition_manager() is None


def test_current_is_local_to_the_context_and_last_is_not():
    manager, seen = manager_over(), []
    with manager:
        thread = threading.Thread(
            target=lambda: seen.extend([sx.get_current_partition_manager(), sx.get_partition_manager()])
        )
        thread.start()
        thread.join()
        assert contextvars.copy_context().run(sx.get_current_partition_manager) is manager
    assert seen == [None, manager]


def test_tasks_do_not_see_each_others_managers():
    async def task(manager, steps):
        with manager:
            for _ in range(steps):
                await asyncio.sleep(0)
                assert sx.get_current_partition_manager() is manager
        assert sx.get_current_partition_manager() is None

    async def both():
        await asyncio.gather(task(manager_over(), 3), task(manager_over(head_axis="x"), 5), task(manager_over(), 1))

    asyncio.run(both())


def test_tasks_leave_no_trace_in_the_key_of_jit(mesh):
    """JAX keeps its context per thread; tasks that interleave in one thread must not leave theirs behind."""
    test_tasks_do_not_see_each_others_managers()
    test_jit_traces_again_when_the_last_one_made_is_another(mesh)


def test_leaving_where_it_was_not_entered_is_an_error():
    with pytest.raises(sx.NoManagerError, match="not entered"):
        manager_over().__exit__(None, None, None)


def test_jit_traces_again_under_another_manager_in_force(mesh):
    """As with `jax.set_mesh`: what is in force is part of the key of the cache."""
    x = jnp.ones((8, 8))
    jitted = jax.jit(lambda x: sx.apply_logical_sharding(x, axes=[sx.HEAD], mode=TRAIN))
    with manager_over():
        assert jitted(x).sharding.spec == P("tp")
    with manager_over(head_axis="fsdp"):
        assert jitted(x).sharding.spec == P("fsdp")
        with manager_over():
            assert jitted(x).sharding.spec == P("tp")
        assert jitted(x).sharding.spec == P("fsdp")


def test_jit_traces_again_when_the_last_one_made_is_another(mesh):
    x = jnp.ones((8, 8))
    jitted = jax.jit(lambda x: sx.apply_logical_sharding(x, axes=[sx.HEAD], mode=TRAIN))
    manager_over()
    assert jitted(x).sharding.spec == P("tp")
    manager_over(head_axis="fsdp")
    assert jitted(x).sharding.spec == P("fsdp")
    manager_over()
    assert jitted(x).sharding.spec == P("tp")


# ---- resolve --------------------------------------------------------------------------------------------------------


def test_axes_and_mode_or_dynamic_axes():
    manager = manager_over()
    row = sx.DynamicShardingAxes([sx.HEAD], TRAIN)
    assert manager.resolve([sx.BATCH], TRAIN) == P(("fsdp", "dp"))
    assert manager.resolve([sx.BATCH], TRAIN, row) == P(("fsdp", "dp")), "axes and mode are both given"
    assert manager.resolve([sx.BATCH], dynamic_axes=row) == P("tp"), "the mode is missing"
    assert manager.resolve(mode=TRAIN, dynamic_axes=row) == P("tp"), "the axes are missing"
    assert manager.resolve(None, None, row) == manager.resolve(row) == P("tp")
    assert manager.resolve([sx.BATCH, sx.HEAD], np.int64(0), shape=(1, 4)) == P(("fsdp", "dp"), "tp")


def test_not_enough_to_resolve():
    manager = manager_over()
    for given, missing in (({}, "axes and mode"), ({"axes": [sx.BATCH]}, "mode"), ({"mode": TRAIN}, "axes")):
        with pytest.raises(ValueError, match=f": {missing} missing, and no dynamic axes"):
            manager.resolve(**given)
        with pytest.raises(ValueError, match="dynamic_axes"):
            manager.shard(jnp.ones(4), **given)
    with pytest.raises(ValueError, match="shape should be provided"):
        manager.resolve([sx.BATCH], 1)
    with pytest.raises(ValueError, match="Two DynamicShardingAxes"):
        manager.resolve(sx.RowWise, dynamic_axes=sx.ColumnWise)
    with pytest.raises(TypeError, match="class or instance"):
        manager.resolve(dynamic_axes=[sx.BATCH])


# ---- shard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_shard_means_the_same_eagerly_and_traced(mesh, transform):
    manager = manager_over()
    shard = transform(lambda x: manager.shard(x, [sx.BATCH, None, sx.HEAD], TRAIN))
    y = shard(jnp.arange(128.0).reshape(8, 2, 8))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", None, "tp")), 3)
    assert (np.asarray(y) == np.arange(128.0).reshape(8, 2, 8)).all()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("context", [jax.set_mesh, lambda mesh: mesh], ids=["set_mesh", "with mesh"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_shard_in_every_mesh_context(kind, context, transform):
    mesh, manager = sx.make_mesh("fsdp=2,tp=4", axis_types=kind), manager_over()
    with context(mesh):
        y = transform(lambda x: manager.shard(x, sx.HiddenStateSharding))(jnp.ones((8, 128, 64)))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", None, "tp")), 3)


def test_shard_inside_shard_map_leaves_manual_axes_alone(mesh):
    def body(x):
        assert x.shape == (4, 8)
        return manager_over().shard(x, [sx.BATCH, sx.HEAD], TRAIN)

    mapped = jax.shard_map(body, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names={"fsdp"})
    y = jax.jit(mapped)(jnp.arange(64.0).reshape(8, 8))
    assert (np.asarray(y) == np.arange(64.0).reshape(8, 8)).all()
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)


def test_shard_corrects_what_does_not_fit_and_records_it(mesh):
    with sx.corrections() as log:
        y = manager_over().shard(jnp.ones((8, 6)), [sx.BATCH, sx.HEAD], TRAIN)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 2)
    reasons = {(c.dim, c.axes, c.reason) for decision in log for c in decision.fit.corrections}
    assert reasons == {(0, ("dp",), "unknown-axis"), (1, ("tp",), "indivisible")}


def test_without_auto_correct_a_misfit_is_an_error(mesh):
    manager = manager_over(batch_axis="fsdp")
    y = manager.shard(jnp.ones((8, 8)), [sx.BATCH, sx.HEAD], TRAIN, auto_correct=False)
    assert y.sharding.spec == P("fsdp", "tp")
    for transform in (lambda f: f, jax.jit):
        shard = transform(lambda x: manager.shard(x, [sx.BATCH, sx.HEAD], TRAIN, auto_correct=False))
        with pytest.raises(sx.SpecError, match=r"6 does not divide by 'tp' \(4\)"):
            shard(jnp.ones((8, 6)))


def test_trees_and_leaves_that_are_no_arrays(mesh):
    manager = manager_over()
    tree = {"a": jnp.ones((8, 4)), "b": [np.ones((2, 8), np.float32), "text", 3, None], "c": ()}
    out = manager.shard(tree, [sx.BATCH, sx.HEAD], TRAIN)
    assert out["a"].sharding.spec == out["b"][0].sharding.spec == P("fsdp", "tp")
    assert out["b"][1:] == ["text", 3, None] and out["c"] == ()
    assert manager.shard("text", [sx.BATCH], TRAIN) == "text" and manager.shard(None, [sx.BATCH], TRAIN) is None
    with pytest.raises(sx.UnknownAxisError):
        manager.shard({}, ["__TYPO__"], TRAIN)


def test_an_integer_mode_is_read_on_each_leaf(mesh):
    manager = manager_over(batch_axis="fsdp", decode_batch_axis="tp")
    tree = {"prompt": jnp.ones((8, 4)), "token": jnp.ones((8, 1))}
    out = manager.shard(tree, [sx.BATCH], 1)
    assert out["prompt"].sharding.spec == P("fsdp") and out["token"].sharding.spec == P("tp")
    assert manager.shard(jnp.ones((8, 1)), [sx.BATCH], mode=1).sharding.spec == P("tp")


@pytest.mark.parametrize("mode", [TRAIN, 0])
def test_every_leaf_that_does_not_fit_is_listed(mesh, mode):
    tree = {"good": jnp.ones((8, 8)), "odd": jnp.ones((7, 8)), "deep": [jnp.ones((8, 6))]}
    with pytest.raises(sx.SpecError) as caught:
        manager_over(batch_axis="fsdp").shard(tree, [sx.BATCH, sx.HEAD], mode, auto_correct=False)
    assert [offence.where for offence in caught.value.offences] == ["odd", "deep/0"]


def test_shard_without_a_mesh_says_so():
    with pytest.raises(sx.NoMeshError, match="no mesh is in force"):
        manager_over().shard(jnp.ones((8, 8)), [sx.BATCH], TRAIN)


# ---- apply_logical_sharding -----------------------------------------------------------------------------------------


def test_given_then_current_then_last(mesh):
    x = jnp.ones((8, 8))
    given, current, last = manager_over(head_axis="tp"), manager_over(head_axis="fsdp"), manager_over(head_axis=None)
    ask = {"axes": [sx.HEAD], "mode": TRAIN}
    with current:
        assert sx.apply_logical_sharding(x, given, **ask).sharding.spec == P("tp")
        assert sx.apply_logical_sharding(x, **ask).sharding.spec == P("fsdp")
        assert sx.apply_logical_sharding(x, None, **ask).sharding.spec == P("fsdp")
    assert sx.apply_logical_sharding(x, **ask).sharding.is_fully_replicated
    assert last is sx.get_partition_manager()


def test_apply_takes_trees_and_dynamic_axes(mesh):
    manager = manager_over()
    out = sx.apply_logical_sharding({"q": jnp.ones((2, 8, 4, 16))}, manager, dynamic_axes=sx.AttnQSharding)
    assert out["q"].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", None, "tp")), 4)
    with pytest.raises(sx.SpecError):
        sx.apply_logical_sharding(jnp.ones((3, 4)), manager, [sx.BATCH], TRAIN, auto_correct=False)


def test_no_manager_is_an_error_that_says_what_to_do():
    code = """
import pytest, shardax as sx
assert sx.get_partition_manager() is sx.get_current_partition_manager() is None
with pytest.raises(ValueError, match=r"No PartitionManager is available[\\s\\S]*with PartitionManager"):
    sx.apply_logical_sharding(1, axes=[sx.BATCH], mode=sx.MODE_TRAIN)
"""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(TypeError, match="Expected PartitionManager, got PartitionAxis"):
        sx.apply_logical_sharding(1, sx.PartitionAxis(), [sx.BATCH], TRAIN)
