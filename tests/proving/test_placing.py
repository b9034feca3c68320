"""Where a proof's arguments lie, and on which mesh."""

import jax
import jax.numpy as jnp
import pytest

import shardax as sx

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def double(tree):
    return jax.tree.map(lambda leaf: leaf * 2, tree)


def test_who_gives_a_layout_has_said_the_mesh():
    layout = sx.layout({"w": X}, [("w", jax.P("dp", "tp"))], "dp=2,tp=4")
    proof = sx.prove(double, {"w": X}, layout=layout)
    assert str(proof.mesh) == "dp=2,tp=4"
    assert proof.memory.arguments == 8 * 16 * 4 // 8


def test_a_mesh_given_or_in_force_goes_before_the_layouts():
    layout = sx.layout({"w": X}, [("w", jax.P("dp", "tp"))], "dp=2,tp=4")
    assert str(sx.prove(double, {"w": X}, layout=layout, mesh="dp=4,tp=2").mesh) == "dp=4,tp=2"
    with jax.set_mesh(sx.make_mesh("dp=8,tp=1")):
        assert str(sx.prove(double, {"w": X}, layout=layout).mesh) == "dp=8,tp=1"


def test_layouts_for_two_meshes_are_refused():
    one = sx.layout({"w": X}, [("w", jax.P("dp"))], "dp=2,tp=4")
    other = sx.layout({"w": X}, [("w", jax.P("dp"))], "dp=8")
    with pytest.raises(sx.MeshConflictError, match=r"dp=2,tp=4(.|\n)*dp=8"):
        sx.prove(lambda a, b: (a, b), {"w": X}, {"w": X}, layout=(one, other))


def test_without_any_mesh_it_says_what_to_pass():
    with pytest.raises(sx.NoMeshError, match="mesh="):
        sx.prove(double, X)
