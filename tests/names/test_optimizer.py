"""Optimiser state follows its parameters by structure; ZeRO-1 is one argument; what belongs nowhere is listed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx

optax = pytest.importorskip("optax", reason="optax is not installed")


def params():
    return {
        "dec": {"kernel": jax.ShapeDtypeStruct((16, 8), "bfloat16"), "bias": jax.ShapeDtypeStruct((8,), "bfloat16")}
    }


def laid_out(mesh="dp=4,tp=2"):
    return sx.layout(params(), [("kernel", P(None, "tp")), ("bias", P("tp"))], mesh)


def specs(layout):
    return {d.path: d.spec for d in layout.decisions}


def test_adam_slots_get_the_specs_of_their_parameters():
    found = sx.optimizer_layout(optax.adamw(1e-3), laid_out())
    assert specs(found) == {
        "0/count": P(),
        "0/mu/dec/kernel": P(None, "tp"),
        "0/mu/dec/bias": P("tp"),
        "0/nu/dec/kernel": P(None, "tp"),
        "0/nu/dec/bias": P("tp"),
        **{path: P() for path in specs(found) if path.endswith("count")},
    }
    assert not sx.unmatched_slots(found)


def test_the_state_may_be_given_instead_of_the_transformation():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    abstract = jax.eval_shape(tx.init, params())
    found = sx.optimizer_layout(abstract, laid_out())
    assert found == sx.optimizer_layout(tx, laid_out())
    assert jax.tree.structure(found.specs) == jax.tree.structure(abstract)


def test_zero_1_is_one_argument():
    found = sx.optimizer_layout(optax.adam(1e-3), laid_out(), extra_axis="dp")
    assert found["0/mu/dec/kernel"].spec == P("dp", "tp") and found["0/mu/dec/bias"].spec == P(("tp", "dp"))
    plain = sx.optimizer_layout(optax.adam(1e-3), laid_out())
    assert found.bytes_per_device * 4 <= plain.bytes_per_device + 16
    with pytest.raises(sx.LayoutError, match="'dpp' is not an axis.*did you mean 'dp'"):
        sx.optimizer_layout(optax.adam(1e-3), laid_out(), extra_axis="dpp")


def test_an_extra_axis_that_divides_nothing_is_said():
    odd = sx.layout({"w": jax.ShapeDtypeStruct((3, 5), "float32")}, [("w", P())], "dp=4,tp=2")
    found = sx.optimizer_layout(optax.adam(1e-3), odd, extra_axis="dp")
    assert found["0/mu/w"].spec == P() and "'dp' divides no dim" in found["0/mu/w"].rule


def test_factored_optimisers_keep_what_their_slots_keep():
    big = sx.layout({"w": jax.ShapeDtypeStruct((256, 512), "float32")}, [("w", P("dp", "tp"))], "dp=4,tp=2")
    found = sx.optimizer_layout(optax.adafactor(1e-3), big)
    by_shape = {d.shape: d.spec for d in found.decisions if d.path.endswith("/w")}
    assert by_shape[(256,)] == P("dp") and by_shape[(512,)] == P("tp") and by_shape[(1,)] == P()


def test_a_square_parameter_is_factored_as_far_as_its_ways_agree():
    tree = {"w": jax.ShapeDtypeStruct((8, 256, 256), "float32")}
    made = sx.layout(tree, [("w", P("tp", "dp"))], "dp=4,tp=2")
    found = sx.optimizer_layout(optax.adafactor(1e-3), made)
    assert found["0/v_row/w"].spec == P("tp", None) and not sx.unmatched_slots(found)
    assert found["0/v_row/w"].rule == "as parameter 'w' [8, 256, 256] without some dims"


def test_a_history_and_slots_below_a_parameter_follow_it():
    found = sx.optimizer_layout(optax.lbfgs(), laid_out())
    memory = found["0/diff_params_memory/dec/kernel"]
    assert memory.spec == P(None, None, "tp") and memory.rule == "as parameter 'dec/kernel' [16, 8] behind [10]"
    assert [d.path for d in sx.unmatched_slots(found)] == ["0/weights_memory"]
    below = sx.optimizer_layout(optax.sm3(1e-3), laid_out())
    assert (below["0/mu/dec/kernel/0"].spec, below["0/mu/dec/kernel/1"].spec) == (P(None), P("tp"))


def test_an_optimiser_without_state_has_an_empty_layout():
    found = sx.optimizer_layout(optax.sgd(0.1), laid_out())
    assert found.decisions == () and found.specs == optax.sgd(0.1).init(params())
    assert found.bytes_per_device == 0 and "0 leaves" in str(found)


def test_specs_are_no_layout():
    with pytest.raises(sx.LayoutError, match="params_layout is dict, not a Layout"):
        sx.optimizer_layout(optax.adam(0.1), {"w": P()})


def test_slots_without_a_parameter_are_listed():
    state = {
        "mu": {"dec": {"kernel": jax.ShapeDtypeStruct((16, 8), "float32")}},
        "stray": jax.ShapeDtypeStruct((7, 7), "float32"),
    }
    found = sx.optimizer_layout(state, laid_out())
    assert [d.path for d in sx.unmatched_slots(found)] == ["stray"]


def test_the_longest_suffix_wins():
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32"), "a": {"w": jax.ShapeDtypeStruct((8, 8), "float32")}}
    made = sx.layout(tree, [("^w", P("tp")), ("a/w", P(None, "tp"))], "tp=4")
    found = specs(sx.optimizer_layout(optax.sgd(0.1, momentum=0.9), made))
    assert found["0/trace/w"] == P("tp") and found["0/trace/a/w"] == P(None, "tp")


def test_an_optimiser_state_really_lives_there():
    mesh = sx.make_mesh("dp=4,tp=2")
    made = sx.optimizer_layout(optax.adam(1e-3), laid_out(mesh), extra_axis="dp")
    state = jax.jit(optax.adam(1e-3).init, out_shardings=made.shardings)(
        jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), params())
    )
    assert state[0].mu["dec"]["kernel"].sharding.spec == P("dp", "tp")
