"""put, gather, reshard, init: identity whatever the dtype, shape and spec; every leaf that does not fit is listed."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.arrays import place

DEVICES = jax.devices()
MESHES = {
    "2x4": sx.make_mesh("dp=2,tp=4"),
    "explicit": sx.make_mesh("dp=2,tp=4", axis_types="explicit"),
    "4x2": sx.make_mesh("dp=4,tp=2"),
    "reversed": Mesh(np.array(DEVICES)[::-1].reshape(2, 4), ("dp", "tp")),
    "half": Mesh(np.array(DEVICES)[:4].reshape(2, 2), ("dp", "tp")),
    "one": Mesh(np.array(DEVICES)[7:].reshape(1, 1), ("dp", "tp")),
}
MESH = MESHES["2x4"]
DTYPES = [
    bool,
    np.int8,
    np.uint16,
    np.int32,
    np.float16,
    np.float32,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.int4,
    ml_dtypes.uint4,
    ml_dtypes.float8_e4m3fn,
]


def values(shape, dtype, seed=0):
    return (np.random.default_rng(seed).integers(0, 7, shape)).astype(dtype)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)


@st.composite
def fitting(draw):
    """A shape, and a spec of the mesh axes that fits it (composite entries and zero-size dimensions too)."""
    axes = draw(st.permutations(["dp", "tp"]))
    entries = draw(st.sampled_from([(), (axes[0],), (None, axes[0]), tuple(axes), (tuple(axes),), (None, tuple(axes))]))
    rank = draw(st.integers(len(entries), 3))
    factors = [
        int(np.prod([dict(MESH.shape)[a] for a in ([e] if isinstance(e, str) else e or ())])) for e in entries
    ] + [1] * (rank - len(entries))
    return tuple(draw(st.integers(0, 3)) * factor for factor in factors), P(*entries)


@given(fitting(), st.sampled_from(DTYPES), st.booleans())
def test_put_then_gather_is_the_identity(case, dtype, explicit):
    shape, spec = case
    x = values(shape, dtype)
    placed = sx.put({"x": x}, {"x": NamedSharding(MESHES["explicit" if explicit else "2x4"], spec)})
    assert placed["x"].sharding.spec == spec
    assert same(sx.gather(placed)["x"], x)


@given(
    fitting(), fitting(), st.sampled_from(list(MESHES)), st.sampled_from(["2x4", "explicit", "reversed"]), st.booleans()
)
def test_reshard_then_gather_is_the_identity(before, after, source, target, donate):
    shape, spec = after
    x = values(shape, np.float32)
    start = (
        before[1]
        if len(before[1]) <= len(shape) and not sx.fit(before[1], shape, MESHES[source], "adapt").corrections
        else P()
    )
    old = jax.device_put(x, NamedSharding(MESHES[source], start))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = sx.reshard([old], NamedSharding(MESHES[target], spec), donate=donate)[0]
    assert new.sharding == NamedSharding(MESHES[target], spec)
    assert same(np.asarray(new), x)
    assert old.is_deleted() or same(np.asarray(old), x)


@pytest.mark.parametrize("shape", [(), (8,), (4, 8)])
def test_prng_keys_are_placed_and_come_back_as_keys(shape):
    keys = jax.random.split(jax.random.key(3, impl="rbg"), shape) if shape else jax.random.key(3, impl="rbg")
    data = np.array(jax.random.key_data(keys))  # a replica shares the memory of `keys`, and donation ends both
    placed = sx.put({"k": keys}, NamedSharding(MESH, P("dp") if shape else P()))["k"]
    moved = sx.reshard({"k": placed}, NamedSharding(MESHES["reversed"], P("tp") if shape else P()), donate=True)["k"]
    back = sx.gather({"k": moved})["k"]
    assert placed.shape == moved.shape == shape
    assert jax.random.key_impl(back) == jax.random.key_impl(moved)
    assert np.array_equal(jax.random.key_data(back), data)


def test_scalars_memory_maps_and_arrays_of_any_mesh_are_placed_together(tmp_path):
    mapped = np.lib.format.open_memmap(tmp_path / "w.npy", mode="w+", dtype=np.float32, shape=(8, 4))
    mapped[:] = values((8, 4), np.float32)
    tree = {
        "z": mapped,
        "n": 3,
        "f": np.float32(0.5),
        "other": [jax.device_put(np.arange(8.0), NamedSharding(MESHES["reversed"], P("tp"))), jnp.ones(4)],
        "nothing": None,
    }
    placed = sx.put(tree, {"z": NamedSharding(MESH, P("dp", "tp")), "n": NamedSharding(MESH, P()),
                           "f": NamedSharding(MESH, P()), "other": NamedSharding(MESH, P("dp"))})  # fmt: skip
    assert list(placed) == list(tree)
    assert placed["nothing"] is None
    assert placed["other"][0].sharding.spec == P("dp")
    assert {shard.data.shape for shard in placed["z"].addressable_shards} == {(4, 1)}
    back = sx.gather(placed)
    assert back["n"] == 3 and back["f"] == 0.5 and same(back["z"], np.asarray(mapped))
    assert same(back["other"][0], np.arange(8, dtype=np.float32))


def test_put_takes_a_layout_and_keeps_the_order_of_the_tree():
    tree = {"b": values((8,), np.float32), "a": {"w": values((8, 4), ml_dtypes.bfloat16)}}
    placed = sx.put(tree, sx.layout(tree, {"w": P("dp", "tp"), "b": P("tp")}, MESH))
    assert list(placed) == ["b", "a"]
    assert placed["a"]["w"].sharding == NamedSharding(MESH, P("dp", "tp"))


def test_a_layout_made_on_an_abstract_mesh_finds_its_devices_in_the_mesh_in_force():
    tree = {"w": values((8, 4), np.float32)}
    abstract = sx.layout(tree, {"w": P("dp", "tp")}, "dp=2,tp=4")
    with jax.set_mesh(MESH):
        assert sx.put(tree, abstract)["w"].sharding == NamedSharding(MESH, P("dp", "tp"))
        assert sx.put(tree, P("dp"))["w"].sharding == NamedSharding(MESH, P("dp"))
    with pytest.raises(
        sx.PlacementError, match=r"dp=2,tp=4 \(abstract\) has no devices.*\n.*layout\.on\(sx\.make_mesh"
    ):
        sx.put(tree, abstract)
    with pytest.raises(sx.NoMeshError, match=r"the spec .*'dp'.* needs a mesh"):
        sx.put(tree, P("dp"))


def test_a_saved_layout_places_by_path(tmp_path):
    tree = {"mlp": {"up": values((8, 4), np.float32)}, "n": values((4,), np.float32)}
    sx.layout(tree, {"up": P("dp", "tp"), ".*": None}, MESH).save(tmp_path / "layout.json")
    loaded = sx.Layout.load(tmp_path / "layout.json", mesh=MESH)
    assert sx.put(tree, loaded)["mlp"]["up"].sharding == NamedSharding(MESH, P("dp", "tp"))
    assert sx.put(tree, loaded.shardings)["mlp"]["up"].sharding == NamedSharding(MESH, P("dp", "tp"))


def test_a_put_array_leaves_no_host_copy_behind():
    # jax.device_put alone goes through the host here and keeps that copy on the old array.
    old = jax.device_put(values((8, 8), np.float32), NamedSharding(MESH, P("dp")))
    new = sx.put({"x": old}, NamedSharding(MESH, P(None, "tp")))["x"]
    sx.gather({"x": new})
    assert old._npy_value is None and new._npy_value is None


# ---- what is wrong is listed ----------------------------------------------------------------------------------------


def test_every_leaf_that_is_not_the_layouts_is_listed():
    made = sx.layout({"a": np.ones((8, 4)), "b": np.ones(4, np.int32), "c": np.ones(2)}, {".*": None}, MESH)
    with pytest.raises(sx.LayoutError) as caught:
        sx.put({"a": np.ones((8, 8)), "b": np.ones(4, np.float32), "c": np.ones(2)}, made)
    assert [offence.where for offence in caught.value.offences] == ["a", "b"]
    assert "2 leaves are not what the layout was made for" in str(caught.value)
    assert "a: is float64[8, 8], the layout was made for float64[8, 4]" in str(caught.value)
    assert "b: is float32[4], the layout was made for int32[4]" in str(caught.value)


def test_different_leaves_are_listed_both_ways():
    made = sx.layout({"a": np.ones(4), "b": np.ones(4)}, {".*": None}, MESH)
    with pytest.raises(
        sx.LayoutError, match=r"(?s)c: is in the tree, not in the layout.*b: is in the layout, not in the tree"
    ):
        sx.put({"a": np.ones(4), "c": np.ones(4)}, made)
    replicated = NamedSharding(MESH, P())
    with pytest.raises(sx.LayoutError, match=r"(?s)nor a prefix.*b/0: has no sharding.*c: is a sharding for no leaf"):
        sx.put({"a": np.ones(4), "b": [np.ones(4)]}, {"a": replicated, "c": replicated})


def test_every_leaf_that_does_not_fit_is_listed():
    target = {
        "a": NamedSharding(MESH, P("tp")),
        "b": NamedSharding(MESH, P("dp")),
        "c": NamedSharding(MESH, P(None, None, "dp")),
    }
    with pytest.raises(sx.PlacementError) as caught:
        sx.put({"a": np.ones(6), "b": np.ones(8), "c": np.ones((2, 2))}, target)
    assert {offence.where for offence in caught.value.offences} == {"a", "c"}
    assert "2 leaves of 3 cannot be placed" in str(caught.value)
    assert "a: dim 0: 6 does not divide by 'tp' (4) [shape (6,), spec P('tp',)]" in str(caught.value)


def test_a_free_dimension_is_no_place():
    with pytest.raises(sx.PlacementError, match="w: leaves a dimension free"):
        sx.put({"w": np.ones(8)}, NamedSharding(MESH, P(sx.FREE)))


def test_surplus_nones_and_other_shardings_are_fine():
    placed = sx.put([np.ones(8), 1.0], NamedSharding(MESH, P(None, None)))
    assert all(leaf.sharding.is_fully_replicated for leaf in placed)
    one = SingleDeviceSharding(DEVICES[3])
    assert sx.put([np.ones(8)], one)[0].sharding == one


@pytest.mark.parametrize("leaf", ["text", np.array(["a"]), object(), np.array([None])])
def test_what_is_no_array_is_refused_by_path(leaf):
    with pytest.raises(sx.LeafError, match=r"(?s)1 leaf is not an array.*a/0: is"):
        sx.put({"a": [leaf], "b": np.ones(2)}, NamedSharding(MESH, P()))


def test_leaves_without_values_are_listed():
    gone = jnp.ones(4)
    gone.delete()
    tree = {"abstract": jax.ShapeDtypeStruct((4,), "float32"), "gone": gone, "large": 2**40, "fine": np.ones(2)}
    for call in (sx.put, sx.reshard):
        with pytest.raises(sx.LeafError, match="3 leaves have no values to move") as error:
            call(tree, NamedSharding(MESH, P()))
        assert [offence.where for offence in error.value.offences] == ["abstract", "gone", "large"]
        assert "large: 1099511627776 does not fit int32; would work: jax_enable_x64" in str(error.value)
    with pytest.raises(sx.LeafError, match="gone: was deleted: it has been donated"):
        sx.gather({"gone": gone})
    with pytest.raises(sx.LeafError, match=r"x: is traced: it has no value yet \[shape \(8,\)\]"):
        jax.jit(lambda x: sx.gather({"x": x}))(jnp.ones(8))


@pytest.mark.parametrize("mesh", ["2x4", "explicit"])
@pytest.mark.parametrize("call", [sx.put, sx.reshard])
def test_in_a_program_an_array_is_put_by_a_constraint(call, mesh):
    target = NamedSharding(MESHES[mesh], P("dp", "tp"))
    placed = jax.jit(lambda x: call({"x": x * 2}, target))(values((4, 8), np.float32))
    assert placed["x"].sharding == target
    layout = sx.layout({"x": np.ones((4, 8), np.float32)}, {"x": P("dp", "tp")}, MESHES[mesh])
    assert jax.jit(lambda x: call({"x": x}, layout))(values((4, 8), np.float32))["x"].sharding == target


def test_an_empty_tree_is_refused_by_put_and_gathered_as_it_is():
    with pytest.raises(sx.LeafError, match="the tree has no leaves"):
        sx.put({}, NamedSharding(MESH, P()))
    assert sx.gather({"a": []}) == {"a": []}


def test_axes_that_the_mesh_lacks_are_listed():
    specs = {"a": P("zz"), "b": P("dp", "dp"), "c": P("tp")}
    tree = {name: np.ones((8, 8)) for name in specs}
    wanted = (
        "(?s)do not belong on the mesh dp=2,tp=4.*a: dim 0: 'zz' is not an axis.*b: dim 1: 'dp' already shards dim 0"
    )
    with jax.set_mesh(MESH), pytest.raises(sx.SpecError, match=wanted):
        sx.put(tree, specs)
    with pytest.raises(sx.SpecError, match=wanted):
        sx.make_shard_and_gather_fns(specs, MESH)


def test_what_is_no_sharding_is_refused():
    with pytest.raises(sx.LayoutError, match=r"a: is str 'dp', not a sharding"):
        sx.put({"a": np.ones(2)}, {"a": "dp"})


# ---- reshard --------------------------------------------------------------------------------------------------------


def test_reshard_to_fewer_devices_says_so():
    x = {"x": jax.device_put(values((8,), np.float32), NamedSharding(MESH, P("dp")))}
    with pytest.warns(UserWarning, match="from 8 devices to 4") as caught:
        sx.reshard(x, NamedSharding(MESHES["half"], P("dp")))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("target", ["2x4", "4x2", "reversed", "explicit"])
@pytest.mark.parametrize("spec", [P("dp"), P(None, "tp"), P(("tp", "dp")), P()])
def test_large_arrays_reshard_right_whatever_the_route(monkeypatch, target, spec):
    monkeypatch.setattr(place, "WORTH_COMPILING", 0)
    monkeypatch.setattr(place, "BATCH_BYTES", 1 << 12)
    tree = [values((64, 32), np.float32, seed) for seed in range(3)]
    old = sx.put(tree, NamedSharding(MESH, P("tp", "dp")))
    new = sx.reshard(old, NamedSharding(MESHES[target], spec), donate=True)
    assert all(same(np.asarray(one), other) for one, other in zip(new, tree, strict=True))


def test_donation_frees_what_was_copied():
    old = sx.put([values((64, 32), np.float32)], NamedSharding(MESH, P("dp", "tp")))
    sx.reshard(old, NamedSharding(MESHES["reversed"], P("tp", "dp")), donate=True)
    assert old[0].is_deleted()


def test_an_array_that_stays_is_given_back_as_it_is():
    old = sx.put([values((8, 4), np.float32)], NamedSharding(MESH, P("dp")))
    assert sx.reshard(old, NamedSharding(MESH, P("dp")), donate=True)[0] is old[0]
    assert not old[0].is_deleted()


# ---- functions for other code ---------------------------------------------------------------------------------------


def test_numpy_leaves_are_really_sharded():
    # The original's shard functions give a NumPy leaf back untouched.
    specs = {"w": P("dp", "tp"), "s": None}
    tree = {"w": values((8, 4), np.float32), "s": np.float32(2)}
    shard_fns, gather_fns = sx.make_shard_and_gather_fns(specs, MESH)
    sharded = jax.tree.map(lambda fn, leaf: fn(leaf), shard_fns, tree)
    assert sharded["w"].sharding == NamedSharding(MESH, P("dp", "tp"))
    assert sharded["s"].sharding == NamedSharding(MESH, P())
    gathered = jax.tree.map(lambda fn, leaf: fn(leaf), gather_fns, sharded)
    assert isinstance(gathered["w"], np.ndarray) and same(gathered["w"], tree["w"])


def test_a_shard_function_that_cannot_shard_raises():
    shard_fns, _ = sx.make_shard_and_gather_fns({"w": P("tp")}, MESH)
    with pytest.raises(sx.PlacementError, match=r"w: dim 0: 6 does not divide by 'tp' \(4\)"):
        shard_fns["w"](np.ones(6))


def test_shard_functions_need_a_mesh_with_devices():
    with pytest.raises(sx.NoMeshError, match="make_shard_and_gather_fns needs a mesh"):
        sx.make_shard_and_gather_fns({"w": P("tp")})
    with pytest.raises(sx.PlacementError, match="has no devices"):
        sx.make_shard_and_gather_fns({"w": P("tp")}, "dp=2,tp=4")
    with pytest.raises(sx.LayoutError, match="w: is int 3, not a partition spec"):
        sx.make_shard_and_gather_fns({"w": 3}, MESH)
    with jax.set_mesh(MESH):
        assert sx.make_shard_and_gather_fns({"w": P("tp")})[0]["w"](np.ones(4)).sharding.spec == P("tp")


def test_gathering_compiles_nothing():
    tree = sx.put([values((8, n), np.float32) for n in range(1, 40)], NamedSharding(MESH, P("dp")))
    with jax.log_compiles(True), warnings.catch_warnings():
        from jax._src import test_util

        with test_util.count_jit_compilation_cache_miss() as count:
            sx.gather(tree)
    assert count() == 0


# ---- init -----------------------------------------------------------------------------------------------------------


def make(key, width, *, scale=1.0):
    return {"w": scale * jax.random.normal(key, (width, 16)), "b": jnp.zeros(16), "step": 0}


RULES = {"w": P("dp", "tp"), "b": P("tp")}


@pytest.mark.parametrize("mesh", ["2x4", "explicit", "reversed"])
def test_init_makes_every_array_in_place(mesh):
    made = sx.init(make, jax.random.key(1), 64, scale=np.float32(2), layout=(RULES, MESHES[mesh]))
    assert made["w"].sharding == NamedSharding(MESHES[mesh], P("dp", "tp"))
    assert made["step"].sharding.is_fully_replicated
    plain = jax.jit(make, static_argnums=1)(jax.random.key(1), 64, scale=np.float32(2))
    np.testing.assert_allclose(made["w"], plain["w"], rtol=1e-5)


def test_init_takes_a_layout_a_tree_of_specs_or_rules_in_a_mesh():
    abstract = jax.eval_shape(lambda key: make(key, 64), jax.random.key(1))
    made = sx.init(make, jax.random.key(1), 64, layout=sx.layout(abstract, RULES, MESH))
    with jax.set_mesh(MESH):
        also = sx.init(make, jax.random.key(1), 64, layout=sx.Rules.of(RULES))
        listed = sx.init(make, jax.random.key(1), 64, layout=list(RULES.items()))
        third = sx.init(make, jax.random.key(1), 64, layout={"w": P("dp", "tp"), "b": P("tp"), "step": P()})
    assert (
        listed["w"].sharding
        == made["w"].sharding
        == also["w"].sharding
        == third["w"].sharding
        == NamedSharding(MESH, P("dp", "tp"))
    )
    with pytest.raises(sx.LayoutError, match=r"w: is float32\[32, 16\], the layout was made for float32\[64, 16\]"):
        sx.init(make, jax.random.key(1), 32, layout=sx.layout(abstract, RULES, MESH))


def test_init_that_does_not_fit_says_what_is_largest_before_it_runs():
    with pytest.raises(sx.PlacementError) as caught:
        sx.init(make, jax.random.key(0), 64, layout=(RULES, MESH), device_memory="256 B")
    message = str(caught.value)
    assert "on every device, and there are 256 B" in message
    assert caught.value.offences[0].where == "w"
    assert "w: float32[64,16]: 512 B of 4 KiB on every device [shape (64, 16), spec P('dp', 'tp')]" in message
    assert "of results" in message and "shard the largest" in message
    assert sx.init(make, jax.random.key(0), 64, layout=(RULES, MESH), device_memory="1 MiB")


def test_init_makes_an_nnx_module():
    nnx = pytest.importorskip("flax.nnx")
    made = sx.init(lambda key: nnx.Linear(8, 16, rngs=nnx.Rngs(key)), jax.random.key(0),
                   layout=({"kernel": P("dp", "tp"), "bias": P("tp")}, MESH))  # fmt: skip
    assert made.kernel[...].sharding == NamedSharding(MESH, P("dp", "tp"))
    assert made(jnp.ones((2, 8))).shape == (2, 16)


# ---- memory ---------------------------------------------------------------------------------------------------------

PEAK = """
import os, resource, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, shardax as sx
mesh = sx.make_mesh("dp=8")
sharding = jax.sharding.NamedSharding(mesh, jax.P("dp"))
small = sx.put([np.ones(8, np.float32)], sharding)
sx.gather(small)
tree = [np.full((8, 1 << 17), n, np.float32) for n in range(50)]  # 4 MiB each
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
placed = sx.put(tree, sharding)
jax.block_until_ready(placed)
put = peak() - before
del tree
back = sx.gather(placed)
print(put / 200, (peak() - before) / 200, back[3][0, 0])
"""


def test_the_host_never_holds_a_second_copy():
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=240)
    put, both, value = map(float, run.stdout.split())
    assert value == 3
    assert put < 1.3, "the arrays themselves, on simulated devices, and no other copy"
    assert both < 1.3, "the gathered tree takes the place of the one that was deleted"


# ---- many processes -------------------------------------------------------------------------------------------------


@pytest.mark.processes(4, devices=2)
@pytest.mark.parametrize("shape", ["8", "2,4", "4,2"])
def test_put_and_gather_over_processes(shape):
    sizes = tuple(map(int, shape.split(",")))
    mesh = jax.make_mesh(sizes, ("dp", "tp")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    last = mesh.axis_names[-1]
    tree = {
        "a": np.arange(64.0, dtype=np.float32).reshape(8, 8),
        "b": np.arange(24, dtype=ml_dtypes.bfloat16).reshape(8, 3),
        "n": 7,
        "z": np.ones((0, 4), np.float32),
        "k": jax.random.split(jax.random.key(5), 8),
    }
    specs = {"a": P("dp", last) if last != "dp" else P(None, "dp"), "b": P("dp"), "n": P(), "z": P(), "k": P("dp")}
    placed = sx.put(tree, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
    assert placed["a"].sharding == NamedSharding(mesh, specs["a"])
    back = sx.gather(placed)
    assert all(same(back[name], tree[name]) for name in "abz")
    assert back["n"] == 7
    assert np.array_equal(jax.random.key_data(back["k"]), jax.random.key_data(tree["k"]))


@pytest.mark.processes(4, devices=2)
def test_reshard_over_processes_also_to_other_devices():
    devices = np.array(jax.devices())
    wide = Mesh(devices.reshape(2, 4), ("dp", "tp"))
    turned = Mesh(devices[::-1].reshape(4, 2), ("dp", "tp"))
    narrow = Mesh(devices[::2].reshape(2, 2), ("dp", "tp"))  # one device of every process
    x = np.arange(512, dtype=np.float32).reshape(32, 16)
    placed = sx.put({"x": x}, NamedSharding(wide, P("dp", "tp")))
    for mesh in (turned, narrow, wide):
        placed = sx.reshard(placed, NamedSharding(mesh, P("tp", "dp")), donate=True)
        assert placed["x"].sharding == NamedSharding(mesh, P("tp", "dp"))
        assert same(sx.gather(placed)["x"], x)


@pytest.mark.processes(4, devices=2)
def test_a_gather_of_many_buffers_and_pieces():
    from shardax.arrays import exchange

    exchange.BUFFER_BYTES = 1 << 10  # the smallest buffer is 64 KiB a process
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    tree = [np.random.default_rng(n).integers(0, 255, (8 * 7, 1 + 800 * n), np.uint8) for n in range(6)]
    placed = sx.put(tree, NamedSharding(mesh, P("dp")))
    assert all(same(one, other) for one, other in zip(sx.gather(placed), tree, strict=True))


@pytest.mark.processes(4, devices=2)
def test_arrays_of_some_processes_cannot_be_gathered_by_the_others():
    mine = Mesh(np.array(jax.devices()[:4]), ("dp",))  # processes 0 and 1
    placed = sx.put({"w": np.arange(8.0, dtype=np.float32)}, NamedSharding(mine, P("dp")))
    with pytest.raises(sx.PlacementError, match=r"(?s)w: lives on processes \[0, 1\] of 4.*spans all processes"):
        sx.gather(placed)


@pytest.mark.processes(4, devices=(2, 2, 1, 3))
def test_uneven_processes_gather_too():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert same(sx.gather(sx.put({"x": x}, NamedSharding(mesh, P("dp"))))["x"], x)
