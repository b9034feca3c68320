"""shardax.jit over our own cells and plain containers: every argument it takes, and what is left when it fails."""

import collections
import copy
import dataclasses
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = sx.make_mesh("a=4,b=2")


def counted(function):
    """The function, and how often Python ran it."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(None)
        return function(*args, **kwargs)

    return wrapped, calls


# ---- where cells may be ---------------------------------------------------------------------------------------------


def test_cells_in_arguments_keywords_closures_and_containers():
    closed, given, named = (sx.State(jnp.float32(n)) for n in (1, 2, 3))

    @sx.jit
    def step(tree, by, *, other):
        closed.value += by
        tree["deep"][0].value += closed.value
        other.value = tree["deep"][0].value * 2
        return other.value

    assert float(step({"deep": [given]}, 10.0, other=named)) == 26
    assert [float(cell.value) for cell in (closed, given, named)] == [11, 13, 26]
    assert float(step({"deep": [given]}, by=1.0, other=named)) == 50


def test_results_may_hold_cells_old_and_new():
    @sx.jit
    def make(old, x):
        return {"old": old, "new": [sx.State(x + 1, tag="born")], "plain": x * 2, "text": "kept"}

    cell = sx.State(jnp.float32(1))
    out = make(cell, jnp.float32(3))
    assert out["old"] is cell and out["text"] == "kept" and float(out["plain"]) == 6
    born = out["new"][0]
    assert float(born.value) == 4 and dict(born.metadata) == {"tag": "born"}
    born.value = born.value + 1  # a cell like any other
    assert float(born.value) == 5 and make(cell, jnp.float32(3))["new"][0] is not born


def test_the_structure_may_change_inside():
    @sx.jit
    def grow(tree, x):
        tree["list"].append(sx.State(x))
        tree["sum"] = tree["list"][0].value + x
        tree.pop("gone", None)
        tree["alias"] = tree["list"][0]

    first = sx.State(jnp.float32(1))
    items = [first]
    tree: dict[str, Any] = {"list": items, "gone": 3}
    grow(tree, jnp.float32(5))
    assert tree["list"] is items and len(items) == 2 and float(items[1].value) == 5
    assert "gone" not in tree and float(tree["sum"]) == 6 and tree["alias"] is first
    grow(tree, jnp.float32(7))
    assert len(items) == 3 and [float(cell.value) for cell in items] == [1, 5, 7]


def test_sharing_and_cycles_are_kept():
    shared = sx.State(jnp.float32(0))
    tree: dict[str, Any] = {"a": shared, "b": [shared]}
    tree["self"] = tree

    @sx.jit
    def step(tree):
        assert tree["self"] is tree and tree["a"] is tree["b"][0]
        tree["a"].value += 1
        tree["b"][0].value += 1

    step(tree)
    step(tree)
    assert float(shared.value) == 4 and tree["b"][0] is shared


def test_one_cell_closed_over_and_given_is_one_cell():
    cell = sx.State(jnp.float32(1))

    @sx.jit
    def step(given):
        given.value += 1
        cell.value *= 10
        return given is cell

    assert bool(step(cell)) and float(cell.value) == 20
    other = sx.State(jnp.float32(1))
    assert not step(other)
    assert float(other.value) == 2 and float(cell.value) == 200
    step(cell)
    assert float(cell.value) == 2010


def test_cells_hold_trees_and_their_structure_may_change():
    cell = sx.State({"m": jnp.zeros(2), "v": jnp.ones(2)})

    @sx.jit
    def step(given, x):
        tree = given.value
        given.value = {"m": tree["m"] + x, "v": tree["v"], "count": jnp.int32(1)}

    step(cell, 2.0)
    np.testing.assert_allclose(cell.value["m"], [2, 2])
    step(cell, 2.0)
    assert set(cell.value) == {"m", "v", "count"} and float(cell.value["m"][0]) == 4


def test_a_tree_that_is_changed_in_place_inside_a_cell_is_a_write():
    cell = sx.State({"m": jnp.zeros(2)})

    @sx.jit
    def step(given):
        given.value["m"] = given.value["m"] + 1

    step(cell)
    step(cell)
    np.testing.assert_allclose(cell.value["m"], [2, 2])


@dataclasses.dataclass
class Plain:
    weight: sx.State
    scale: float = 2.0
    history: list = dataclasses.field(default_factory=list)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weight: sx.State
    bias: Any


@pytest.mark.parametrize("cls", [Plain, Registered])
def test_dataclasses_that_hold_cells(cls):
    model = cls(sx.State(jnp.float32(3)), 2.0)
    twin = model

    @sx.jit
    def step(model, x):
        model.weight.value += x
        return model.weight.value

    assert float(step(model, 1.0)) == 4 and float(step(twin, 1.0)) == 5
    assert float(model.weight.value) == 5


def test_equinox_modules_that_hold_cells():
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        weight: jax.Array
        count: sx.State
        name: str = eqx.field(static=True)
        scale: float = 2.0

        def __call__(self, x):
            self.count.value += 1
            return self.weight * x * self.scale

    body, calls = counted(lambda layer, x: layer(x))
    step = sx.jit(body)
    layer = Layer(jnp.ones(2), sx.State(0), "first")
    np.testing.assert_allclose(step(layer, 3.0), [6, 6])
    np.testing.assert_allclose(step(eqx.tree_at(lambda m: m.weight, layer, 2 * layer.weight), 3.0), [12, 12])
    assert int(layer.count.value) == 2 and len(calls) == 1
    step(eqx.tree_at(lambda m: m.scale, layer, 5.0), 1.0)
    assert len(calls) == 2  # a Python number in a module is configuration


def test_refs_given_and_made():
    ref = jax.new_ref(jnp.zeros(2))

    @sx.jit
    def step(tree):
        tree["ref"][...] += 1
        tree["cell"].value += 1
        return tree["ref"]

    tree = {"ref": ref, "cell": sx.State(jnp.float32(0))}
    assert step(tree) is ref and step(tree) is ref
    np.testing.assert_allclose(ref[...], [2, 2])


def test_methods_and_callables():
    class Counter:
        def __init__(self):
            self.count = sx.State(0)

        @sx.jit
        def bump(self, by):
            self.count.value += by
            return self.count.value

        def __call__(self, by):
            self.count.value += by

    first, second = Counter(), Counter()
    assert int(first.bump(2)) == 2 and int(second.bump(3)) == 3 and int(first.bump(by=1)) == 3
    sx.jit(first)(4)
    assert int(first.count.value) == 7
    assert Counter.bump(second, 1) == 4
    assert first.bump.lower(1).as_text()


# ---- its arguments --------------------------------------------------------------------------------------------------


def test_static_arguments_by_position_and_name():
    cell = sx.State(jnp.float32(2))

    def power(given, exponent, mode):
        return given.value**exponent if mode == "up" else -(given.value**exponent)

    body, calls = counted(power)
    for options in ({"static_argnums": (1, 2)}, {"static_argnums": (-2, -1)}):
        step = sx.jit(body, **options)
        calls.clear()
        assert (
            float(step(cell, 3, "up")) == 8 and float(step(cell, 3, "down")) == -8 and float(step(cell, 3, "up")) == 8
        )
        assert len(calls) == 2
    step = sx.jit(power, static_argnames=("exponent", "mode"))
    assert float(step(cell, exponent=2, mode="up")) == 4 and float(step(cell, 2, "up")) == 4


def test_static_one_is_not_static_one_point_nought():
    cell = sx.State(jnp.int32(2))
    step = sx.jit(lambda given, by: given.value * by, static_argnums=1)
    assert step(cell, 1).dtype == jnp.int32 and step(cell, 1.0).dtype == jnp.float32 and step(cell, True) == 2


@pytest.mark.parametrize("argnums", [1, -1])
def test_negative_static_argnums_with_in_shardings(argnums):
    """flax breaks here: its in_shardings are counted without the negative position."""
    cell = sx.State(jnp.ones(8))
    step = sx.jit(
        lambda given, times: given.value * times,
        static_argnums=argnums,
        in_shardings=(NamedSharding(MESH, P("a")),),
        out_shardings=NamedSharding(MESH, P("b")),
    )
    out = step(cell, 3)
    np.testing.assert_allclose(out, np.full(8, 3.0))
    assert out.sharding.spec == P("b") and cell.value.sharding.spec == P("a")


def test_device_and_backend():
    """flax refuses both always; jax has deprecated them, they are honoured without a warning."""
    device = jax.devices()[3]
    cell = sx.State(jnp.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = sx.jit(lambda given: given.value + 1, device=device)(cell)
        assert out.devices() == {device}
        assert sx.jit(lambda given: given.value + 1, backend="cpu")(cell).shape == (2,)


def test_keep_unused_inline_and_compiler_options():
    cell, unused = sx.State(jnp.ones(2)), sx.State(jnp.ones(5))

    def first(given, other):
        return given.value

    assert len(sx.jit(first, keep_unused=True).lower(cell, unused).compile().input_shardings[0]) == 2
    assert float(sx.jit(first, inline=True)(cell, unused)[0]) == 1
    assert float(sx.jit(first, compiler_options={"xla_embed_ir_in_executable": True})(cell, unused)[0]) == 1


def test_plain_arguments_are_donated_by_position_and_name():
    cell = sx.State(jnp.zeros(4))

    def step(given, x, y):
        given.value += x
        return x + y

    for options in ({"donate_argnums": 1}, {"donate_argnames": "x"}, {"donate_argnums": -2}):
        x, y = jnp.ones(4), jnp.ones(4)
        sx.jit(step, **options)(cell, x, y)
        assert x.is_deleted() and not y.is_deleted()


def test_the_state_of_a_donated_argument_is_donated():
    kept, given = sx.State(jnp.zeros(4)), sx.State(jnp.zeros(4))
    before = kept.value, given.value

    @sx.jit(donate_argnums=1)
    def step(a, b):
        a.value += 1
        b.value += 1

    step(kept, given)
    assert not before[0].is_deleted() and before[1].is_deleted()
    assert float(kept.value[0]) == float(given.value[0]) == 1


def test_donated_state_is_honoured_in_bytes():
    read, written = sx.State(jnp.ones(32)), sx.State(jnp.zeros((16, 16)))

    @sx.jit(donate="state")
    def step(x):
        written.value = written.value + read.value[0] * x

    compiled = step.lower(2.0).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 16 * 16 * 4
    before = read.value, written.value
    step(2.0)
    assert not before[0].is_deleted() and before[1].is_deleted() and float(written.value[0, 0]) == 2
    for _ in range(3):
        step(2.0)
    assert float(written.value[0, 0]) == 8


def test_donated_sharded_state_is_honoured_and_stays_where_it_is():
    sharding = NamedSharding(MESH, P("a", "b"))
    cell = sx.State(jax.device_put(jnp.zeros((8, 8)), sharding))

    @sx.jit(donate="state")
    def step(x):
        cell.value = cell.value + x

    assert step.lower(1.0).compile().memory_analysis().alias_size_in_bytes == 8 * 8 * 4 // 8
    for _ in range(3):
        step(1.0)
    assert cell.value.sharding == sharding and float(cell.value[0, 0]) == 3


def test_state_that_cannot_be_donated_is_reported_by_path():
    cells = {"w": sx.State(jnp.zeros(4)), "b": sx.State(jnp.zeros(3))}

    @sx.jit(donate="state")
    def step(cells):
        cells["w"].value = cells["w"].value.astype(jnp.bfloat16)
        cells["b"].value += 1

    with pytest.warns(UserWarning, match=r"keeps 1 cells.*cells\['w'\] \(float32\[4\] → bfloat16\[4\]\)"):
        step(cells)
    assert cells["w"].value.dtype == jnp.bfloat16 and float(cells["b"].value[0]) == 1


def test_decorator_forms_and_attributes():
    @sx.jit
    def plain(x):
        """Doc."""
        return x

    @sx.jit(static_argnums=0, out_shardings=None)
    def configured(n, x):
        return x * n

    assert plain.__name__ == "plain" and plain.__doc__ == "Doc." and plain.__wrapped__(3) == 3
    assert configured.static_argnums == (0,) and configured.in_shardings is None
    assert configured.out_shardings is None and configured.kwarg_shardings is None
    assert float(configured(3, 2.0)) == 6


# ---- only what was written comes back -------------------------------------------------------------------------------


def test_what_is_only_read_is_never_returned_nor_copied():
    cells = [sx.State(jnp.full(4, float(n))) for n in range(5)]
    values = [cell.value for cell in cells]

    @sx.jit
    def step(cells, x):
        cells[2].value = sum(cell.value for cell in cells) + x
        cells[3].value = cells[3].value  # the same value once more is no write
        return x

    compiled = step.lower(cells, 1.0).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 4 * 4 + 4 + 64  # one cell, the result, a table of two
    assert len(jax.tree.leaves(compiled._inner.output_shardings)) == 2  # pyright: ignore[reportAttributeAccessIssue]
    step(cells, 1.0)
    same = [cell.value is value for cell, value in zip(cells, values, strict=True)]
    assert same == [True, True, False, True, True]


def test_an_argument_that_is_returned_as_it_is_costs_no_cell():
    cell = sx.State(jnp.ones(3))
    value = cell.value
    assert sx.jit(lambda given: given)(cell) is cell and cell.value is value


# ---- structure and retracing ----------------------------------------------------------------------------------------


def test_the_same_structure_traces_once_whatever_the_objects():
    body, calls = counted(lambda tree, x: tree["w"].value * x)
    step = sx.jit(body)
    for n in range(5):
        step({"w": sx.State(jnp.float32(n))}, 1.0)
    assert len(calls) == 1


def test_a_rebound_closure_is_seen():
    holder = {"cell": sx.State(jnp.float32(1))}

    @sx.jit
    def read():
        return holder["cell"].value

    assert float(read()) == 1
    holder["cell"] = sx.State(jnp.float32(2))
    assert float(read()) == 2
    model = sx.State(jnp.float32(3))

    @sx.jit
    def nonlocal_read():
        return model.value

    assert float(nonlocal_read()) == 3
    model = sx.State(jnp.float32(4))
    assert float(nonlocal_read()) == 4


def test_cells_only_found_while_tracing_are_threaded():
    class Opaque:
        __slots__ = ("cell",)

    box = Opaque()
    box.cell = sx.State(jnp.float32(0))

    @sx.jit
    def step(x):
        box.cell.value += x
        return box.cell.value

    assert [float(step(1.0)) for _ in range(3)] == [1, 2, 3]


class Settings:
    def __init__(self, scale):
        self.scale = scale


@dataclasses.dataclass(frozen=True)
class FixedSettings:
    scale: float


class Configured:
    def __init__(self, settings):
        self.weight, self.settings = sx.State(jnp.float32(2)), settings

    def __call__(self):
        return self.weight.value * self.settings.scale


def test_plain_objects_without_cells_are_seen_when_they_change_in_place():
    body, calls = counted(lambda model: model())
    step = sx.jit(body)
    model = Configured(Settings(2.0))
    assert float(step(model)) == 4
    model.settings.scale = 3.0
    assert float(step(model)) == 6 and step.why_retraced() == "args[0].settings.scale: 2.0 → 3.0"
    assert float(step(Configured(Settings(3.0)))) == 6 and len(calls) == 2  # another object, the same structure


def test_objects_that_say_what_equal_means_are_values():
    body, calls = counted(lambda model: (model(), model.settings)[0])
    step = sx.jit(body)
    assert float(step(Configured(FixedSettings(2.0)))) == 4 and float(step(Configured(FixedSettings(2.0)))) == 4
    assert len(calls) == 1
    assert float(step(Configured(FixedSettings(3.0)))) == 6 and len(calls) == 2


def test_plain_objects_may_be_given_cells_inside():
    model = Configured(Settings(2.0))
    settings = model.settings

    @sx.jit
    def step(model, x):
        model.settings.extra = sx.State(x)
        model.settings.scale = 5.0
        return model()

    assert float(step(model, jnp.float32(7))) == 10
    assert model.settings is settings and float(settings.extra.value) == 7 and settings.scale == 5.0


def test_named_dicts_are_changed_in_place():
    tree = collections.defaultdict(list, a=[sx.State(jnp.float32(1))])
    ordered = collections.OrderedDict(b=sx.State(jnp.float32(2)))

    @sx.jit
    def step(tree, ordered):
        tree["new"].append(sx.State(tree["a"][0].value + ordered["b"].value))
        ordered["c"] = tree["a"][0]

    step(tree, ordered)
    assert float(tree["new"][0].value) == 3 and ordered["c"] is tree["a"][0] and tree["missing"] == []


def test_metadata_is_structure():
    body, calls = counted(lambda cell: cell.value)
    step = sx.jit(body)
    step(sx.State(1.0, tag="a"))
    step(sx.State(1.0, tag="b"))
    step(sx.State(1.0, tag="a"))
    assert len(calls) == 2


# ---- failures -------------------------------------------------------------------------------------------------------


def test_an_exception_midway_leaves_every_cell_and_container_as_it_was():
    closed, given = sx.State(jnp.float32(1)), sx.State(jnp.float32(2))
    tree: dict[str, Any] = {"cell": given, "list": [1]}

    @sx.jit
    def fail(tree):
        closed.value += 1
        tree["cell"].value += 1
        tree["list"].append(sx.State(3))
        tree["new"] = sx.State(4)
        raise RuntimeError("midway")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="midway"):
            fail(tree)
    assert float(closed.value) == 1 and float(given.value) == 2 and tree == {"cell": given, "list": [1]}


def test_an_exception_while_running_leaves_every_cell_as_it_was():
    cell = sx.State(jnp.float32(1))

    def boom(x):
        raise ValueError("on the host")

    @sx.jit
    def step(x):
        cell.value = cell.value + jax.pure_callback(boom, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(Exception, match="on the host"):
        step(jnp.float32(1))
        jax.block_until_ready(cell.value)


def test_nested_jits_thread_through_each_other():
    inner_cell, outer_cell = sx.State(jnp.float32(0)), sx.State(jnp.float32(0))

    @sx.jit
    def inner(x):
        inner_cell.value += x
        outer_cell.value += inner_cell.value
        return x * 2

    @sx.jit
    def outer(x):
        outer_cell.value += 1
        return inner(inner(x)) + outer_cell.value

    assert float(outer(1.0)) == 4 + (1 + 1 + 3)
    assert float(inner_cell.value) == 3 and float(outer_cell.value) == 5
    inner(1.0)
    assert float(inner_cell.value) == 4


def test_gradients_inside_read_state_and_write_after():
    weight = sx.State(jnp.float32(3))

    @sx.jit
    def step(x):
        gradient = jax.grad(lambda w: (w * x) ** 2)(weight.value)
        weight.value -= 0.1 * gradient
        return gradient

    assert float(step(1.0)) == 6
    np.testing.assert_allclose(float(weight.value), 2.4, rtol=1e-6)


def test_a_jitted_read_under_jax_transformations():
    weight = sx.State(jnp.float32(3))
    scale = sx.jit(lambda cell, x: cell.value * x)
    assert float(jax.grad(lambda x: scale(weight, x))(2.0)) == 3
    np.testing.assert_allclose(jax.vmap(lambda x: scale(weight, x))(jnp.arange(3.0)), [0, 3, 6])


# ---- memory and threads ---------------------------------------------------------------------------------------------


def test_entries_do_not_keep_arguments_alive():
    step = sx.jit(lambda tree, x: tree["w"].value * x)

    class Tree(dict):
        pass

    cell = sx.State(jnp.ones(3))
    array = weakref.ref(cell.value)
    alive = weakref.ref(cell)
    step({"w": cell, "deep": [cell]}, 2.0)
    step({"w": cell, "deep": [cell]}, 2.0)
    del cell
    gc.collect()
    assert alive() is None and array() is None


@pytest.mark.parametrize("donate", [None, "state"])
def test_a_function_that_nobody_reaches_lets_go_of_what_it_closed_over(donate):
    def use():
        cell = sx.State(jnp.ones(3))

        @sx.jit(donate=donate)
        def step(x):
            cell.value = cell.value + x

        step(1.0)
        step.lower(1.0).compile()
        return weakref.ref(cell)

    alive = use()
    gc.collect()
    assert alive() is None


def test_closures_that_are_rebound_are_let_go():
    holder = {"cell": sx.State(jnp.float32(0))}
    step = sx.jit(lambda: holder["cell"].value)
    died = []
    for n in range(10):
        holder["cell"] = sx.State(jnp.float32(n))
        weakref.finalize(holder["cell"], died.append, n)
        assert float(step()) == n
    gc.collect()
    assert len(died) >= 5  # the last few are kept: a program may go back and forth between them


def test_eight_threads_on_one_function_and_their_own_cells():
    step = sx.jit(_bump)
    total = [sx.State(jnp.float32(0)) for _ in range(8)]
    errors: list[Exception] = []
    start = threading.Barrier(8)

    def work(n):
        try:
            start.wait()
            tree = {"a": total[n], "deep": [sx.State(jnp.zeros(n % 3 + 1))]}
            for _ in range(25):
                assert float(step(tree, jnp.float32(n))) >= 0
            np.testing.assert_allclose(tree["deep"][0].value, np.full(n % 3 + 1, 25.0))
        except Exception as error:  # noqa: BLE001  reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and [float(cell.value) for cell in total] == [25.0 * n for n in range(8)]


def _bump(tree, x):
    tree["a"].value += x
    tree["deep"][0].value += 1
    return tree["a"].value


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_what_jit_itself_refuses():
    with pytest.raises(sx.ArgumentError, match="jit needs a function, not int"):
        sx.jit(3)
    with pytest.raises(sx.ArgumentError, match="donate='all' is unknown\ndonate=\"state\""):
        sx.jit(lambda x: x, donate="all")
    with pytest.raises(sx.ArgumentError, match="abstracted_axes is not available"):
        sx.jit(lambda x: x, abstracted_axes=({0: "n"},))
    with pytest.raises(sx.ArgumentError, match=r"no argument 'exponnt'.*exponent"):
        sx.jit(lambda x, exponent: x, static_argnames="exponnt")
    with pytest.raises(sx.ArgumentError, match="5 is out of range: the function takes 2"):
        sx.jit(lambda x, y: x, static_argnums=5)
    with pytest.raises(sx.ArgumentError, match="(?s)Non-hashable static arguments.*list does not hash"):
        sx.jit(lambda x, y: x, static_argnums=1)(1, [2])


def test_arrays_on_devices_that_do_not_meet_are_named():
    first, second = jax.devices()[:2]
    tree = {"a": sx.State(jax.device_put(jnp.ones(2), first)), "b": sx.State(jax.device_put(jnp.ones(2), second))}
    x = jax.device_put(jnp.ones(2), second)
    step = sx.jit(lambda tree, x: tree["a"].value + tree["b"].value + x)
    with pytest.raises(sx.DeviceMismatchError, match=r"(?s)1 of 3 arrays.*tree\['a'\]: on device 0 \[shape \(2,\)\]"):
        step(tree, x)
    assert tree["a"].value.devices() == {first}


def test_arguments_that_are_no_arrays_are_named():
    cell = sx.State(jnp.ones(()))
    for function in (lambda a, b: a, lambda a, b: a + cell.value):
        with pytest.raises(sx.ArgumentError, match=r"(?s)b\['k'\]: 'text' \(str\) is no array.*static_argnames"):
            sx.jit(function)(1.0, {"k": "text"})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        sx.jit(lambda a, b: a)(1.0)


def test_arrays_that_were_donated_before_are_named():
    given, other = sx.State(jnp.ones(8)), sx.State(jnp.zeros(8))
    other.value = given.value
    sx.jit(lambda: setattr(given, "value", given.value + 1), donate="state")()
    for read in (sx.jit(lambda: other.value + 1), lambda: sx.jit(lambda other: other.value + 1)(other)):
        with pytest.raises(
            sx.DonationError, match=r"(?s)other: was donated to an earlier call \[shape \(8,\)\].*jnp\.copy"
        ):
            read()
    x = jnp.ones(8)
    call = sx.jit(lambda x: x * 2, donate_argnames="x")
    call(x=x)
    with pytest.raises(sx.DonationError, match="x: was donated to an earlier call"):
        call(x=x)


def test_an_array_that_is_donated_and_used_is_named_with_both_places():
    first = sx.State(jnp.ones(8))
    second = sx.State(first.value)

    @sx.jit(donate="state")
    def both():
        first.value, second.value = first.value + 1, second.value + 2

    with pytest.raises(sx.DonationError, match=r"closed-over first and closed-over second: are one array"):
        both()
    assert (first.value == 1).all()
    with pytest.raises(sx.DonationError, match="cell and x: are one array"):
        sx.jit(lambda cell, x: setattr(cell, "value", cell.value + x), donate_argnums=0)(first, first.value)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_donated_argument_whose_buffer_no_result_takes_is_named():
    cells = {"w": sx.State(jnp.ones((4, 4))), "b": sx.State(jnp.ones(4))}

    @sx.jit(donate_argnums=0)
    def narrow(cells):
        cells["w"].value = cells["w"].value.astype(jnp.bfloat16)
        cells["b"].value = cells["b"].value + 1

    with pytest.warns(UserWarning, match=r"1 cells were donated in vain.*cells\['w'\] \(float32\[4,4\]\)"):
        narrow(cells)
    assert cells["w"].value.dtype == jnp.bfloat16


def test_shardings_that_cannot_be_meant_are_named():
    x, whole = jnp.arange(8.0), NamedSharding(MESH, P())
    with pytest.raises(sx.StateShardingError, match=r"in_shardings\[1\]: 'a' \(str\) is no sharding"):
        sx.jit(lambda x, y: x, in_shardings=(whole, "a"))
    with pytest.raises(sx.StateShardingError, match=r"out_shardings: 3 \(int\) is no sharding"):
        sx.jit(lambda x: x, out_shardings=3)
    with pytest.raises(sx.StateShardingError, match=r"(?s)in_shardings do not match.*y: PyTreeDef\(\*\) is given"):
        sx.jit(lambda x, y: x, in_shardings=(whole, {"a": whole}))(x, x)
    with pytest.raises(sx.StateShardingError, match="(?s)out_shardings do not match the result.*out_shardings\n"):
        sx.jit(lambda x: x, out_shardings=(whole, whole))(x)
    with pytest.raises(sx.ArgumentError, match=r"x: 'text' \(str\) is no array"):
        sx.jit(lambda x: x).lower("text")


def test_cells_that_in_shardings_do_not_cut_are_named():
    cells = {"w": sx.State(jnp.ones((7, 2))), "b": sx.State(jnp.ones(8))}
    step = sx.jit(lambda cells: cells["b"].value, in_shardings=(NamedSharding(MESH, P("a")),))
    with pytest.raises(
        sx.SpecError, match=r"(?s)do not cut these cells evenly.*cells\['w'\]: dim 0: 7 does not divide"
    ):
        step(cells)


# ---- copies of wrapped functions ------------------------------------------------------------------------------------


@sx.jit
def named_in_its_module(x):
    return 2 * x


class Counter:
    """An object with a jitted method, and one made of a method."""

    def __init__(self):
        self.count = sx.State(jnp.zeros(()))
        self.again = sx.jit(self.plain)

    @sx.jit
    def add(self, x):
        """Add."""
        self.count.value += x
        return self.count.value

    def plain(self):
        self.count.value += 1


def test_wrapped_functions_are_copied_and_pickled_as_functions_are():
    mapped = sx.shard_map(lambda x: x, MESH, P("a"), P("a"))
    for wrapped in (named_in_its_module, mapped, sx.jit(lambda x: x)):
        wrapped(jnp.ones(4))  # it holds what was compiled, which cannot be copied
        assert copy.copy(wrapped) is copy.deepcopy(wrapped) is wrapped
    assert pickle.loads(pickle.dumps(named_in_its_module)) is named_in_its_module


def test_wrapped_closures_travel_with_cloudpickle():
    cloudpickle = pytest.importorskip("cloudpickle")
    x, call = jnp.ones(4), sx.jit(lambda y: x + y)
    call(1.0)
    assert (cloudpickle.loads(cloudpickle.dumps(call))(1.0) == 2).all()


def test_a_copy_of_an_object_has_its_own_jitted_methods():
    first = Counter()
    first.bound = first.add
    first.add(1.0), first.again()
    second = copy.deepcopy(first)
    second.add(10.0), second.again(), second.bound(100.0)
    assert (float(first.count.value), float(second.count.value)) == (2, 113)
    assert float(pickle.loads(pickle.dumps(first.add))(1.0)) == 3
    assert first.bound == first.add != second.add
    assert len({first.bound, first.add}) == 1


def test_a_jitted_method_is_known_by_what_it_wraps():
    counter = Counter()
    assert str(inspect.signature(counter.add)) == "(x)"
    assert (counter.add.__name__, counter.add.__doc__) == ("add", "Add.")
    assert repr(counter.add) == "<shardax.jit(Counter.add) of Counter>"
    assert float(sx.jit(lambda x: counter.add(2 * x))(1.0)) == 2
    with pytest.raises(AttributeError, match="lowr"):
        counter.add.lowr


# ---- plain objects --------------------------------------------------------------------------------------------------


class Plain:
    """An object of no framework, without state."""

    def __init__(self):
        self.next = None


SHARED = Plain()


def test_a_plain_object_made_inside_is_made_by_every_call():
    @sx.jit
    def attach(root):
        root.made, root.shared = Plain(), SHARED
        return root.cell.value

    roots = [Plain(), Plain()]
    for root in roots:
        root.cell = sx.State(jnp.ones(()))
        attach(root)
        assert root.shared is SHARED
    assert roots[0].made is not roots[1].made
    roots[0].made.next = "changed"
    again = Plain()
    again.cell = sx.State(jnp.ones(()))
    attach(again)
    assert again.made.next is None
