"""Checkpoints: any dtype, another mesh, other processes; a changed bit is found and named."""

import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.arrays import checkpoint
from shardax.arrays.fingerprint import fingerprint, rows_of_chunk

pytest.importorskip("orbax.checkpoint")

MESH = sx.make_mesh("dp=2,tp=4")
OTHER = sx.make_mesh("dp=4,tp=2")
TREE = {
    "mlp": [{"up": np.arange(512, dtype=np.float32).reshape(64, 8)}, {"up": np.ones((8, 4), ml_dtypes.bfloat16)}],
    "count": np.int32(7),
    "mask": np.array([True, False] * 4),
    "int4": np.arange(8).astype(ml_dtypes.int4),
    "uint4": np.arange(8).astype(ml_dtypes.uint4),  # tensorstore has no such dtype
    "empty": np.ones((0, 4), np.float32),
    "none": None,
}
RULES = {"up": P("dp", "tp"), "mask": P("tp"), ".*": None}


def same(one, other):
    flat = [jax.tree.leaves(jax.tree.map(np.asarray, tree)) for tree in (one, other)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*flat, strict=True))


def test_a_tree_comes_back_under_a_layout_on_another_mesh(tmp_path):
    layout = sx.layout(TREE, RULES, MESH)
    where = sx.save_checkpoint(tmp_path / "run", sx.put(TREE, layout), layout=layout, step=5)
    assert where == tmp_path / "run" / "5"
    target = sx.layout(TREE, RULES, OTHER)
    back = sx.restore_checkpoint(tmp_path / "run", target)
    assert list(back) == list(TREE) and back["none"] is None
    assert back["mlp"][0]["up"].sharding == NamedSharding(OTHER, P("dp", "tp"))
    assert same(back, TREE)


def test_the_saved_layout_is_used_on_the_mesh_in_force(tmp_path):
    layout = sx.layout(TREE, RULES, MESH)
    sx.save_checkpoint(tmp_path / "run", sx.put(TREE, layout), layout=layout)
    with jax.set_mesh(OTHER):
        back = sx.restore_checkpoint(tmp_path / "run")
    assert back["mlp/0/up"].sharding == NamedSharding(OTHER, P("dp", "tp"))
    with pytest.raises(sx.NoMeshError):
        sx.restore_checkpoint(tmp_path / "run")
    sx.save_checkpoint(tmp_path / "bare", {"w": np.ones(2)})
    with pytest.raises(sx.CheckpointError, match="no layout was saved"):
        sx.restore_checkpoint(tmp_path / "bare")


def test_the_mesh_in_force_may_have_other_devices_than_the_arrays(tmp_path):
    small, large = sx.make_mesh("dp=2"), sx.make_mesh("dp=8")
    tree = {
        "rows": jax.device_put(np.arange(16.0), jax.NamedSharding(large, jax.P("dp"))),
        "alone": jax.device_put(np.ones(3), jax.devices()[7]),
        "host": np.ones(2),
    }
    made = sx.layout(tree, [("rows", jax.P("dp")), ("", None)], large)
    with jax.set_mesh(small):
        sx.save_checkpoint(tmp_path / "saved", tree)
        back = sx.restore_checkpoint(tmp_path / "saved", made)
    assert back["rows"].sharding.mesh == large and np.array_equal(back["rows"], np.arange(16.0))


def test_keys_and_plain_scalars_come_back(tmp_path):
    tree = {"k": jax.random.split(jax.random.key(1, impl="rbg"), 8), "lr": 0.5, "f64": np.arange(3.0)}
    sx.save_checkpoint(tmp_path / "c", tree)
    target = sx.layout(tree, {"k": P("tp"), ".*": None}, MESH)
    back = sx.restore_checkpoint(tmp_path / "c", target)
    assert back["k"].sharding.is_equivalent_to(NamedSharding(MESH, P("tp")), 1)
    assert np.array_equal(jax.random.key_data(back["k"]), jax.random.key_data(tree["k"]))
    assert jax.random.key_impl(back["k"]) == jax.random.key_impl(tree["k"])
    assert back["lr"] == 0.5 and back["f64"].dtype == np.float32


