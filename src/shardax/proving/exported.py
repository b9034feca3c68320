"""`prove_exported`: a proof from what `jax.export` wrote, where the source is not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax import export

from shardax.names.mesh import MeshLike
from shardax.proving.artefact import read_exported
from shardax.proving.proof import Proof
from shardax.proving.prove import prove
from shardax.proving.target import Target


def prove_exported(
    artefact: export.Exported | bytes | str | Path,
    *,
    target: str | Target = "cpu:8",
    mesh: MeshLike | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    **options: Any,
) -> Proof:
    """Prove a function that `jax.export` exported: the value, its bytes, or the file that holds them.

    Paths, donations, shardings and Python lines are those it was exported with. Its number of devices is part of the
    program: the target has as many. Options are those of `sx.prove`.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> mesh = sx.MeshSpec.of("dp=8").abstract()
    >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("dp")))
    >>> exported = jax.export.export(jax.jit(lambda x: x.sum()), platforms=["cpu", "tpu"])(x)
    >>> proof = sx.prove_exported(exported, target="cpu:8")
    >>> [(row.op, row.axes) for row in proof.ledger], str(proof.mesh)
    ([('all-reduce', ('dp',))], 'dp=8')
    """
    exported = read_exported(artefact)
    return prove(exported, target=target, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
