"""What arrays say of themselves, on every kind of leaf, eager and traced."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = sx.make_mesh("dp=2,tp=4")
EXPLICIT = sx.make_mesh("dp=2,tp=4", axis_types="explicit")
SHARDED = jax.device_put(np.ones((4, 8)), NamedSharding(MESH, P("dp", "tp")))
Pair = collections.namedtuple("Pair", "left right")


class Says:
    """A leaf with a spec and no mesh, as abstract values of frameworks are."""

    def __init__(self, spec):
        self.sharding = spec


@pytest.mark.parametrize(
    "extract", [sx.extract_shardings, sx.extract_sharding_structure, sx.get_shardings_with_structure]
)
def test_every_leaf_has_its_named_sharding_or_none(extract):
    tree = {"b": SHARDED, "a": Pair(np.ones(3), jnp.ones(3)), "n": 3, "nothing": None, "s": "text"}
    found = extract(tree)
    assert list(found) == list(tree)
    assert found == {"b": SHARDED.sharding, "a": Pair(None, None), "n": None, "nothing": None, "s": None}
    assert extract(SHARDED) == SHARDED.sharding
    assert extract({}) == {}


def test_abstract_leaves_say_theirs():
    sharding = NamedSharding(MESH, P("dp"))
    tree = {"s": jax.ShapeDtypeStruct((4,), "float32", sharding=sharding), "t": jax.ShapeDtypeStruct((4,), "float32")}
    assert sx.extract_shardings(tree) == {"s": sharding, "t": None}
    one = jax.device_put(np.ones(3), SingleDeviceSharding(jax.devices()[0]))
    assert sx.extract_shardings(one) is None


def test_a_spec_over_axes_that_are_not_there_is_an_error():
    leaf = SimpleNamespace(sharding=P("zz"))
    with pytest.raises(sx.SpecError, match="x: dim 0: 'zz' is not an axis of the mesh"):
        sx.extract_shardings({"x": leaf}, MESH)


def test_a_spec_is_bound_to_the_mesh_that_is_given_or_in_force():
    tree = {"w": Says(P("dp"))}
    assert sx.extract_shardings(tree, MESH) == {"w": NamedSharding(MESH, P("dp"))}
    assert sx.extract_shardings(tree, "dp=2,tp=4")["w"].spec == P("dp")
    with jax.set_mesh(MESH):
        assert sx.extract_shardings(tree) == {"w": NamedSharding(MESH, P("dp"))}
        assert sx.extract_sharding_structure(tree) == {"w": NamedSharding(MESH, P("dp"))}
    with MESH:
        assert sx.extract_shardings(tree) == {"w": NamedSharding(MESH, P("dp"))}


def test_specs_without_a_mesh_are_listed():
    with pytest.raises(
        ValueError, match=r"(?s)2 leaves cannot be bound.*a: has a spec and no mesh \[spec P\('dp',\)\].*b/0:"
    ):
        sx.extract_shardings({"a": Says(P("dp")), "b": [Says(P("tp"))], "c": SHARDED})
    assert sx.extract_sharding_structure({"a": Says(P("dp"))}) == {"a": None}


def test_while_tracing_it_is_what_jax_knows():
    seen = {}

    @jax.jit
    def look(x):
        seen["inside"] = sx.extract_shardings({"x": x, "y": x * 2})
        seen["spec"] = sx.get_partition_spec({"x": x})
        return x

    look(SHARDED)
    assert seen["inside"] == {"x": None, "y": None} or seen["inside"]["x"].spec in (P(), P(None, None))
    with jax.set_mesh(EXPLICIT):
        look(jax.device_put(np.ones((4, 8)), NamedSharding(EXPLICIT, P("dp", "tp"))))
    assert seen["inside"]["y"].spec == P("dp", "tp")
    assert seen["spec"] == {"x": P("dp", "tp")}


def test_get_partition_spec_of_arrays_and_scalars():
    tree = {
        "x": SHARDED,
        "one": jnp.ones(3),
        "n": 2,
        "f": 0.5,
        "c": 1j,
        "t": True,
        "np": np.float32(1),
        "zero": np.array(1),
    }
    found = sx.get_partition_spec(tree)
    assert list(found) == list(tree)
    assert found.pop("x") == P("dp", "tp")
    assert set(found.values()) == {P()}


def test_get_partition_spec_refuses_the_rest_and_lists_it():
    with pytest.raises(
        ValueError, match=r"(?s)2 leaves have no partition spec.*s: is str.*w: is ndarray; would work: sx.put it first"
    ):
        sx.get_partition_spec({"s": "text", "w": np.ones(3), "x": SHARDED})


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (P("dp", None, "tp"), ["dp", "tp"]),
        (P(("fsdp", "dp"), "tp"), ["fsdp", "dp", "tp"]),
        ({"z": P("tp"), "a": [P("dp"), (P("tp", "sp"), None)]}, ["tp", "dp", "sp"]),
        (("b", ("a", "b"), None), ["b", "a"]),
        (P(sx.FREE, "dp"), ["dp"]),
        (NamedSharding(MESH, P("tp", "dp")), ["tp", "dp"]),
        (Pair(P("dp"), None), ["dp"]),
        (P(), []),
        (None, []),
        ({}, []),
        (sx.layout({"w": np.ones((8, 8))}, {"w": P("tp", "dp")}, MESH), ["tp", "dp"]),
    ],
)
def test_names_are_unique_and_in_first_seen_order(specs, names):
    assert sx.get_names_from_partition_spec(specs) == names


def test_names_in_a_registered_node():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Node:
        spec: object

    assert sx.get_names_from_partition_spec(Node(P("dp"))) == ["dp"]
    with pytest.raises(sx.LeafError, match="there are no axis names in 3"):
        sx.get_names_from_partition_spec({"a": 3})
