"""Ahead of time: eval_shape, trace, lower, compile; one class each, with cells seen by their paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = sx.make_mesh("a=4,b=2")


@sx.jit(donate_argnums=1)
def step(tree, x, *, by):
    tree["w"].value = tree["w"].value + x
    return {"cell": tree["w"], "value": tree["w"].value.sum() * by, "new": [sx.State(x.astype(jnp.bfloat16))]}


def arguments():
    return ({"w": sx.State(jnp.ones(3)), "b": sx.State(jnp.zeros((2, 2)))}, jnp.ones(3)), {"by": jnp.float32(2)}


def stages():
    args, kwargs = arguments()
    traced = step.trace(*args, **kwargs)
    lowered = traced.lower()
    return args, kwargs, traced, lowered, lowered.compile()


def test_eval_shape_runs_nothing_and_changes_nothing():
    args, kwargs = arguments()
    before = args[0]["w"].value
    out = step.eval_shape(*args, **kwargs)
    assert out["value"].shape == () and out["cell"].value.shape == (3,) and out["new"][0].value.dtype == jnp.bfloat16
    assert isinstance(out["cell"].value, jax.ShapeDtypeStruct) and out["cell"] is not args[0]["w"]
    assert args[0]["w"].value is before and not args[1].is_deleted()


def test_the_trees_and_types_of_every_stage():
    *_, traced, lowered, compiled = stages()
    for stage in (traced, lowered, compiled):
        (tree, x), kwargs = stage.args_info
        assert (
            set(tree) == {"['w']", "['b']"} and tree["['b']"].shape == (2, 2) and x.donated and not kwargs["by"].donated
        )
        (avals, x), kwargs = stage.in_avals
        assert avals["['w']"].shape == (3,) and kwargs["by"].dtype == jnp.float32
        assert stage.in_tree == jax.tree.structure(stage.args_info) and stage.in_tree.num_leaves == 4
        assert stage.donate_argnums == (2,) and stage.out_info["value"].shape == ()
        assert type(stage).__name__ in repr(stage) and "step" in repr(stage)


def test_what_only_traced_knows():
    *_, traced, _, _ = stages()
    assert traced.out_info["value"].shape == () and traced.out_info["cell"].value.shape == (3,)
    assert "add" in str(traced.jaxpr)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "func.func public @main" in text


def test_lowered():
    *_, lowered, _ = stages()
    assert "stablehlo.add" in lowered.as_text() and "HloModule" in lowered.as_text("hlo")
    assert "loc(" in lowered.as_text(debug_info=True)
    assert "add" in str(lowered.compiler_ir()) and lowered.cost_analysis()["flops"] > 0
    assert lowered.out_tree == jax.tree.structure({"cell": 0, "value": 0, "new": [0]})
    assert lowered.compile({"xla_embed_ir_in_executable": True}).as_text()


def test_compiled():
    args, kwargs, *_, compiled = stages()
    assert compiled.out_tree == jax.tree.structure({"cell": 0, "value": 0, "new": [0]})
    assert "HloModule" in compiled.as_text() and compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().output_size_in_bytes > 0
    assert compiled.runtime_executable() is not None
    shardings, _ = compiled.input_shardings
    assert set(shardings[0]) == {"['w']", "['b']"}
    assert (
        compiled.output_shardings["value"].is_fully_replicated and compiled.output_shardings["cell"].value is not None
    )
    assert compiled.input_layouts[0][0]["['w']"].layout.major_to_minor == (0,)
    for n in (1, 2):
        out = compiled(args[0], jnp.ones(3), **kwargs)
        assert out["cell"] is args[0]["w"] and float(out["value"]) == 2 * 3 * (1 + n)
    np.testing.assert_allclose(args[0]["w"].value, np.full(3, 3.0))
    compiled.call(args[0], jnp.ones(3), **kwargs)
    np.testing.assert_allclose(args[0]["w"].value, np.full(3, 4.0))


def test_a_compiled_call_takes_other_objects_of_the_same_structure():
    *_, compiled = stages()
    (tree, x), kwargs = arguments()
    compiled(tree, x, **kwargs)
    np.testing.assert_allclose(tree["w"].value, np.full(3, 2.0))


def test_a_compiled_call_refuses_another_structure():
    *_, compiled = stages()
    (tree, x), kwargs = arguments()
    before = tree["w"].value
    with pytest.raises(
        sx.CompiledCallError, match=r"(?s)Compiled\(step\) was lowered for other arguments.*lower again"
    ):
        compiled({"w": tree["w"]}, x, **kwargs)
    with pytest.raises(sx.CompiledCallError, match=r"tree\['b'\]: .* is gone"):
        compiled({"w": tree["w"]}, x, **kwargs)
    with pytest.raises(sx.CompiledCallError, match=r"2 positional arguments, and .* by name → 1 positional arguments"):
        compiled(tree)
    misfits = [
        ((tree, jnp.ones(4)), r"x: float32\[4\] is given, float32\[3\] was lowered"),
        ((tree, jnp.ones(3, int)), r"x: int32\[3\] is given, float32\[3\] was lowered"),
        ((tree, "text"), r"x: 'text' \(str\) is no array"),
        ((tree, {"x": x}), r"(?s)x: was lowered, and is not given.*x\['x'\]: float32\[3\] is given, and was not"),
        (({"w": sx.State(jnp.ones((3, 1))), "b": tree["b"]}, x), r"tree\['w'\]: float32\[3,1\] is given"),
        ((tree, jax.device_put(x, jax.devices()[1])), r"x: is on .*id=1.* compiled for .*id=0"),
    ]
    for wrong, message in misfits:
        with pytest.raises(sx.CompiledCallError, match=message):
            compiled(*wrong, **kwargs)
    assert tree["w"].value is before


def test_static_arguments_are_not_seen_by_a_compiled_call():
    power = sx.jit(lambda cell, n: cell.value**n, static_argnums=1)
    cell = sx.State(jnp.float32(3))
    compiled = power.lower(cell, 2).compile()
    assert float(compiled(cell, 2)) == 9 and len(compiled.args_info[0]) == 1
    with pytest.raises(sx.CompiledCallError):
        compiled(cell, 3)


def test_closed_over_cells_and_abstract_ones():
    count = sx.State(jnp.int32(0))

    @sx.jit
    def bump(x):
        count.value += 1
        return x

    compiled = bump.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    assert compiled.args_info[1]["closed over"][0].shape == ()
    compiled(jnp.ones(4))
    assert int(count.value) == 1
    abstract = sx.State(jax.ShapeDtypeStruct((1024, 1024), jnp.float32))
    out = sx.jit(lambda cell: cell.value @ cell.value).eval_shape(abstract)
    assert out.shape == (1024, 1024)


def test_shardings_of_a_compiled_call():
    named = NamedSharding(MESH, P("a"))
    cell = sx.State(jnp.ones(8))
    jitted = sx.jit(lambda cell, x: cell.value + x, in_shardings=(sx.StateSharding({...: named}), None))
    compiled = jitted.lower(cell, 1.0).compile()
    assert compiled.input_shardings[0][0][""].spec == P("a") and compiled.output_shardings.spec == P("a")
    np.testing.assert_allclose(compiled(cell, 1.0), np.full(8, 2.0))


def test_stages_of_nnx_modules():
    """`Compiled.args_info` raises in flax."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    jitted = sx.jit(lambda layer, x: (layer, layer(x)))
    compiled = jitted.lower(layer, jnp.ones(2)).compile()
    (info, x), _ = compiled.args_info
    assert info["kernel"].shape == (2, 3) and info["bias"].shape == (3,) and x.shape == (2,)
    shown, _ = jitted.eval_shape(layer, jnp.ones(2))
    assert isinstance(shown, nnx.Linear) and shown is not layer and shown.kernel.get_value().shape == (2, 3)
    same, y = compiled(layer, jnp.ones(2))
    assert same is layer
    np.testing.assert_allclose(y, layer(jnp.ones(2)), rtol=1e-6)
