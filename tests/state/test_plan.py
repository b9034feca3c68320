"""The second call: a structure is recognised or doubted, values are picked up, and only what was written is set."""

import gc
import itertools
import weakref
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.state.graph import survey
from shardax.state.lift import Lift, Options, types_of
from shardax.state.sharing import picker


class Layer(nnx.Module):
    def __init__(self, width=2):
        self.name, self.width = "layer", width
        self.kernel, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))


class Model(nnx.Module):
    def __init__(self, count=3):
        self.layers = nnx.List([Layer() for _ in range(count)])
        self.extra = nnx.data([jnp.ones(2), {"a": nnx.Param(jnp.ones(1)), "b": nnx.Param(jnp.ones(1))}])


@dataclass
class Holder:
    """A plain class: a node because it holds cells."""

    count: sx.State = field(default_factory=lambda: sx.State(0))
    rate: float = 0.5


def plan_of(*roots):
    lift = Lift(lambda *roots: None, Options("nothing"), compile=lambda lifted, gathered: lifted.run)
    lift.prepare(roots, {})
    return lift.plans[types_of(roots, {})][0]


@given(st.sets(st.integers(0, 9), max_size=10).map(sorted))
def test_a_picker_picks_its_positions(positions):
    pick = picker(positions, 10)
    objects = [str(number) for number in range(10)]
    assert positions == [] if pick is None else list(pick(objects)) == [objects[place] for place in positions]


def test_a_picker_of_a_permutation_keeps_its_order():
    assert list(picker([2, 0, 1], 3)("abc")) == ["c", "a", "b"]


def test_a_structure_is_recognised_in_other_objects_and_gives_theirs():
    plan = plan_of(Model())
    other = Model()
    match = plan.match((other,), {})
    assert match is not None
    found = {id(cell) for cell in match.cells}
    assert found == {id(cell) for layer in other.layers for cell in (layer.kernel, layer.bias)} | {
        id(cell) for cell in other.extra[1].values()
    }
    assert [leaf is other.extra[0] for leaf in match.leaves] == [True]
    assert match.nodes(0) is other


def test_nodes_are_numbered_as_the_survey_numbers_them():
    model = Model()
    found = survey([(model, "data")])
    match = plan_of(model).match((model,), {})
    assert match is not None
    assert all(match.nodes(number) is node for number, node in enumerate(found.nodes))


