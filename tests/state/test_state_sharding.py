"""StateSharding and the shardings of jit: filters, prefix trees, what is refused, and that state stays where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = sx.make_mesh("a=4,b=2")


def named(*axes, mesh=MESH):
    return NamedSharding(mesh, P(*axes))


class Kernel(sx.State):
    __slots__ = ()


def model():
    return {"mlp": {"kernel": Kernel(jnp.ones((8, 8)), tag="big"), "bias": sx.State(jnp.ones(8))}}


# ---- the value ------------------------------------------------------------------------------------------------------


def is_kernel(path, cell):
    return path == ("mlp", "kernel")


def is_vector(path, cell):
    return cell.value.ndim == 1


FILTERS = [
    (Kernel, True),
    (sx.RngState, False),
    ("big", True),
    ("small", False),
    (True, True),
    (..., True),
    (False, False),
    (None, False),
    (is_kernel, True),
    (is_vector, False),
    ([sx.RngState, "big"], True),
    ([], False),
    ((False, None), False),
]


@pytest.mark.parametrize(
    ("filter", "matches"), FILTERS, ids=[getattr(filter, "__name__", repr(filter)) for filter, _ in FILTERS]
)
def test_filters(filter, matches):
    cell = model()["mlp"]["kernel"]
    sharding = sx.StateSharding([(filter, P("a")), (..., P("b"))])
    assert sharding.map_prefix(("mlp", "kernel"), cell) == (P("a") if matches else P("b"))


def test_the_first_match_wins_and_the_value_is_a_value():
    pairs = [(Kernel, P("a")), (..., P())]
    sharding = sx.StateSharding(dict(pairs))
    assert sharding == sx.StateSharding(pairs) and hash(sharding) == hash(sx.StateSharding(pairs))
    assert sharding != sx.StateSharding(pairs[::-1]) and sharding != 3
    assert sharding.filters == (Kernel, ...) and sharding.shardings == (P("a"), P())
    assert repr(sharding) == f"StateSharding({dict(pairs)})"
    assert sx.StateSharding(pairs[::-1]).map_prefix((), Kernel(1.0)) == P()


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_nnx_states_of_shardings_and_nnx_variables():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    flat = nnx.State({"bias": named("b"), "kernel": named("a", "b")})
    by_path = sx.StateSharding(flat)
    held = sx.StateSharding(jax.tree.map(nnx.Param, flat))  # as nnx.get_partition_spec returns them
    assert held == by_path and by_path.shardings == (named("b"), named("a", "b"))
    nested = sx.StateSharding(nnx.State({"mlp": {"kernel": P("a"), "gate": P("a")}, "bias": P()}))
    assert nested.shardings == (P("a"), P()) and nested.map_prefix(("mlp", "gate"), None) == P("a")
    by_type = sx.StateSharding({nnx.PathContains("kernel"): named("a", "b"), nnx.Param: named("b")})
    for sharding in (by_path, held, by_type):
        step = sx.jit(lambda layer, x: layer(x), in_shardings=(sharding, None))
        step(layer, jnp.ones(8))
        assert layer.kernel[...].sharding == named("a", "b") and layer.bias[...].sharding == named("b")


# ---- in_shardings ---------------------------------------------------------------------------------------------------


def step(tree, x):
    tree["mlp"]["bias"].value += x.sum()
    return tree["mlp"]["kernel"].value @ x


PREFIXES = {
    "StateSharding": lambda: sx.StateSharding({"big": named("a", "b"), ...: named("b")}),
    "path": lambda: sx.StateSharding({lambda path, cell: path[-1] == "kernel": named("a", "b"), ...: named("b")}),
    "tree": lambda: {"mlp": {"kernel": named("a", "b"), "bias": named("b")}},
    "tree with StateSharding": lambda: {"mlp": sx.StateSharding({Kernel: named("a", "b"), ...: named("b")})},
}


@pytest.mark.parametrize("graph", [None, False])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_state_goes_where_in_shardings_say_and_stays_there(prefix, graph):
    """With graph=False too, where flax refuses a StateSharding."""
    tree = model()
    jitted = sx.jit(step, in_shardings=(PREFIXES[prefix](), named()), graph=graph)
    for _ in range(2):
        np.testing.assert_allclose(jitted(tree, jnp.ones(8)), np.full(8, 8.0))
        assert tree["mlp"]["kernel"].value.sharding == named("a", "b")
        assert tree["mlp"]["bias"].value.sharding == named("b")
    assert float(tree["mlp"]["bias"].value[0]) == 17


def test_specs_are_on_the_current_mesh():
    tree = model()
    jitted = sx.jit(step, in_shardings=(sx.StateSharding({...: P("a")}), P()), out_shardings=P("b"))
    with pytest.raises(sx.NoMeshError, match=r"in_shardings holds .* and no mesh is set"):
        jitted(tree, jnp.ones(8))
    assert float(tree["mlp"]["bias"].value[0]) == 1
    with jax.set_mesh(MESH):
        assert jitted(tree, jnp.ones(8)).sharding.spec == P("b")
    other = sx.make_mesh("a=2,b=4")
    with jax.set_mesh(other):
        assert jitted(model(), jnp.ones(8)).sharding.mesh.shape == other.shape


def test_one_sharding_for_all_and_none_for_some():
    tree = model()
    sx.jit(step, in_shardings=named())(tree, jnp.ones(8))
    assert tree["mlp"]["kernel"].value.sharding == named()
    tree = model()
    sx.jit(step, in_shardings=({"mlp": {"kernel": named("a"), "bias": None}}, None))(tree, jnp.ones(8))
    assert tree["mlp"]["kernel"].value.sharding == named("a")


def test_arrays_inside_stateful_arguments_have_shardings_too():
    tree = {"cell": sx.State(jnp.ones(8)), "array": jnp.ones(8)}
    jitted = sx.jit(
        lambda tree: tree["cell"].value + tree["array"], in_shardings=({"cell": named("a"), "array": named("b")},)
    )
    compiled = jitted.lower(tree).compile()
    (shown,) = compiled.input_shardings[0]
    assert shown["['cell']"].spec == P("a") and shown["['array']"].spec == P("b")
    np.testing.assert_allclose(jitted(tree), np.full(8, 2.0))


# ---- out_shardings --------------------------------------------------------------------------------------------------


def test_results_that_are_cells_take_out_shardings():
    for prefix in (sx.StateSharding({...: named("a")}), {"w": named("a"), "n": None}, named("a")):
        make = sx.jit(lambda: {"w": sx.State(jnp.ones(8)), "n": sx.State(jnp.zeros(8))}, out_shardings=prefix)
        assert make()["w"].value.sharding.spec == P("a")


def test_what_is_born_below_an_argument_takes_its_sharding():
    tree = {"old": sx.State(jnp.ones(8))}

    @sx.jit(in_shardings=(sx.StateSharding({...: named("a")}),))
    def grow(tree):
        tree["new"] = [sx.State(tree["old"].value * 2)]

    grow(tree)
    assert tree["new"][0].value.sharding.spec == P("a") and tree["old"].value.sharding.spec == P("a")


# ---- state stays where it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", [None, "state"])
def test_written_state_comes_back_with_the_sharding_it_went_in_with(donate):
    cell = sx.State(jax.device_put(jnp.ones((8, 8)), named("a", "b")))
    other = sx.State(jax.device_put(jnp.ones(8), named("b")))

    @sx.jit(donate=donate)
    def transpose(x):
        cell.value = jax.lax.with_sharding_constraint(cell.value.T + x, named("b", "a"))
        other.value = other.value + cell.value.sum(0)

    for _ in range(3):
        transpose(1.0)
        assert cell.value.sharding.is_equivalent_to(named("a", "b"), 2)
        assert other.value.sharding.is_equivalent_to(named("b"), 1)


@pytest.mark.parametrize("types", ["auto", "explicit", "a=auto,b=explicit"])
def test_every_type_of_mesh(types):
    """flax refuses meshes that mix Auto and Explicit axes."""
    kinds = {"auto": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds.get(types, (AxisType.Auto, AxisType.Explicit)))
    tree = model()
    shardings = sx.StateSharding({"big": named(None, "b", mesh=mesh), ...: named("a", mesh=mesh)})

    @sx.jit(in_shardings=(shardings, named(mesh=mesh)))
    def scale(tree, x):
        tree["mlp"]["kernel"].value = tree["mlp"]["kernel"].value * x
        tree["mlp"]["bias"].value = tree["mlp"]["bias"].value + x

    with jax.set_mesh(mesh):
        for _ in range(2):
            scale(tree, jnp.float32(2))
    assert tree["mlp"]["kernel"].value.sharding.spec == P(None, "b")
    assert tree["mlp"]["bias"].value.sharding.is_equivalent_to(named("a", mesh=mesh), 1)
    np.testing.assert_allclose(np.asarray(tree["mlp"]["kernel"].value), np.full((8, 8), 4.0))


# ---- bad input ------------------------------------------------------------------------------------------------------


def refused(prefix, match, tree=None, error=sx.StateShardingError, **options):
    tree = model() if tree is None else tree
    before = {id(leaf): leaf for leaf in (tree["mlp"]["kernel"].value, tree["mlp"]["bias"].value)}
    with pytest.raises(error, match=match):
        sx.jit(step, in_shardings=prefix, **options)(tree, jnp.ones(8))
    assert {id(tree["mlp"][name].value) for name in ("kernel", "bias")} == set(before)


def test_a_wrong_number_of_specs():
    refused((None, None, None), "in_shardings has 3 entries for 2 positional arguments")


def test_a_tree_that_does_not_match():
    refused(({"mlp": {"kernel": None}}, None), r"(?s)not a prefix of the arguments.*tree\['mlp'\].*'kernel', 'bias'")
    refused(({"mlp": [None, None]}, None), r"(?s)not a prefix of the arguments.*tree\['mlp'\]")


def test_an_unknown_filter():
    with pytest.raises(sx.StateShardingError, match=r"(?s)unknown filter 3.5 \(float\).*a type, a tag"):
        sx.StateSharding({3.5: P()})
    with pytest.raises(sx.StateShardingError, match="takes a mapping, pairs or an nnx.State of shardings, not int"):
        sx.StateSharding(3)


def test_an_uncovered_cell():
    refused((sx.StateSharding({"big": named("a")}), None), r"(?s)No axis found for path=\('mlp', 'bias'\).*end with")
    with pytest.raises(ValueError, match="No axis found for"):
        sx.StateSharding({}).map_prefix(("w",), None)


def test_one_cell_under_two_shardings_names_both_paths():
    """flax prints one path twice."""
    tree = model()
    tree["mlp"]["again"] = tree["mlp"]["kernel"]
    shardings = {"mlp": {"kernel": named("a"), "bias": None, "again": named("b")}}
    match = r"(?s)Inconsistent aliasing.*tree\['mlp'\]\['kernel'\] and tree\['mlp'\]\['again'\]: P\('a',?\) against P\('b',?\)"
    refused((shardings, None), match, tree)


def test_one_cell_under_two_shardings_by_the_paths_to_it():
    tree = model()
    tree["tied"] = tree["mlp"]
    by_path = sx.StateSharding({lambda path, cell: path[0] == "mlp": named("a"), ...: named("b")})
    refused(
        (by_path, None), r"tree\['mlp'\]\['bias'\] and tree\['tied'\]\['bias'\]: P\('a',?\) against P\('b',?\)", tree
    )
    first_only = sx.StateSharding({lambda path, cell: path[0] == "mlp": named("b")})
    sx.jit(lambda tree: None, in_shardings=(first_only,))(tree)  # covered by one path, which is enough
    assert tree["tied"]["bias"].value.sharding == named("b")


def test_two_arguments_that_share_a_cell_under_two_shardings():
    cell = sx.State(jnp.ones(8))
    with pytest.raises(sx.StateShardingError, match=r"x\[0\] and y\[0\]"):
        sx.jit(lambda x, y: None, in_shardings=(named("a"), named("b")))([cell], [cell])
    sx.jit(lambda x, y: None, in_shardings=(named("a"), named("a")))([cell], [cell])


def test_entries_that_are_no_shardings():
    with pytest.raises(
        sx.StateShardingError, match=r"(?s)cannot contain `StateSharding` objects.*'w': 1 \(int\) is no"
    ):
        sx.jit(step, in_shardings=(sx.StateSharding({"w": 1}), None))


def test_a_spec_that_does_not_fit_is_refused_and_state_unchanged():
    tree = model()
    tree["mlp"]["bias"].value = jnp.ones(6)
    refused((sx.StateSharding({...: named("a")}), None), "divisib|evenly", tree, ValueError)