def test_the_latest_step_or_the_one_asked_for(tmp_path):
    target = sx.layout({"n": np.ones(2)}, {".*": None}, MESH)
    for step in (1, 20, 3):
        sx.save_checkpoint(tmp_path, {"n": np.full(2, step)}, step=step)
    assert sx.restore_checkpoint(tmp_path, sx.layout({"n": np.ones(2, int)}, {".*": None}, MESH))["n"][0] == 20
    assert sx.restore_checkpoint(tmp_path, sx.layout({"n": np.ones(2, int)}, {".*": None}, MESH), step=3)["n"][0] == 3
    with pytest.raises(sx.CheckpointError, match=r"(?s)no checkpoint of step 4.*there are steps 1, 3, 20"):
        sx.restore_checkpoint(tmp_path, target, step=4)
    with pytest.raises(sx.CheckpointError, match="no checkpoint in 'nowhere'"):
        sx.restore_checkpoint(tmp_path / "nowhere", target)
    with pytest.raises(sx.CheckpointError, match="there is something at '3' already"):
        sx.save_checkpoint(tmp_path, {"n": np.ones(2)}, step=3)


def test_leaves_that_are_not_those_of_the_checkpoint_are_all_listed(tmp_path):
    sx.save_checkpoint(tmp_path / "c", {"a": np.ones((4, 2), np.float32), "b": np.ones(3), "c": np.ones(3)})
    target = sx.layout({"a": np.ones((2, 4)), "b": np.ones(3, np.int32), "d": np.ones(3)}, {".*": None}, MESH)
    with pytest.raises(sx.CheckpointError) as caught:
        sx.restore_checkpoint(tmp_path / "c", target)
    text = str(caught.value)
    assert "a: is float32[4, 2] in the checkpoint, float64[2, 4] is wanted" in text
    assert "b: is float32[3] in the checkpoint, int32[3] is wanted" in text
    assert "c: is in the checkpoint, and not wanted" in text and "d: is not in the checkpoint" in text
    with pytest.raises(sx.CheckpointError, match=r"a: is ShapeDtypeStruct, without a sharding"):
        sx.restore_checkpoint(tmp_path / "c", {"a": jax.ShapeDtypeStruct((4, 2), "float32")})


def test_a_tree_of_empty_arrays_comes_back_and_an_empty_tree_is_refused(tmp_path):
    tree = {"none": np.ones((0, 3), np.float32)}
    sx.save_checkpoint(tmp_path, tree, step=0)
    assert same(sx.restore_checkpoint(tmp_path, sx.layout(tree, {".*": None}, MESH)), tree)
    with pytest.raises(sx.LeafError, match="the tree has no leaves to save"):
        sx.save_checkpoint(tmp_path, {"a": []}, step=1)
    with pytest.raises(sx.LeafError, match="w: is abstract"):
        sx.save_checkpoint(tmp_path, {"w": jax.ShapeDtypeStruct((3,), "float32")}, step=1)
    with pytest.raises(sx.CheckpointError, match="step -1 is negative"):
        sx.save_checkpoint(tmp_path, tree, step=-1)


def test_two_leaves_of_one_path_are_refused(tmp_path):
    with pytest.raises(sx.CheckpointError, match="a/b: is the path of two leaves"):
        sx.save_checkpoint(tmp_path / "c", {"a/b": np.ones(2), "a": {"b": np.ones(3)}})


def files_with_data(where: Path):
    return [path for path in (where / "arrays").rglob("d/*") if path.stat().st_size > 2000]


def test_one_flipped_bit_is_found_and_named(tmp_path):
    # Orbax alone restores it without a word, 8 times of 8.
    tree = {"w": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), "b": np.ones(8, np.float32)}
    layout = sx.layout(tree, {"w": P("dp", "tp"), "b": None}, MESH)
    where = sx.save_checkpoint(tmp_path / "c", sx.put(tree, layout))
    found = 0
    for path in files_with_data(where):
        original = path.read_bytes()
        for place in range(len(original) // 4, len(original) * 3 // 4, len(original) // 4):
            changed = bytearray(original)
            changed[place] ^= 4
            path.write_bytes(changed)
            with pytest.raises(sx.CheckpointError, match=r"w: differs between rows|cannot be read") as caught:
                sx.restore_checkpoint(tmp_path / "c", layout)
            found += "w: differs between rows" in str(caught.value)
            assert "b: differs" not in str(caught.value)
        path.write_bytes(original)
    assert found
    assert same(sx.restore_checkpoint(tmp_path / "c", layout), tree)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax abandons its other reads
def test_a_truncated_file_is_an_error_that_names_the_checkpoint(tmp_path):
    tree = {"w": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)}
    where = sx.save_checkpoint(tmp_path / "c", tree)
    for path in files_with_data(where):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(sx.CheckpointError, match="the arrays of checkpoint 'c' cannot be read"):
        sx.restore_checkpoint(tmp_path / "c", sx.layout(tree, {"w": P("dp")}, MESH))


