"""`Case`: a step, its arguments and its rules in one value, and everything that is asked of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import ProofError, RuleError, SpecError, TargetError

RULES = [("params/w", [None, "tp"]), ("params/b", []), ("x", ["dp"])]


def step(params, x, *, scale=None):
    y = jnp.tanh(x @ params["w"]) + params["b"]
    return {"w": params["w"] * 2, "b": params["b"]}, y.sum() * (1 if scale is None else scale)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


PARAMS = {"w": shape(32, 64), "b": shape(64)}


def case(**options):
    return sx.Case(step, (PARAMS, shape(16, 32)), **({"rules": RULES, "mesh": "dp=4,tp=2"} | options))


def specs(proof):
    return {leaf.path: sx.canonical(leaf.spec) for leaf in proof.inputs}


def test_rules_speak_of_all_arguments():
    layout = case().lay_out()
    found = {path: sx.canonical(decision.spec) for path, decision in layout.by_path.items()}
    assert found == {"params/w": P(None, "tp"), "params/b": P(), "x": P("dp")}
    assert specs(case().prove()) == {"params['w']": P(None, "tp"), "params['b']": P(), "x": P("dp")}


def test_rules_are_read_once():
    assert isinstance(case().rules, sx.Rules) and case().rules == case().rules and case().name == "step"
    assert set(case().arguments) == {"params", "x"}


def test_the_same_step_on_another_mesh_and_target():
    proof = case(target="cpu:16").prove("dp=8,tp=2")
    assert (proof.mesh.size, str(proof.target)) == (16, "cpu:16")
    assert str(case(mesh="dp=-1,tp=2").prove(target="cpu:32").mesh) == "dp=16,tp=2"
    assert str(case(mesh="dp=-1,tp=2", target="cpu:8").mesh_on()) == "dp=4,tp=2"
    with pytest.raises(TargetError, match="mesh dp=4,tp=2 has 8 devices, target cpu:16 has 16"):
        case().prove(target="cpu:16")


def test_a_layout_in_place_of_rules():
    whole = case().lay_out()
    given = case(rules=None, layout=whole)
    assert given.lay_out().by_path == whole.by_path
    assert specs(given.prove())["params['w']"] == P(None, "tp")
    made = case(rules=None, layout=lambda mesh: sx.layout(case().arguments, RULES, mesh))
    assert sx.MeshSpec.of(made.lay_out("dp=2,tp=4").mesh) == sx.MeshSpec.of("dp=2,tp=4")
    assert specs(made.prove()) == specs(case().prove())


def test_a_layout_may_stand_where_rules_do_and_brings_its_mesh():
    whole = case().lay_out()
    for given in (sx.Case(step, (PARAMS, shape(16, 32)), whole), case(rules=None, layout=whole, mesh=None)):
        assert given.layout is whole and given.rules is None
        assert str(given.mesh_on()) == "dp=4,tp=2" and given.lay_out().by_path == whole.by_path
        assert specs(given.prove())["params['w']"] == P(None, "tp")


def test_a_layout_of_a_part_of_the_arguments():
    params = sx.layout(PARAMS, [("w", [None, "tp"]), ("b", [])], "dp=4,tp=2")
    proof = sx.Case(step, (PARAMS, shape(16, 32)), layout=params, mesh="dp=4,tp=2").prove(in_specs={"x": P("dp")})
    assert specs(proof) == {"params['w']": P(None, "tp"), "params['b']": P(), "x": P("dp")}


def test_what_travels_without_a_compiler():
    found = case().check()
    assert [(site.op, site.axes) for site in found] == [("all-reduce", ("tp",)), ("all-reduce", ("dp",))]
    assert case().check("dp=16,tp=64").mesh.size == 1024


def test_without_rules_arguments_carry_their_own():
    x = jax.device_put(np.ones((16, 32), np.float32), NamedSharding(sx.make_mesh("dp=4,tp=2"), P("dp")))
    params = {"w": jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(sx.make_mesh("dp=4,tp=2"), P())),
              "b": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(sx.make_mesh("dp=4,tp=2"), P("tp")))}  # fmt: skip
    proof = sx.Case(step, (params, x), mesh="dp=4,tp=2").prove()
    assert specs(proof) == {"params['w']": P(), "params['b']": P("tp"), "x": P("dp")}


def test_keyword_arguments_static_ones_and_donation():
    def scaled(params, mode, *, x):
        return {k: v * (2 if mode == "double" else 1) for k, v in params.items()}, x.sum()

    whole = sx.Case(
        scaled, (PARAMS, "double"), RULES, kwargs={"x": shape(16, 32)}, mesh="dp=4,tp=2", donate="params", static="mode"
    )
    proof = whole.prove(out_specs=({"w": P(None, "tp"), "b": P()}, P()))
    assert specs(proof) == {"params['w']": P(None, "tp"), "params['b']": P(), "x": P("dp")}
    sx.assert_donated(proof, "params")


def test_options_go_to_prove():
    assert case().prove(replicated_over="128").replicated and not case().prove(replicated_over="1MB").replicated


def test_lint_finds_what_is_wrong():
    assert case().lint().ok
    wrong = case(rules=[*RULES, ("parms/never", ["tp"])])
    assert not wrong.lint().ok and "parms/never" in str(wrong.lint())


def test_indivisible_dimensions_follow_the_policy():
    odd = {"w": shape(32, 63), "b": shape(63)}
    with pytest.raises(SpecError, match="params/w: dim 1: 63 does not divide"):
        sx.Case(step, (odd, shape(16, 32)), RULES, mesh="dp=4,tp=2").lay_out()
    adapted = sx.Case(step, (odd, shape(16, 32)), RULES, mesh="dp=4,tp=2", on_misfit="adapt").lay_out()
    assert adapted["params/w"].fit.corrections


def test_cases_that_cannot_be():
    with pytest.raises(ProofError, match="the step of a Case is a function, not int"):
        sx.Case(3)
    with pytest.raises(ProofError, match=r"the args of a Case are a tuple, not dict\none argument: \(batch,\)"):
        sx.Case(step, PARAMS)
    with pytest.raises(ProofError, match="rules or a layout, not both"):
        case(layout=case().lay_out())
    with pytest.raises(RuleError):
        case(rules=[("(", [])])
    with pytest.raises(ProofError, match="no mesh is given for step"):
        case(mesh=None).lay_out()
    with pytest.raises(ProofError, match="step has neither rules nor a layout"):
        case(rules=None).lay_out()
    with pytest.raises(ProofError, match="step has no rules to lint"):
        case(rules=None).lint()