CHANGES = {
    "an attribute more": lambda m: setattr(m.layers[1], "more", 1),
    "an attribute less": lambda m: delattr(m.layers[1], "name"),
    "an attribute renamed": lambda m: (setattr(m.layers[1], "label", "layer"), delattr(m.layers[1], "name")),
    "a static value": lambda m: setattr(m.layers[2], "width", 3),
    "a static value of another type": lambda m: setattr(m.layers[2], "width", 2.0),
    "a static value that became data": lambda m: setattr(m.layers[2], "name", nnx.data(m.layers[2].name)),
    "a longer list": lambda m: m.extra.append(jnp.ones(1)),
    "a key more": lambda m: m.extra[1].update(c=nnx.Param(jnp.ones(1))),
    "keys in another order": lambda m: m.extra[1].update(a=m.extra[1].pop("a")),
    "another class of node": lambda m: setattr(m.layers[0], "__class__", type("Other", (Layer,), {})),
    "another class of cell": lambda m: setattr(m.layers[0], "bias", nnx.BatchStat(jnp.zeros(2))),
    "a cell in two places": lambda m: setattr(m.layers[0], "bias", m.layers[1].bias),
    "a node in two places": lambda m: m.layers.__setitem__(0, m.layers[1]),
    "a cell where an array was": lambda m: m.extra.__setitem__(0, nnx.Param(jnp.ones(2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_structure_is_doubted(change):
    model = Model()
    plan = plan_of(model)
    assert plan.match((model,), {}) is not None
    CHANGES[change](model)
    assert plan.match((model,), {}) is None


@pytest.mark.parametrize("count", [1, 2])
def test_the_order_of_attributes_is_seen_by_whoever_iterates_over_them(count):
    def holder(*names):
        made = Holder()
        for name in names:
            setattr(made, name, sx.State(ord(name)))
        return made

    values = sx.jit(lambda holders: [v.value for one in holders for v in vars(one).values() if isinstance(v, sx.State)])
    assert list(map(int, values([holder("a", "b") for _ in range(count)]))) == [0, 97, 98] * count
    assert list(map(int, values([holder("b", "a") for _ in range(count)]))) == [0, 98, 97] * count


@pytest.mark.parametrize("make", [lambda: sx.State(1), lambda: nnx.Param(jnp.ones(1))], ids=["State", "Param"])
def test_sharing_is_recognised_and_its_end_is_doubted(make):
    shared = make()
    cells = [shared, make(), shared]
    plan = plan_of(cells)
    other = make()
    assert plan.match(([other, make(), other],), {}) is not None
    assert plan.match(([other, make(), make()],), {}) is None
    assert plan.match(([other, other, other],), {}) is None
    apart = plan_of([make(), make()])
    assert apart.match(([other, other],), {}) is None


def test_a_plan_keeps_nothing_alive():
    model = Model()
    plan, watched = plan_of(model), weakref.ref(model.layers[0])
    assert plan.match((model,), {}) is not None
    del model
    gc.collect()
    assert watched() is None


def test_structures_that_take_turns_are_traced_once_each():
    traces = []

    @sx.jit
    def first(model):
        traces.append(None)
        return model.layers[0].kernel[...].sum()

    models = [Model(1), Model(2), Model(3)]
    for model in itertools.islice(itertools.cycle(models), 12):
        assert float(first(model)) == 2.0
    assert len(traces) == 3


def test_cells_of_two_families_are_written_where_they_belong():
    own, variable, last = sx.State(1.0), nnx.Param(jnp.asarray(2.0)), sx.State(3.0)

    @sx.jit
    def step(cells):
        cells[0].value, cells[2].value = cells[0].value + 10, cells[2].value + 30
        cells[1][...] = cells[1][...] + 20

    for _ in range(3):
        step([own, variable, last])
    assert [float(own.value), float(variable[...]), float(last.value)] == [31.0, 62.0, 93.0]


def test_a_quick_call_writes_and_returns_what_a_slow_one_does():
    holder = Holder()

    @sx.jit
    def count(holder, by):
        holder.count.value += by
        return holder.rate * holder.count.value

    assert [float(count(holder, by)) for by in (1, 2, 3)] == [0.5, 1.5, 3.0]
    holder.rate = 1.0
    assert float(count(holder, 1)) == 7.0
    assert "holder.rate: 0.5 → 1.0" in count.why_retraced()


def test_a_new_shape_that_fails_leaves_state_alone_and_the_next_call_works():
    total = sx.State(jnp.zeros(2))

    @sx.jit
    def add(x):
        total.value = total.value + x
        if x.ndim > 1:
            raise RuntimeError("too many dimensions")

    add(jnp.ones(2))
    add(jnp.ones(2))
    with pytest.raises(RuntimeError, match="too many"):
        add(jnp.ones((2, 2)))
    with pytest.raises(TypeError, match=r"(?i)incompatible|broadcast"):
        add(jnp.ones(3))
    add(jnp.ones(2))
    assert total.value.tolist() == [3.0, 3.0]


def test_a_cell_that_only_a_later_trace_meets_becomes_an_input():
    class Hidden:
        __slots__ = ("cell",)

    hidden, seen = Hidden(), sx.State(1.0)
    hidden.cell = sx.State(5.0)

    @sx.jit
    def read(x):
        return seen.value + (hidden.cell.value if x.ndim else 0)

    assert [float(read(jnp.float32(0))), float(read(jnp.float32(0)))] == [1.0, 1.0]
    assert float(read(jnp.ones(1))) == 6.0
    hidden.cell.value = 7.0
    assert float(read(jnp.ones(1))) == 8.0


def test_a_module_where_an_array_was_is_lifted_after_all():
    @sx.jit
    def first(tree):
        leaf = tree["x"]
        return leaf.kernel[...].sum() if isinstance(leaf, Layer) else leaf.sum()

    assert float(first({"x": jnp.ones(3)})) == 3.0
    assert float(first({"x": jnp.ones(3)})) == 3.0
    assert float(first({"x": Layer()})) == 2.0


@pytest.mark.parametrize("donate", [None, "state"])
def test_cells_come_back_with_their_sharding_call_after_call(donate):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    source = jax.device_put(jnp.arange(8.0), rows)
    target = sx.State(jax.device_put(jnp.zeros(8), whole))

    @sx.jit(donate=donate)
    def copy(source):
        target.value = target.value * 0 + source

    for _ in range(4):
        copy(source)
        assert target.value.sharding.is_equivalent_to(whole, 1)
    target.value = jax.device_put(target.value, rows)
    for _ in range(3):
        copy(source)
        assert target.value.sharding.is_equivalent_to(rows, 1)
    target.value = jax.device_put(target.value, whole)
    copy(source)
    assert target.value.sharding.is_equivalent_to(whole, 1)
    assert target.value.tolist() == list(range(8))
