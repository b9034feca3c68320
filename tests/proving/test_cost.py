"""Work and time as people read them."""

import jax
import jax.numpy as jnp

import shardax as sx


def test_work_reads_as_work_and_not_as_bytes():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    proof = sx.prove(lambda x: (x @ x).sum(), x, mesh="dp=8", in_specs=jax.P("dp"), cache=False)
    assert proof.flops == 2 * 4096**3 // 8
    (line,) = (line for line in str(proof).splitlines() if line.startswith("work"))
    assert line == "work        17.2 GFLOP per device, 137 GFLOP in all"
    assert "17.2 GFLOP" in str(sx.diff(proof, proof))