def test_orbax_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'shardax\[orbax\]'"):
        sx.save_checkpoint(tmp_path / "c", TREE)


# ---- the hash -------------------------------------------------------------------------------------------------------

SHAPES = [(), (8,), (8, 4, 2)]
DTYPES = [bool, np.int8, np.int32, np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4]


@pytest.mark.parametrize(("dtype", "shape"), [*((dtype, (40, 8)) for dtype in DTYPES), *((np.int8, s) for s in SHAPES)])
def test_the_hash_does_not_depend_on_how_an_array_is_cut(dtype, shape):
    x = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    cuts = [(MESH, P()), (OTHER, P())] + [(MESH, P(("dp", "tp"))), (OTHER, P(*("tp", "dp")[: len(shape)]))] * bool(
        shape
    )
    hashes = [fingerprint(jax.device_put(x, NamedSharding(mesh, spec))) for mesh, spec in cuts]
    assert all(one == fingerprint(x) for one in hashes)
    assert len(hashes[0]) <= 16 and fingerprint(np.zeros((0, 3))) == []


@given(st.integers(0, 39), st.integers(0, 7), st.integers(0, 31))
def test_any_bit_changes_the_hash_of_its_chunk_alone(row, column, bit):
    x = np.zeros((40, 8), np.uint32)
    y = x.copy()
    y[row, column] ^= np.uint32(1 << bit)
    differs = [place for place, (a, b) in enumerate(zip(fingerprint(x), fingerprint(y), strict=True)) if a != b]
    assert len(differs) == 1
    first, last = rows_of_chunk((40, 8), differs[0])
    assert first <= row < last


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 7)), min_size=2, max_size=4, unique=True))
def test_flipped_signs_and_swapped_values_do_not_cancel(places):
    x = np.random.default_rng(2).normal(size=(40, 8)).astype(np.float32)
    y = x.copy()
    for place in places:
        y[place] = -y[place]
    assert fingerprint(x) != fingerprint(y)
    z = x.copy()
    z[places[0]], z[places[1]] = x[places[1]], x[places[0]]
    assert fingerprint(x) != fingerprint(z)


# ---- many processes -------------------------------------------------------------------------------------------------


def tree_of(seed):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(32, 16)).astype(np.float32), "b": rng.normal(size=(16,)).astype(ml_dtypes.bfloat16)}


def save(folder, shape):
    mesh = jax.make_mesh(shape, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    tree = tree_of(3)
    layout = sx.layout(tree, {"w": P("dp", "tp"), "b": P("tp")}, mesh)
    sx.save_checkpoint(folder, sx.put(tree, layout), layout=layout, step=1)


def restore(folder, shape):
    mesh = jax.make_mesh(shape, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    tree = tree_of(3)
    back = sx.gather(sx.restore_checkpoint(folder, sx.layout(tree, {"w": P("tp", "dp"), "b": None}, mesh)))
    return all(np.array_equal(back[name], tree[name]) for name in tree)


def test_saved_by_four_processes_and_restored_by_two_and_by_one(process_pool, tmp_path):
    process_pool.run(save, tmp_path, (2, 4), processes=4, devices=2, timeout=240)
    assert process_pool.run(restore, tmp_path, (1, 8), processes=2, devices=4, timeout=240) == [True, True]
    assert restore(tmp_path, (4, 2))


def save_apart(folder):
    mine = folder / str(jax.process_index())
    mine.mkdir()
    checkpoint.VISIBLE_WITHIN_SECONDS, patience = 0.5, checkpoint.VISIBLE_WITHIN_SECONDS
    try:
        sx.save_checkpoint(mine / "run", {"w": np.ones(2)}, step=1)
    except sx.CheckpointError as error:
        return str(error)
    finally:
        checkpoint.VISIBLE_WITHIN_SECONDS = patience


def test_directories_that_are_not_shared_are_an_error_not_a_hang(process_pool, tmp_path):
    said = process_pool.run(save_apart, tmp_path, processes=2, devices=4, timeout=240)
    assert all("processes [1] do not see the directory that process 0 sees" in text for text in said)
