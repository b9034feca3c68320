"""A Llama-like train step (scan, remat, bf16 parameters, fp32 Adam) in small: what `benchmarks/proving.py` holds 8B,
70B and 405B to."""

from functools import lru_cache

import jax
import pytest
from benchmarks._llama import LLAMA_8B, LLAMA_70B, LLAMA_405B, Llama, train_step

import shardax as sx
from shardax.proving.installed import missing

SMALL = Llama(layers=3, width=1024, heads=8, kv_heads=4, hidden=2816, vocab=8192)
BATCH, LENGTH = 8, 512
needs_tpu = pytest.mark.skipif(missing("tpu") is not None, reason=f"no TPU compiler: {missing('tpu')}")
needs_gpu = pytest.mark.skipif(missing("gpu") is not None, reason=f"no GPU compiler: {missing('gpu')}")
tiers = pytest.mark.parametrize(
    "target", ["cpu:8", pytest.param("tpu:v5e:2x4", marks=needs_tpu), pytest.param("gpu:h100:8", marks=needs_gpu)]
)


@lru_cache
def proved(target, mesh="fsdp=4,tp=2"):
    step = train_step(SMALL)
    return sx.prove(step, SMALL.state(mesh), SMALL.tokens(mesh, BATCH, LENGTH), mesh=mesh, target=target)


@pytest.mark.timeout(600)
@tiers
def test_ten_bytes_a_parameter_stay_and_work_is_the_closed_form(target):
    proof = proved(target)
    assert proof.memory.arguments * 8 == pytest.approx(10 * SMALL.parameters, rel=1e-3)
    assert proof.total_flops == pytest.approx(SMALL.flops(BATCH, LENGTH), rel=0.02)
    assert dict(proof.memory.groups).keys() == {"state['params']", "state['opt']", "tokens"}
    assert dict(proof.memory.groups)["state['opt']"] == pytest.approx(SMALL.parameters, rel=1e-3)  # 8 bytes, 8 devices
    assert not proof.lost_donations and not proof.replicated
    assert proof.fits is (None if target == "cpu:8" else True)


@pytest.mark.timeout(600)
@tiers
def test_collectives_are_those_of_the_layout(target):
    """Parameters are gathered over fsdp, activations reduced over tp, in every one of the layers, both ways."""
    ledger = proved(target).ledger
    gathered = {row.path for row in ledger if row.op == "all-gather" and row.axes == ("fsdp",) and row.path}
    assert {f"state['params']['layers']['{name}']" for name in ("gate", "up", "down")} <= gathered or target != "cpu:8"
    reduced = [row for row in ledger if row.op == "all-reduce" and row.axes == ("tp",)]
    assert {row.phase for row in reduced} == {"forward", "backward"}
    assert all(row.count % SMALL.layers == 0 for row in reduced if "while" in row.op_name)
    by_axis = ledger.by_axis()
    assert by_axis[("tp",)].wire_bytes and by_axis[("fsdp",)].wire_bytes
    assert all(row.file.endswith("_llama.py") for row in ledger if row.file and not row.nearest)
    assert not ledger.notes


def test_parameters_are_those_of_the_published_models():
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_70B.parameters == pytest.approx(70.55e9, rel=0.001)
    assert LLAMA_405B.parameters == pytest.approx(405.85e9, rel=0.001)


def test_a_real_step_has_the_shapes_of_the_proof():
    tiny = Llama(layers=2, width=64, heads=2, kv_heads=1, hidden=128, vocab=256, head=32)
    state = tiny.create(jax.random.key(0))
    abstract = tiny.state("fsdp=1,tp=1")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
    tokens = jax.numpy.zeros((2, 16), "int32")
    state, loss = train_step(tiny)(state, tokens)
    assert jax.numpy.isfinite(loss)
