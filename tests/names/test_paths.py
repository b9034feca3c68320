"""Every kind of tree: its paths, and the same tree again around other leaves."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardax.errors import LeafError
from shardax.names.paths import flatten, rebuild, walk

Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    up: object
    down: object


@jax.tree_util.register_pytree_node_class
class Keyless:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (1, [""]),
        (None, []),
        ({}, []),
        ({"b": 1, "a": {"d": 2, "c": 3}}, ["b", "a/d", "a/c"]),
        ([1, (2, None, [3])], ["0", "1/0", "1/2/0"]),
        (Pair(1, Pair(2, None)), ["first", "second/first"]),
        (Block(1, {"x": 2}), ["up", "down/x"]),
        (Keyless(1, Keyless(2)), ["0", "1/0"]),
        (collections.OrderedDict(b=1, a=2), ["b", "a"]),
        (collections.defaultdict(list, b=1, a=2), ["b", "a"]),
        ({("layers", 0, "kernel"): 1, "x": 2}, ["layers/0/kernel", "x"]),
        ({1: "a", "a": 1}, ["1", "a"]),  # jax itself cannot sort these keys
        ({"layer/weight": 0}, ["layer/weight"]),
        ({"s": jax.ShapeDtypeStruct((2,), "float32"), "p": P("dp")}, ["s", "p"]),
    ],
)
def test_paths_and_the_way_back(tree, paths):
    found, leaves = flatten(tree)
    assert found == paths
    assert walk(tree) == list(zip(paths, leaves, strict=True))
    built = rebuild(tree, [f"<{path}>" for path in paths])
    assert not paths or paths == [""] or type(built) is type(tree)
    assert flatten(built) == (paths, [f"<{path}>" for path in paths])
    if isinstance(tree, dict):
        assert list(built) == list(tree)


def test_rebuild_counts_its_results():
    with pytest.raises(LeafError, match="1 result given for a tree of 2 leaves"):
        rebuild({"a": 1, "b": 2}, ["x"])
    with pytest.raises(LeafError, match="3 results given for a tree of 2 leaves"):
        rebuild({"a": 1, "b": 2}, "xyz")


def test_defaultdict_keeps_its_factory():
    built = rebuild(collections.defaultdict(list, a=1), ["x"])
    assert built.default_factory is list


def test_a_class_registered_after_a_walk_is_a_node_in_the_next():
    class Late:
        def __init__(self, inside):
            self.inside = inside

    tree = {"late": Late(1)}
    assert flatten(tree)[0] == ["late"]
    jax.tree_util.register_pytree_with_keys(
        Late,
        lambda late: (((jax.tree_util.GetAttrKey("inside"), late.inside),), None),
        lambda _, children: Late(*children),
    )
    assert flatten(tree)[0] == ["late/inside"]


trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.dictionaries(st.text("ab/1", max_size=3), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Block, inner, inner)
        | st.builds(Keyless, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_leaves_are_those_of_jax_and_rebuild_is_the_identity(tree):
    paths, leaves = flatten(tree)
    assert sorted(leaves) == sorted(jax.tree.leaves(tree))
    assert len(paths) == len(leaves)
    built = rebuild(tree, leaves)
    assert jax.tree.structure(built) == jax.tree.structure(tree)
    assert jax.tree.leaves(built) == jax.tree.leaves(tree)


# ---- frameworks -----------------------------------------------------------------------------------------------------


def test_nnx_state_and_module():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(2)])
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    model = Model(nnx.Rngs(0))
    state = nnx.state(model)
    paths = [
        *("drop/rngs/count", "drop/rngs/key", "layers/0/bias"),
        *("layers/0/kernel", "layers/1/bias", "layers/1/kernel"),
    ]
    assert flatten(state)[0] == paths
    assert flatten(model)[0] == paths
    assert flatten(nnx.to_flat_state(state))[0] == paths
    specs = rebuild(state, [P()] * 6)
    assert type(specs) is type(state)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert specs["layers"][1]["kernel"].get_raw_value() == P()


def test_nnx_state_keeps_the_order_of_its_maker():
    nnx = pytest.importorskip("flax.nnx")
    state = nnx.State({"b": nnx.Param(1.0), "a": {"z": nnx.Param(2.0), "y": 3}})
    assert flatten(state)[0] == ["b", "a/z", "a/y"]
    built = rebuild(state, [10, 20, 30])
    assert list(built) == ["b", "a"]
    assert flatten(built) == (["b", "a/z", "a/y"], [10, 20, 30])
    assert jax.tree.structure(built) == jax.tree.structure(state)


def test_linen_boxes_and_frozen_dicts():
    nn = pytest.importorskip("flax.linen")
    core = pytest.importorskip("flax.core")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp")))(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((2, 2)))
    assert sorted(flatten(params)[0]) == ["params/Dense_0/bias", "params/Dense_0/kernel"]
    frozen = core.freeze({"b": 1, "a": {"c": 2}})
    assert flatten(frozen)[0] == ["b", "a/c"]
    built = rebuild(frozen, ["x", "y"])
    assert isinstance(built, core.FrozenDict)
    assert built == core.freeze({"b": "x", "a": {"c": "y"}})


def test_brainstate_states():
    brainstate = pytest.importorskip("brainstate")

    class Model(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [brainstate.nn.Linear(2, 3), brainstate.nn.Linear(3, 2)]
            self.gain = brainstate.ParamState(jnp.ones(3))

    states = Model().states()
    paths, leaves = flatten(states)
    assert sorted(paths) == [
        *("gain", "layers/0/weight/bias", "layers/0/weight/weight"),
        *("layers/1/weight/bias", "layers/1/weight/weight"),
    ]
    assert all(hasattr(leaf, "shape") for leaf in leaves)
    specs = rebuild(states, [P()] * 5)
    assert list(specs) == list(states)
    assert specs[("gain",)] == P()
    assert set(specs[("layers", 0, "weight")]) == {"weight", "bias"}
    nested = states.to_nest()
    assert sorted(flatten(nested)[0]) == sorted(paths)


def test_equinox_modules_and_optax_states():
    equinox, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    linear = equinox.nn.Linear(2, 3, key=jax.random.key(0))
    assert flatten(linear)[0] == ["weight", "bias"]
    state = jax.eval_shape(optax.adam(1e-3).init, {"z": jnp.ones(2), "a": {"k": jnp.ones(2)}})
    assert flatten(state)[0][:2] == ["0/count", "0/mu/a/k"]
