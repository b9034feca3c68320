"""The sharding lock: the same for the same program, and a diff that a person can read for another."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ProofFailure
from shardax.proving.lock import lock_differences, lock_of, read_lock, write_lock

SOURCE = """
def step(params, x):
    h = jnp.tanh(x @ params["up"])
    {extra}
    return {{"up": params["up"] * 0.5, "down": params["down"] * 0.5}}, (h @ params["down"]).sum()
"""


def written(extra="pass", above=0, file="train.py"):
    """The step as somebody may have written it: with an extra line, or further down in another copy of the file."""
    names = {"jnp": jnp, "jax": jax, "P": P}
    exec(compile("\n" * above + SOURCE.format(extra=extra), file, "exec"), names)
    return names["step"]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


COLUMNS = P(None, "tp")


def prove(fn=None, up=COLUMNS, rows=64, donate="params", **options):
    params = {"up": shape(256, 512), "down": shape(512, 256)}
    specs = ({"up": up, "down": P("tp")}, P("dp"))
    out = ({"up": up, "down": P("tp")}, P())
    return sx.prove(
        fn or written(),
        params,
        shape(rows, 256),
        mesh="dp=4,tp=2",
        in_specs=specs,
        out_specs=out,
        donate=donate,
        **options,
    )


def failure(proof, path, **options):
    with pytest.raises(ProofFailure) as caught:
        sx.check_lock(proof, path, **options)
    return str(caught.value)


@pytest.fixture(scope="module")
def proof():
    return prove()


@pytest.fixture
def locked(proof, tmp_path):
    path = tmp_path / "locks" / "step.lock"
    sx.check_lock(proof, path, update=True)
    return path


def test_a_lock_is_small_and_readable(proof, locked):
    text = locked.read_text()
    assert len(text.encode()) < 2500 and max(map(len, text.splitlines())) < 160
    data = json.loads(text)
    assert data["step"] == "step" and data["target"] == "cpu:8" and data["mesh"] == "dp=4,tp=2"
    assert data["layout"]["inputs"] == {"params['down']": "tp", "params['up']": "-,tp", "x": "dp"}
    assert data["memory"]["arguments"] == proof.memory.arguments
    assert {site["where"] for site in data["collectives"]} == {"train.py:step"}
    assert str(proof.compile_seconds) not in text and '"line"' not in text
    peak = data["memory"]["peak"]
    assert abs(peak - proof.memory.peak) <= 0.005 * proof.memory.peak and str(peak).rstrip("0") == str(peak)[:3].rstrip(
        "0"
    )


def test_what_is_locked_holds(proof, locked):
    proof.check_lock(locked)
    sx.check_lock(locked, proof)  # either order
    sx.check_lock(sx.Proof.from_json(json.loads(json.dumps(proof.to_json()))), locked)
    assert lock_of(proof) == proof.lock()


def test_moved_code_changes_nothing(locked):
    sx.check_lock(prove(written(above=40, file="/elsewhere/train.py")), locked)


def test_another_process_writes_the_same_file(locked, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_lock import prove, sx\n"
        "sx.check_lock(prove(cache=False), sys.argv[2], update=True)\n"
    )
    other = tmp_path / "other.lock"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__), str(other)],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert other.read_text() == locked.read_text()


# ---- what fails, and how it reads -----------------------------------------------------------------------------------


def test_a_new_gather(locked):
    text = failure(prove(written("h = jax.lax.with_sharding_constraint(h, P())")), locked)
    assert text.splitlines()[0].startswith(f"step is not what {locked} says: ")
    assert re.search(
        r"all-gather over \S+ \(f32, forward\) in train.py:step: is new: 1×, \S+ KiB sent by each device", text
    )
    assert text.endswith("if this is meant: pytest --shardax-update, and look at the diff of the file")


def test_a_lost_sharding(locked):
    text = failure(prove(up=P()), locked)
    assert "params['up']: loses its sharding: was -,tp, is replicated" in text
    assert "result[0]['up']: loses its sharding: was -,tp, is replicated" in text
    assert "memory arguments: was 528 KiB, is 784 KiB (+48%)" in text


def test_another_sharding(locked):
    assert "params['up']: changes its sharding: was -,tp, is tp" in failure(prove(up=P("tp")), locked)


def test_memory_past_a_tolerance(locked):
    larger = prove(rows=72)
    text = failure(larger, locked, tolerance=0.001)
    assert "memory arguments: was 528 KiB, is 530 KiB (+0%)" in text and "is new" not in text
    sx.check_lock(larger, locked, tolerance=0.2)


def test_a_lost_donation(locked, proof):
    lost = replace(proof, lost_donations=(sx.prove(
        lambda p: p["a"].sum(), {"a": shape(64)}, mesh="dp=8", in_specs=P(), donate="p").lost_donations))  # fmt: skip
    assert "p['a']: donation lost" in failure(lost, locked)
    again = locked.with_name("other.lock")
    sx.check_lock(lost, again, update=True)
    assert "p['a']: donation: no longer a problem" in failure(proof, again)


def test_other_things_a_person_wants_to_hear(locked, proof):
    other = replace(proof, name="other", inputs=proof.inputs[:-1], ledger=sx.Ledger(()), target=sx.Target.of("cpu:16"))
    text = failure(other, locked)
    assert "step: was step, is other" in text and "target: was cpu:8, is cpu:16" in text
    assert "x: is gone from the inputs (was dp)" in text
    assert "all-reduce over tp (f32, forward) in train.py:step: is gone (was 1×, " in text
    reverse = "\n".join(map(str, lock_differences(other.lock(), proof.lock(), 0.05)))
    assert "x: is new among the inputs (dp)" in reverse


def test_how_often_counts(locked, proof):
    rows = tuple(replace(row, count=row.count * 3, wire_bytes=row.wire_bytes * 3) for row in proof.ledger)
    assert ": was 1×, " in (text := failure(replace(proof, ledger=sx.Ledger(rows)), locked)) and ", is 3×, " in text


def test_bytes_on_the_wire_count(locked, proof):
    rows = tuple(replace(row, wire_bytes=row.wire_bytes * 2) for row in proof.ledger)
    assert "on the wire: was " in failure(replace(proof, ledger=sx.Ledger(rows)), locked)


def test_another_version_of_jax_is_said(locked, proof):
    other = replace(proof, versions={**proof.versions, "jax": "9.9"})
    other.check_lock(locked)
    text = failure(replace(other, name="other"), locked)
    assert f"it was written with jax {jax.__version__}, this is 9.9; if this is meant" in text


# ---- files ----------------------------------------------------------------------------------------------------------


def test_update_keeps_what_others_wrote(proof, locked):
    write_lock(read_lock(locked) | {"program": "train.py:case"}, locked)
    sx.check_lock(replace(proof, name="renamed"), locked, update=True)
    assert read_lock(locked)["program"] == "train.py:case" and read_lock(locked)["step"] == "renamed"


def test_files_that_are_no_lock(proof, tmp_path):
    absent = tmp_path / "absent.lock"
    assert failure(proof, absent) == (
        f"there is no sharding lock {absent}\nwrite it with pytest --shardax-update, or check_lock(…, update=True)"
    )
    absent.write_text("{")
    assert f"{absent} is not JSON" in failure(proof, absent)
    for other in ("[]", '{"shardax": "layout"}', '{"shardax": "lock", "version": 99}'):
        absent.write_text(other)
        assert f"{absent} is no sharding lock of version 1" in failure(proof, absent)
    for name, rest in (("memory", None), ("layout", []), ("collectives", [1]), ("collectives", [{"op": "all-gather"}])):
        absent.write_text(json.dumps(dict(lock_of(proof)) | {name: rest}))
        assert re.search(rf"is a damaged sharding lock\n  {name}.*: is missing", failure(proof, absent))
    sx.check_lock(proof, absent, update=True)
    sx.check_lock(proof, absent)


def test_a_check_has_no_lock(proof, tmp_path):
    found = sx.check(lambda x: x.sum(), shape(8), mesh="x=8", in_specs=P("x"))
    with pytest.raises(TypeError, match="check_lock takes a proof, not a Check"):
        sx.check_lock(found, tmp_path / "lock")
    with pytest.raises(TypeError, match="diff takes proofs, or the files of proofs, not a Check"):
        sx.diff(proof, found)


def test_a_proof_and_a_path_are_needed(proof, tmp_path):
    for wrong in ((proof, proof), (tmp_path, tmp_path), ("a", "b")):
        with pytest.raises(TypeError, match="takes a proof and the path"):
            sx.check_lock(*wrong)


def test_no_collectives_is_written_well(tmp_path):
    proof = sx.prove(lambda x: x * 2, shape(64), mesh="dp=8", in_specs=P("dp"))
    sx.check_lock(proof, tmp_path / "l", update=True)
    assert json.loads((tmp_path / "l").read_text())["collectives"] == []
    proof.check_lock(tmp_path / "l")
