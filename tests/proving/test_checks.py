"""Assertions over proofs, checks and trees: each passes, and fails with everything that is wrong."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ProofFailure


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def step(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    y, _ = lax.scan(layer, x, params["w"])
    return {"w": params["w"] * 2, "b": params["b"] + 1}, y.sum()


ARGUMENTS = ({"w": shape(3, 64, 64), "b": shape(1024)}, shape(32, 64))
SPECS = ({"w": P(None, None, "fsdp"), "b": P()}, P("fsdp"))


@pytest.fixture(scope="module")
def proof():
    return sx.prove(
        step,
        *ARGUMENTS,
        mesh="fsdp=8",
        in_specs=SPECS,
        out_specs=({"w": SPECS[0]["w"], "b": P()}, P()),
        donate="params",
    )


@pytest.fixture(scope="module")
def checked():
    return sx.check(step, *ARGUMENTS, mesh="fsdp=8", in_specs=SPECS)


def fails(assertion, *args, **kwargs):
    with pytest.raises(ProofFailure) as caught:
        assertion(*args, **kwargs)
    assert isinstance(caught.value, AssertionError) and len(str(caught.value).splitlines()) < 20
    return str(caught.value)


# ---- collectives ----------------------------------------------------------------------------------------------------


def test_collectives_as_expected(proof, checked):
    for found in (proof, checked):
        sx.assert_collectives(found, {"all-gather": {"fsdp": 3}}, no=["all-to-all", "collective-permute"])
        sx.assert_collectives(found, {"all-gather": {("fsdp",): 3}, "all-reduce": 1}, exact=True)
        sx.assert_collectives(found)


def test_other_counts_other_axes_and_forbidden_kinds(proof, checked):
    text = fails(
        sx.assert_collectives, proof, {"all-gather": {"fsdp": 2}, "all-to-all": {"fsdp": 1}}, no=["all-reduce"]
    )
    lines = text.splitlines()
    assert lines[0] == "step on cpu:8 (fsdp=8) does not run the expected collectives"
    assert re.match(r"  all-gather over fsdp: expected 2, found 3: 3× test_checks.py:\d+ \(\S+\)", lines[1])
    assert lines[2] == "  all-to-all over fsdp: expected 1, found 0"
    assert lines[3].startswith("  all-reduce: expected none, found 1: 1× test_checks.py:")
    text = fails(sx.assert_collectives, checked, {"all-gather": 1})
    assert text.startswith(
        "step on mesh fsdp=8 does not run the expected collectives\n  all-gather: expected 1, found 3"
    )


def test_exact_lists_what_was_not_expected(proof):
    text = fails(sx.assert_collectives, proof, {"all-gather": {"fsdp": 3}}, exact=True)
    assert "all-reduce over fsdp: not expected, found 1" in text


def test_a_mistyped_kind_is_not_a_passing_test(proof):
    with pytest.raises(ValueError, match="allgather: is no collective; did you mean 'all-gather'"):
        sx.assert_collectives(proof, {"allgather": 1})
    with pytest.raises(ValueError, match="known: all-reduce, all-gather"):
        sx.assert_collectives(proof, no=["gather"])


# ---- replication ----------------------------------------------------------------------------------------------------


def test_replication(proof, checked):
    for found in (proof, checked):
        sx.assert_no_replication_over(found, "64KB")
        sx.assert_no_replication_over(found, 1, ignore=["params['b']", "result"])
        text = fails(sx.assert_no_replication_over, found, "4KB")
        assert text.startswith("2 arrays of 4 KiB or more replicated by step\n")
        assert "params['b']: 4 KiB on every device, 8 copies; 3.5 KiB could be saved" in text
        assert "result[0]['b']: " in text


def test_replication_along_an_axis():
    proof = sx.prove(lambda x: x.sum(), shape(64, 64), mesh="dp=4,tp=2", in_specs=P("dp"))
    sx.assert_no_replication_over(proof, "1KB")  # no array is whole everywhere
    sx.assert_no_replication_over(proof, "1KB", axes="dp")
    assert "x: 4 KiB on every device along tp, 2 copies" in fails(
        sx.assert_no_replication_over, proof, "1KB", axes="tp"
    )


# ---- donation -------------------------------------------------------------------------------------------------------


def test_donated(proof):
    sx.assert_donated(proof)
    sx.assert_donated(proof, "params", "params['w']")
    text = fails(sx.assert_donated, proof, "x", "parms")
    assert "x: is not donated (1 KiB per device)" in text
    assert "parms: is no argument of step; did you mean 'params'" in text


def test_donations_that_are_lost_or_were_never_made():
    specs = {"in_specs": P("dp"), "mesh": "dp=8"}
    proof = sx.prove(lambda s: s["a"].sum(), {"a": shape(64, 8)}, donate="s", **specs)
    text = fails(sx.assert_donated, proof)
    assert "s['a']: was donated and is not reused: 256 B per device held twice" in text
    text = fails(sx.assert_donated, sx.prove(lambda s: s * 2, shape(64, 8), **specs))
    assert 'donates nothing; would work: prove(…, donate="state")' in text


# ---- fit ------------------------------------------------------------------------------------------------------------


def test_fits(proof):
    """(Whether the TPU compiler's own verdict arrives here is in test_prove.)"""
    memory = replace(proof.memory, peak=8 << 30, hbm=16 << 30)
    on_chip = replace(proof, target=sx.Target.of("tpu:v5e:2x4"), memory=memory)
    sx.assert_fits(on_chip)
    sx.assert_fits(on_chip, margin="8GB")
    text = fails(sx.assert_fits, on_chip, margin="9GB")
    head = "step leaves 8 GiB on tpu:v5e:2x4: 8 GiB of 16 GiB, asked for 9 GiB free"
    assert text.splitlines()[0] == head and len(text.splitlines()) == 1 + min(len(memory.buffers), 5)
    full = replace(on_chip, memory=replace(memory, peak=20 << 30))
    assert fails(sx.assert_fits, full).startswith("step does not fit on tpu:v5e:2x4: 20 GiB of 16 GiB")


def test_nothing_to_fit(proof):
    assert fails(sx.assert_fits, proof) == (
        'cpu:8 has no device memory to fit\nprove for a device, for example target="tpu:v5p:2x2x1" or "gpu:h100:8"'
    )


# ---- trees ----------------------------------------------------------------------------------------------------------


def placed(spec, *sizes):
    return jax.device_put(np.ones(sizes, np.float32), NamedSharding(sx.make_mesh("dp=4,tp=2"), spec))


def test_sharded_as_a_layout_says():
    tree = {"w": placed(P("dp", "tp"), 8, 8), "b": placed(P(), 8)}
    layout = sx.layout(tree, [("w", ["dp", "tp"]), ("b", [])], "dp=4,tp=2")
    sx.assert_sharded(tree, layout)
    sx.assert_sharded(tree, {"w": P("dp", "tp"), "b": P(None)})
    sx.assert_sharded(layout.abstract, layout)
    sx.assert_sharded([tree["b"], tree["b"]], P())
    other = {"w": placed(P("dp"), 8, 8), "b": np.ones(8), "c": placed(P(), 8)}
    text = fails(sx.assert_sharded, other, layout)
    assert text.splitlines()[0] == "3 leaves not as the layout says"
    assert "w: lies as P('dp',), not as P('dp', 'tp') [shape (8, 8)]" in text
    assert "b: has no sharding, not P" in text and "c: is not in the layout" in text
    assert "b: is in the layout, not in the tree" in fails(sx.assert_sharded, {"w": tree["w"]}, layout)


def test_specs_that_mean_the_same_are_the_same():
    one = {"w": placed(P(("dp",), None), 8, 8)}
    sx.assert_sharded(one, {"w": P("dp")})
    sx.assert_sharded({"w": jnp.ones(8)}, {"w": P()})
    assert "has SingleDeviceSharding, not P('dp'" in fails(sx.assert_sharded, {"w": jnp.ones(8)}, {"w": P("dp")})


# ---- names as a person writes them ----------------------------------------------------------------------------------


def test_a_mistyped_axis_is_not_a_passing_test(proof):
    for call in (
        lambda: sx.assert_collectives(proof, {"all-to-all": {"fspd": 0}}),
        lambda: sx.assert_no_replication_over(proof, "1KB", axes="fspd"),
    ):
        with pytest.raises(sx.ProofError, match="fspd: is no axis of the mesh; did you mean 'fsdp'"):
            call()


def test_one_name_where_several_may_stand(proof):
    sx.assert_collectives(proof, {"all-gather": {"fsdp": 3}}, no="all-to-all")
    assert "all-gather: expected none" in fails(sx.assert_collectives, proof, no="all-gather")
    sx.assert_no_replication_over("64MB", proof)
    sx.assert_no_replication_over(proof, 1, ignore=["params['b']", "result"])
    with pytest.raises(TypeError, match="takes a proof and a size"):
        sx.assert_no_replication_over("1MB", "2MB")


def test_true_names_no_argument():
    with pytest.raises(sx.ProofError, match=r"donate=True: says no argument; name it: one or several of \['x'\]"):
        sx.prove(lambda x: x * 2, shape(8), mesh="dp=8", in_specs=P("dp"), donate=True)


def test_rows_are_added_up_by_the_name_of_a_column(proof):
    ledger = proof.ledger
    assert ledger.group_by("op") == ledger.by_op() and ledger.group_by("line") == ledger.by_line()
    assert ledger.group_by("axis") == ledger.group_by("axes") == ledger.by_axis()
    assert ledger.by_axis()["fsdp"] == ledger.by_axis()["fsdp",]
    with pytest.raises(KeyError):
        ledger.by_axis()["tp"]
    with pytest.raises(sx.ProofError, match="have no 'phrase'; did you mean 'phase'"):
        ledger.group_by("phrase")


def test_a_proof_is_a_value(proof, tmp_path):
    proof.save(tmp_path / "proof.json")
    again = sx.Proof.load(tmp_path / "proof.json")
    assert again == proof and hash(again) == hash(proof) and str(again) == str(proof)
    with pytest.raises(sx.ProofError, match="there is no proof in"):
        sx.Proof.load(tmp_path)


def test_a_lock_is_its_file(proof, tmp_path):
    lock = proof.lock(tmp_path / "step.lock")
    assert str(lock) == (tmp_path / "step.lock").read_text() and lock == proof.lock()
    sx.check_lock(proof, tmp_path / "step.lock")
