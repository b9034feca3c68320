"""Two proofs side by side, and proofs in files; the disk cache that makes the second one quick."""

import json
import lzma
import os
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ProofError
from shardax.proving import compile_cache
from shardax.proving.installed import missing

needs_tpu = pytest.mark.skipif(missing("tpu") is not None, reason=f"no TPU compiler: {missing('tpu')}")


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def step(w, x):
    return w * 2, jnp.tanh(x @ w).sum()


def prove(w=None, target="cpu:8", **options):
    specs = (P(None, "tp") if w is None else w, P("dp"))
    return sx.prove(
        step, shape(128, 128), shape(64, 128), mesh="dp=4,tp=2", target=target, in_specs=specs,
        out_specs=(specs[0], P()), donate="w", **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def proof():
    return prove()


# ---- differences ----------------------------------------------------------------------------------------------------


def test_what_changed(proof):
    changed = sx.diff(proof, prove(P()))
    assert changed and isinstance(changed, sx.ProofDiff)
    said = [str(change) for change in changed.changes]
    assert "w: loses its sharding: was -,tp, is replicated" in said
    text = str(changed)
    assert text.splitlines()[0] == "step on cpu:8, dp=4,tp=2 → step on cpu:8, dp=4,tp=2"
    assert "arguments per device" in text and "40 KiB" in text and "72 KiB" in text and "+80.0%" in text
    assert "work per device" in text and "collectives" in text
    assert all(line in text for line in said)


def test_nothing_changed(proof):
    same = sx.diff(proof, replace(proof, compile_seconds=99.0))
    assert not same and same.changes == () and "nothing else differs" in str(same)
    assert {change for *_, change in same.numbers} == {""}


def test_small_changes_count_where_a_lock_would_not_mind(proof, tmp_path):
    other = replace(proof, memory=replace(proof.memory, arguments=proof.memory.arguments + 4))
    assert [change.where for change in sx.diff(proof, other).changes] == ["memory arguments"]
    sx.check_lock(proof, tmp_path / "l", update=True)
    sx.check_lock(other, tmp_path / "l")


def test_files_and_proofs_alike(proof, tmp_path):
    proof.save(tmp_path / "one.json")
    prove(P()).save(tmp_path / "other.json")
    assert sx.diff(tmp_path / "one.json", str(tmp_path / "other.json")) == sx.diff(proof, prove(P()))
    with pytest.raises(ProofError, match="nowhere"):
        sx.diff(proof, tmp_path / "nowhere.json")


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu:8", pytest.param("tpu:v5e:2x4", marks=needs_tpu)])
def test_a_saved_proof_is_the_proof(target, tmp_path):
    proof = prove(target=target)
    proof.save(tmp_path / "proof.json")
    again = sx.Proof.load(tmp_path / "proof.json")
    assert again == proof and again.hlo == "" and again.cached == proof.cached
    assert again.ledger == proof.ledger and again.memory == proof.memory and again.estimate == proof.estimate
    assert again.lock() == proof.lock() and again.to_json() == proof.to_json()
    assert json.loads((tmp_path / "proof.json").read_text())["shardax"] == "proof"


def test_files_that_hold_no_proof(tmp_path):
    path = tmp_path / "proof.json"
    with pytest.raises(ProofError, match=r"there is no proof in .*proof.json"):
        sx.Proof.load(path)
    for text, words in (
        ("{", "holds no proof"),
        ("[]", "holds no proof"),
        ('{"shardax": "lock", "version": 1}', "not a proof of version 1: lock 1"),
        ('{"shardax": "proof", "version": 99}', "not a proof of version 1: proof 99"),
        ('{"shardax": "proof", "version": 1, "name": "x"}', "KeyError 'target'"),
    ):
        path.write_text(text)
        with pytest.raises(ProofError) as failure:
            sx.Proof.load(path)
        assert str(path) in str(failure.value) and words in str(failure.value), text


# ---- the cache of the compiler's answers ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDAX_CACHE", str(tmp_path))
    return tmp_path / "proofs"


def test_an_unchanged_step_is_not_compiled_again(folder):
    first = prove()
    began = time.perf_counter()
    second = prove()
    assert time.perf_counter() - began < 5  # a compile of a large step takes minutes
    assert not first.cached and second.cached and second == first
    assert second.hlo == first.hlo and "kept from" in str(second)
    (entry,) = folder.iterdir()
    assert entry.suffix == ".xz"


def test_what_is_another_question_is_asked(folder):
    prove()
    others = (
        {"w": P("tp")},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
        {"target": "cpu:8", "cache": False},
    )
    assert [prove(**other).cached for other in others] == [False] * 3
    assert prove().cached


def test_flags_and_versions_are_part_of_the_question(folder, monkeypatch):
    program = {"module": b"stablehlo", "kept": (0,)}
    facts = {"target": "cpu:8", "versions": {"jax": "0.10.2"}}
    one = compile_cache.key_of(program, facts)
    assert one == compile_cache.key_of(dict(reversed(program.items())), facts)
    assert one != compile_cache.key_of(program | {"module": b"other"}, facts)
    assert one != compile_cache.key_of(program | {"kept": (1,)}, facts)
    assert one != compile_cache.key_of(program, facts | {"versions": {"jax": "0.12.0"}})
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "--xla_other=1")
            assert one != compile_cache.key_of(program, facts)


ANSWER = {"seconds": 1.0, "axes": {}, "hlo": "text", "header": "", "memory": {}}


def test_a_damaged_entry_is_forgotten(folder):
    compile_cache.store("key", ANSWER)
    assert compile_cache.load("key") == ANSWER
    others = [b"", b"rubbish", (folder / "key.xz").read_bytes()[:-9]]
    others += [lzma.compress(text) for text in (b"{", b"[]", b"null", b"{}", b'{"hlo": "text"}', b"\xff")]
    for rubbish in others:
        (folder / "key.xz").write_bytes(rubbish)
        assert compile_cache.load("key") is None and not (folder / "key.xz").exists()


def test_no_cache_where_none_is_wanted_or_possible(tmp_path, monkeypatch):
    for word in ("", "0", "off"):
        monkeypatch.setenv("SHARDAX_CACHE", word)
        compile_cache.store("key", {})
        assert compile_cache.cache_folder() is None and compile_cache.load("key") is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDAX_CACHE", str(tmp_path / "file"))
    compile_cache.store("key", {})
    assert compile_cache.load("key") is None
    monkeypatch.delenv("SHARDAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compile_cache.cache_folder() == tmp_path / "shardax" / "proofs"


def test_the_oldest_are_forgotten_first(folder, monkeypatch):
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 400)
    for at in range(5):
        compile_cache.store(f"key{at}", ANSWER | {"at": at})
        if (folder / f"key{at}.xz").exists():
            os.utime(folder / f"key{at}.xz", (at, at))
        compile_cache.load("key0")  # used just now
    kept = {path.stem for path in folder.iterdir()}
    assert {"key0", "key4"} <= kept and "key1" not in kept
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 400
