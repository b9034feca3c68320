"""`prove_exported`: a proof from an artefact of `jax.export` says what the proof from the source says."""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ProofError
from shardax.proving.installed import missing

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")  # jax.export knows no shardings of results
needs_tpu = pytest.mark.skipif(missing("tpu") is not None, reason=f"no TPU compiler: {missing('tpu')}")
MESH = sx.MeshSpec.of("dp=4,tp=2")


def shape(*sizes, spec=None):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(MESH.abstract(), spec or P()))


def step(state, x, unused, *, scale):
    y = jnp.tanh(x @ state["up"]) @ state["down"]
    return {"up": state["up"] + scale, "down": state["down"] * 2}, y.sum()


def arguments():
    state = {"up": shape(32, 64, spec=P(None, "tp")), "down": shape(64, 32, spec=P("tp"))}
    return (state, shape(16, 32, spec=P("dp")), shape(4)), {"scale": shape()}


def exported(platforms=("cpu", "tpu"), fn=step):
    args, kwargs = arguments()
    return export.export(jax.jit(fn, donate_argnums=0), platforms=platforms)(*args, **kwargs)


def facts(proof):
    return {
        "ledger": sorted(
            (r.op, r.axes, r.count, r.payload_bytes, r.file, r.line, r.phase, r.path) for r in proof.ledger
        ),
        "inputs": [
            (leaf.path, leaf.shape, sx.canonical(leaf.spec), leaf.donated)
            for leaf in proof.inputs
            if leaf.shape != (4,)
        ],
        "arguments": proof.memory.arguments,
        "aliased": proof.memory.aliased,
        "flops": proof.flops,
        "name": proof.name,
        "mesh": proof.mesh,
    }


@pytest.mark.parametrize("target", ["cpu:8", pytest.param("tpu:v5e:2x4", marks=needs_tpu)])
def test_it_says_what_the_source_says(target, tmp_path):
    args, kwargs = arguments()
    source = sx.prove(step, *args, mesh=MESH, target=target, donate="state", **kwargs)
    file = tmp_path / "step.bin"
    file.write_bytes(exported().serialize())
    forms = [file] if target != "cpu:8" else [exported(), exported().serialize(), str(file)]
    for artefact in forms:
        proof = sx.prove_exported(artefact, target=target)
        assert facts(proof) == facts(source)
        assert {row.file.rpartition("/")[2] for row in proof.ledger} == {"test_export.py"}
        assert proof.lost_donations == ()


def test_one_platform_is_enough():
    assert sx.prove_exported(exported(platforms=("cpu",))).name == "step"


def test_a_mesh_and_specs_for_what_was_exported_without():
    plain = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    artefact = export.export(jax.jit(lambda x: x.sum()))(plain)
    with pytest.raises(ProofError, match="was exported without shardings by name\npass mesh= and in_specs="):
        sx.prove_exported(artefact)
    proof = sx.prove_exported(artefact, mesh="dp=8", in_specs=P("dp"))
    assert [(row.op, row.axes, row.payload_bytes) for row in proof.ledger] == [("all-reduce", ("dp",), 4)]
    with pytest.raises(ProofError, match="with no sharding"):
        sx.prove_exported(artefact, mesh="dp=8")


def test_options_go_to_prove():
    proof = sx.prove_exported(exported(), out_specs=({"up": P(), "down": P()}, P()), replicated_over="1KB")
    assert proof.outputs[0].spec == P() and any(each.whole for each in proof.replicated)


def test_what_cannot_be_proved_is_named(tmp_path):
    with pytest.raises(ProofError, match=r"exported for cpu, not for tpu\n.*platforms=\['cpu', 'tpu'\]"):
        sx.prove_exported(exported(platforms=("cpu",)), target="tpu:v5e:2x4")
    with pytest.raises(ProofError, match=r"exported for 8 devices \(mesh dp=4,tp=2\), and cpu:16 has 16"):
        sx.prove_exported(exported(), target="cpu:16")
    with pytest.raises(ProofError, match="there is no exported function in .*nowhere"):
        sx.prove_exported(tmp_path / "nowhere")
    (tmp_path / "other").write_bytes(b"something else altogether")
    with pytest.raises(ProofError, match="other is no exported function"):
        sx.prove_exported(tmp_path / "other")
    with pytest.raises(ProofError, match="the bytes are no exported function"):
        sx.prove_exported(b"")
    with pytest.raises(ProofError, match="not an exported function: int"):
        sx.prove_exported(3)


def test_prove_takes_what_was_exported():
    args, kwargs = arguments()
    known = facts(sx.prove_exported(exported()))
    assert facts(sx.prove(exported(), target="cpu:8")) == known
    assert facts(sx.prove(exported(), *args, mesh=MESH, **kwargs)) == known
    with pytest.raises(ProofError, match="step was exported for other arguments\n  exported: "):
        sx.prove(exported(), args[0], mesh=MESH)
