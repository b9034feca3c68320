"""State and RngState: what a cell holds, what it refuses, and that it is light."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.state import cells
from shardax.state.kinds import role_of


def test_a_cell_holds_an_array_a_tree_or_a_number():
    assert float(sx.State(1.5).value) == 1.5
    tree = {"a": jnp.ones(2), "b": (jnp.zeros(3),)}
    assert sx.State(tree).value is tree


def test_metadata_is_read_only_and_shown():
    cell = sx.State(jnp.ones((2, 3)), tag="kernel", axes=("embed", "mlp"))
    assert dict(cell.metadata) == {"tag": "kernel", "axes": ("embed", "mlp")}
    assert repr(cell) == "State(float32[2, 3], tag='kernel', axes=('embed', 'mlp'))"
    with pytest.raises(TypeError):
        cell.metadata["tag"] = "bias"  # pyright: ignore[reportIndexIssue]


def test_cells_compare_by_identity_and_hash():
    first, second = sx.State(1), sx.State(1)
    assert first != second and len({first, second, first}) == 2


def test_pickle_and_copy_keep_class_value_and_metadata():
    class Weight(sx.State):
        __slots__ = ()

    globals()["Weight"], Weight.__qualname__ = Weight, "Weight"
    cell = Weight(jnp.arange(3.0), tag="w")
    for other in (pickle.loads(pickle.dumps(cell)), copy.deepcopy(cell)):
        assert type(other) is Weight and dict(other.metadata) == {"tag": "w"}
        np.testing.assert_array_equal(other.value, cell.value)
    assert isinstance(pickle.loads(pickle.dumps(sx.RngState(3))), sx.RngState)


def test_a_cell_is_weakly_referenceable_and_dies_with_its_last_name():
    cell = sx.State(jnp.ones(2))
    alive = weakref.ref(cell)
    sx.jit(lambda given: given.value + 1)(cell)
    del cell
    gc.collect()
    assert alive() is None


def test_rng_state_moves_on_and_is_reproducible():
    first, again = sx.RngState(7), sx.RngState(7)
    assert bool((jax.random.key_data(first.split()) == jax.random.key_data(again.split())).all())
    before = jax.random.key_data(first.value)
    many = first.split(4)
    assert many.shape == (4,) and not bool((before == jax.random.key_data(first.value)).all())
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in many}) == 4


def test_rng_state_under_jit_draws_what_it_draws_eagerly():
    eager, jitted = sx.RngState(0), sx.RngState(0)

    @sx.jit
    def draw(rng):
        return jax.random.normal(rng.split(), (3,))

    for _ in range(3):
        np.testing.assert_allclose(draw(jitted), jax.random.normal(eager.split(), (3,)), rtol=1e-6)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_write_under_a_foreign_jit_is_refused_and_changes_nothing():
    count = sx.State(jnp.float32(1))

    @jax.jit
    def foreign(x):
        count.value = count.value + x
        return x

    with (
        warnings.catch_warnings(),
        pytest.raises(sx.ForeignTraceError, match=r"(?s)State is written under .*use shardax.jit"),
    ):
        warnings.simplefilter("ignore")
        foreign(1.0)
    assert float(count.value) == 1


def test_a_read_under_a_foreign_jit_warns_once():
    scale = sx.State(jnp.float32(2))
    with pytest.warns(UserWarning, match="baked in as a constant"):
        assert float(jax.jit(lambda x: x * scale.value)(3.0)) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda x: x + scale.value)(3.0)


@pytest.mark.parametrize("family", ["shardax", "flax.nnx", "brainstate"])
def test_another_cell_at_the_same_address_is_warned_of_too(family):
    pytest.importorskip(family)
    make = {"shardax": lambda: sx.State(jnp.float32(2))}
    if family == "flax.nnx":
        from flax import nnx

        make[family] = lambda: nnx.Param(jnp.float32(2))
    elif family == "brainstate":
        import brainstate

        make[family] = lambda: brainstate.State(jnp.float32(2))
    old, new = make[family](), make[family]()
    get = role_of(type(old)).get
    with pytest.warns(UserWarning, match="baked in as a constant"):
        jax.jit(lambda x: x * get(old))(3.0)
    cells._warned[id(new)] = cells._warned[
        id(old)
    ]  # what is left when the old one is gone and the new one in its place
    with pytest.warns(UserWarning, match="baked in as a constant"):
        jax.jit(lambda x: x * get(new))(3.0)


@pytest.mark.parametrize("transform", ["scan", "grad", "vmap", "cond"])
def test_a_write_inside_an_inner_transformation_is_refused(transform):
    total = sx.State(jnp.float32(0))

    def write(x):
        total.value = total.value + x
        return x

    calls = {
        "scan": lambda x: jax.lax.scan(lambda carry, y: (write(carry) + y, y), x, jnp.ones(3))[0],
        "grad": jax.grad(write),
        "vmap": lambda x: jax.vmap(write)(jnp.full(2, x)).sum(),
        "cond": lambda x: jax.lax.cond(x > 0, write, lambda y: y, x),
    }
    with pytest.raises(sx.ForeignTraceError, match="return the value and write it after"):
        sx.jit(calls[transform])(jnp.float32(1))
    assert float(total.value) == 0


def test_a_tracer_is_never_left_behind():
    kept = sx.State(jnp.float32(0))
    leak = []

    @jax.jit
    def foreign(x):
        leak.append(x)
        return x

    foreign(1.0)
    with pytest.raises(sx.LeakedTracerError, match="tracer outside every trace"):
        kept.value = leak[0]
    assert float(kept.value) == 0

    born = []

    @sx.jit
    def inside(x):
        born.append(sx.State(x))
        return x

    inside(jnp.float32(1))
    with pytest.raises(sx.LeakedTracerError, match="holds a tracer of a trace that is over"):
        _ = born[0].value


def test_a_cell_that_holds_no_array_is_refused_by_path():
    @sx.jit
    def read(cells):
        return cells["a"].value

    with pytest.raises(sx.NonArrayStateError, match=r"(?s)cells\['b'\].*(str|'text')"):
        read({"a": sx.State(jnp.ones(2)), "b": sx.State("text")})
    closed = sx.State(object())
    with pytest.raises(sx.NonArrayStateError, match="closed"):
        sx.jit(lambda x: (closed.value, x)[1])(1.0)


def test_writing_no_array_inside_is_refused_by_path_and_changes_nothing():
    cell = sx.State(jnp.float32(1))

    @sx.jit
    def spoil(given):
        given.value = "text"

    with pytest.raises(sx.NonArrayStateError, match="given"):
        spoil(cell)
    assert float(cell.value) == 1


def test_cells_seen_by_other_threads_stay_as_they_are_while_a_trace_writes_them():
    cell, seen = sx.State(jnp.float32(1)), []
    inside, done = threading.Event(), threading.Event()

    @sx.jit
    def slow(x):
        cell.value = cell.value + x
        inside.set()
        assert done.wait(20)

    worker = threading.Thread(target=slow, args=(jnp.float32(1),))
    worker.start()
    assert inside.wait(20)
    seen.append(float(cell.value))
    done.set()
    worker.join()
    assert seen == [1.0] and float(cell.value) == 2


# ---- cells born under transformations of JAX ------------------------------------------------------------------------


def doubled(x):
    """A program with a cell of its own, as a user would write it: written in its trace, read in deeper ones."""
    cell = sx.State(x)
    cell.value = cell.value * 2
    sx.jit(lambda: setattr(cell, "value", cell.value + 1))()
    return cell.value + jax.vmap(lambda y: 0 * y * cell.value)(jnp.ones(2)).sum()


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        sx.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.value_and_grad(f)(x)[0],
        lambda f: jax.jit(sx.jit(f)),
    ],
)
def test_a_cell_born_under_a_transformation_may_be_written_there(transform):
    with warnings.catch_warnings(), jax.checking_leaks():
        warnings.simplefilter("error")
        assert float(transform(doubled)(3.0)) == 7


def test_a_cell_born_under_grad_vmap_or_scan_may_be_written_there():
    assert float(jax.grad(doubled)(3.0)) == 2
    assert jax.vmap(doubled)(jnp.arange(3.0)).tolist() == [1, 3, 5]
    scan = sx.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, doubled(x)), 0, xs)[1])
    assert scan(jnp.arange(3.0)).tolist() == [1, 3, 5]


def test_a_cell_born_under_a_transformation_is_not_written_in_a_deeper_one():
    def program(x):
        cell = sx.State(x)
        jax.vmap(lambda y: setattr(cell, "value", y))(jnp.ones(2))

    with pytest.raises(sx.ForeignTraceError, match="BatchTrace"):
        jax.jit(program)(1.0)


def test_a_cell_that_outlived_its_trace_says_so():
    kept = []
    jax.jit(lambda x: kept.append(sx.State(x)))(1.0)
    for read in (lambda: kept[0].value, lambda: sx.jit(lambda cell: cell.value)(kept[0])):
        with pytest.raises(sx.LeakedTracerError, match="a trace that is over"):
            read()
    kept.clear()

    @sx.jit
    def leak(xs):
        jax.lax.scan(lambda carry, x: (kept.append(sx.State(x)), (carry, x))[1], 0.0, xs)
        return kept[0].value

    with pytest.raises(sx.LeakedTracerError, match="a trace that is over"):
        leak(jnp.ones(2))


def test_a_cell_is_not_made_of_a_tracer_outside_every_trace():
    leaked = []
    jax.jit(leaked.append)(1.0)
    with pytest.raises(sx.LeakedTracerError, match="State was given a tracer outside every trace"):
        sx.State(leaked[0])
