"""Layouts: one decision per leaf, explained; the same in every process; saved, compared, and strict about bad input."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

MESH = "dp=2,fsdp=4,tp=4"
RULES = [
    ("embed", P("tp", "fsdp")),
    (r"attn/(q|k|v)/kernel", P("fsdp", "tp")),
    (r"kernel", [sx.EMBED, sx.MLP_INTERMEDIATE]),
    (r"bias|scale", None),
]


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def model():
    return {
        "embed": struct(64, 32),
        "layers": [{"attn": {"q": {"kernel": struct(32, 32), "bias": struct(32)}}, "mlp": {"kernel": struct(8, 64)}}]
        * 2,
        "scale": struct(32),
        "step": 3,
    }


AXES = sx.PartitionAxis(hidden_state_axis="fsdp")


def test_every_leaf_has_a_decision_in_the_order_of_the_tree():
    made = sx.layout(model(), RULES, MESH, axes=AXES)
    assert [d.path for d in made.decisions][:4] == [
        "embed",
        "layers/0/attn/q/kernel",
        "layers/0/attn/q/bias",
        "layers/0/mlp/kernel",
    ]
    assert made["embed"].spec == P("tp", "fsdp") and made["layers/1/mlp/kernel"].spec == P("fsdp", "tp")
    assert made["scale"].spec == P() and made["step"].rule.startswith("scalar")
    assert jax.tree.structure(made.specs) == jax.tree.structure(model())
    assert isinstance(made.mesh, AbstractMesh)


def test_shardings_and_abstract_values_have_the_structure_of_the_tree():
    made = sx.layout(model(), RULES, sx.make_mesh("fsdp=2,tp=4"), axes=AXES)
    assert made.shardings["embed"] == NamedSharding(made.mesh, P("tp", "fsdp"))
    assert made.abstract["embed"].sharding == made.shardings["embed"] and made.abstract["step"].shape == ()


def test_real_arrays_abstract_arrays_and_scalars_are_one():
    real = {"w": jnp.ones((8, 4)), "n": np.ones(8, np.int8), "lr": 0.1, "k": jax.random.key(0)}
    made = sx.layout(real, [(".*", P("tp"))], "tp=4")
    assert made["w"].bytes_per_device == 32 and made["n"].dtype == "int8" and made["lr"].shape == ()
    assert made["k"].shape == ()


@jax.tree_util.register_dataclass
@dataclass
class Block:
    kernel: object
    bias: object


def test_dataclass_pytrees_and_framework_states():
    assert (
        sx.layout({"b": Block(struct(8, 8), struct(8))}, [("b/kernel", P("tp")), ("b/bias", P())], MESH)[
            "b/kernel"
        ].shards
        == 4
    )
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    module = nnx.eval_shape(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    made = sx.layout(nnx.state(module), [("kernel", P(None, "tp")), ("bias", P("tp"))], MESH)
    assert {d.path: d.spec for d in made.decisions} == {"bias": P("tp"), "kernel": P(None, "tp")}


def test_a_brainstate_model_and_its_states():
    brainstate = pytest.importorskip("brainstate", reason="brainstate is not installed")
    model = brainstate.nn.Sequential(brainstate.nn.Linear(8, 16), brainstate.nn.Linear(16, 8))
    rules = [("0/weight/weight", P(None, "tp")), ("1/weight/weight", P("tp")), ("bias", P())]
    made = sx.layout(model.states(), rules, MESH)
    kernels = {d.path: (d.shape, d.spec) for d in made.decisions if not d.path.endswith("bias")}
    assert kernels == {
        "layers/0/weight/weight": ((8, 16), P(None, "tp")),
        "layers/1/weight/weight": ((16, 8), P("tp")),
    }
    assert sorted(d.path for d in made.decisions if d.path.endswith("bias")) == [
        "layers/0/weight/bias",
        "layers/1/weight/bias",
    ]


# ---- thousands of devices that are not there ------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["auto", "explicit"])
def test_a_layout_on_4096_devices_is_traced_without_one(kinds):
    mesh = sx.MeshSpec.of("dp=16,fsdp=64,tp=4", axis_types=kinds).abstract()
    tree = {"up": struct(8192, 32768), "down": struct(32768, 8192)}
    made = sx.layout(tree, [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], mesh)
    assert made.mesh.size == 4096 and made["up"].shards == 256 and made["up"].copies == 16
    assert made.bytes_per_device == 2 * (8192 * 32768 * 2) // 256
    batch = jax.ShapeDtypeStruct((4096, 8192), "bfloat16", sharding=jax.NamedSharding(mesh, P("dp")))

    def step(tree, x):
        return x @ sx.constrain(tree["up"], P(None, "tp"), mesh=mesh)

    out = jax.eval_shape(step, made.abstract, batch)
    assert out.shape == (4096, 32768)
    if kinds == "explicit":  # here the types say where the result lies
        assert out.sharding.spec == P("dp", "tp")


# ---- strictness -----------------------------------------------------------------------------------------------------


def test_every_misfit_is_listed_with_path_rule_and_remedy():
    tree = {"a": struct(6, 8), "b": struct(8, 8), "c": struct(8)}
    rules = [("a", P("tp", "dp")), ("b", P("tp", "tp")), ("c", P("dp", "tp"))]
    with pytest.raises(sx.SpecError) as error:
        sx.layout(tree, rules, MESH)
    text = str(error.value)
    assert "3 leaves do not fit the mesh dp=2,fsdp=4,tp=4" in text
    assert "a: dim 0: 6 does not divide by 'tp' (4) [shape (6, 8), spec P('tp', 'dp'), rule 0 'a'" in text
    assert "b: dim 1: 'tp' already shards dim 0" in text and "c: dim 1: the spec has 2 entries for 1 dims" in text


def test_a_typo_in_an_axis_is_an_error_with_a_close_match():
    with pytest.raises(sx.UnknownAxisError, match="'fspd' is not an axis.*did you mean 'fsdp'") as error:
        sx.layout({"a": struct(8), "b": struct(8)}, [("a", P("fspd")), ("b", P("tpp"))], MESH)
    assert [offence.where for offence in error.value.offences] == ["a", "b"]


def test_every_unmatched_leaf_is_listed():
    with pytest.raises(sx.RuleError, match="2 leaves of 3 matched by none of 1 rule") as error:
        sx.layout({"a": struct(8), "b": {"x": struct(2), "y": struct(4)}}, [("a", P("tp"))], MESH)
    assert [offence.where for offence in error.value.offences] == ["b/x", "b/y"]
    assert "('.*', P()) last" in str(error.value)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: sx.layout({}, RULES, MESH), sx.LeafError, "the tree has no leaves"),
        (lambda: sx.layout({"a": "text", "b": [object]}, RULES, MESH), sx.LeafError, "2 leaves are not an array"),
        (lambda: sx.layout(model(), RULES), sx.NoMeshError, "layout needs a mesh and none is in force"),
        (lambda: sx.layout(model(), RULES, "dp=-1"), sx.MeshError, "-1 is inferred by resolve"),
        (lambda: sx.layout(model(), RULES, MESH, on_misfit="ignore"), ValueError, "on_misfit='ignore' is unknown"),
        (lambda: sx.layout(model(), [], MESH), sx.RuleError, "matched by none of 0 rules"),
    ],
)
def test_bad_input(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_adapt_records_every_correction():
    tree = {"a": struct(6, 8)}
    with sx.corrections() as log:
        made = sx.layout(tree, [("a", P("tp", "dp"))], MESH, on_misfit="adapt")
    assert made["a"].spec == P(None, "dp") and made["a"].fit.asked == P("tp", "dp")
    assert log == list(made.decisions)
    with pytest.warns(UserWarning, match="a: .*dim 0 loses 'tp'"):
        sx.layout(tree, [("a", P("tp", "dp"))], MESH, on_misfit="warn")


def test_min_size_replicates_small_leaves_and_says_so():
    made = sx.layout({"big": struct(64, 64), "small": struct(4)}, [(".*", P("tp"))], MESH, min_size=16)
    assert made["small"].spec == P() and made["small"].rule == "smaller than min_size=16"


def test_the_mesh_in_force_is_used():
    with jax.set_mesh(sx.make_mesh("tp=8")):
        assert sx.layout({"a": struct(8)}, [("a", P("tp"))])["a"].shards == 8


# ---- explain, analysis, table ---------------------------------------------------------------------------------------


def test_explain_says_what_won_what_lost_and_what_was_corrected():
    tree = {"mlp": {"kernel": struct(6, 64)}}
    made = sx.layout(tree, [("mlp", P("tp", "dp")), ("attn", P()), ("kernel", P())], MESH, on_misfit="adapt")
    text = made.explain("mlp/kernel")
    assert "by rule 0 'mlp' → P('tp', 'dp')" in text
    assert "lost: rule 2 'kernel' → P() (rule 0 came first)" in text and "attn" not in text
    assert "corrected: dim 0 loses 'tp' (indivisible: 6 does not divide by 'tp' (4), 288 B more per device)" in text
    with pytest.raises(sx.LayoutError, match="no leaf 'mlp/kernal'.*did you mean 'mlp/kernel'"):
        made.explain("mlp/kernal")


def test_analysis_counts_bytes_and_suggests():
    tree = {"big": struct(64, 63), "cut": struct(64, 64), "one": struct(3, 5)}
    made = sx.layout(tree, [("cut", P(("dp", "fsdp"), "tp")), (".*", P())], MESH)
    found = made.analysis()
    assert found.total_bytes == made.nbytes == 2 * (64 * 63 + 64 * 64 + 15)
    assert found.bytes_per_device == 2 * (64 * 63 + 64 * 64 // 32 + 15)
    assert found.replicated_bytes == 2 * (64 * 63 + 15)
    assert [o.path for o in found.offenders] == ["big", "one"]
    assert (
        found.offenders[0].suggestion == "on 'fsdp': dim 0 (64) divides; saves 5.9 KiB"
        and not found.offenders[1].suggestion
    )
    assert "could be sharded" in str(found)


def test_the_table_is_what_a_person_reads():
    text = str(sx.layout(model(), RULES, MESH, axes=AXES))
    assert "layout on mesh dp=2,fsdp=4,tp=4" in text and "rule 2 'kernel' → [" in text and "on every device" in text
    assert "<table>" in sx.layout(model(), RULES, MESH, axes=AXES)._repr_html_()


# ---- files, equality, laws ------------------------------------------------------------------------------------------


def test_save_load_diff_and_hash(tmp_path):
    made = sx.layout(model(), RULES, MESH, axes=AXES)
    made.save(tmp_path / "layout.json")
    back = sx.Layout.load(tmp_path / "layout.json", tree=model())
    assert back == made and back.hash == made.hash and back.specs == made.specs and not made.diff(back)
    assert back.explain("embed") == made.explain("embed")
    flat = sx.Layout.load(tmp_path / "layout.json")
    assert flat.specs["layers/0/mlp/kernel"] == P("fsdp", "tp")

    other = sx.layout(
        {**model(), "embed": struct(128, 32), "new": struct(4)}, [("new", P("tp")), *RULES], MESH, axes=AXES
    )
    diff = made.diff(other)
    assert [row[0] for row in diff.rows] == ["embed", "new"] and "+256 B per device" in str(diff)
    assert made.hash != other.hash


def test_corrections_survive_a_file(tmp_path):
    made = sx.layout({"a": struct(6, 8)}, [("a", P("tp", sx.FREE))], MESH, on_misfit="adapt")
    made.save(tmp_path / "x.json")
    assert sx.Layout.load(tmp_path / "x.json") == made


@pytest.mark.parametrize(
    "text", ["{}", "[]", "not json", '{"shardax": "layout", "version": 99}', '{"shardax":"layout","version":1}']
)
def test_a_file_that_is_no_layout(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(sx.LayoutError):
        sx.Layout.load(tmp_path / "x.json")


def test_a_tree_with_other_leaves_is_listed(tmp_path):
    made = sx.layout({"a": struct(8), "b": struct(8)}, [(".*", P())], MESH)
    with pytest.raises(sx.LayoutError) as error:
        made.like({"a": 0, "c": 0})
    assert "c: is in the tree" in str(error.value) and "b: is in the layout" in str(error.value)


def test_a_layout_on_another_mesh():
    made = sx.layout({"a": struct(8)}, [("a", P("tp"))], MESH)
    assert made.on("tp=8")["a"].shards == 8
    with pytest.raises(sx.SpecError):
        made.on("tp=3")


PROBE = """
import json, jax, shardax as sx
tree = {k: jax.ShapeDtypeStruct((8, 8), "float32") for k in ("b", "a", "c")}
made = sx.layout(tree, [("a|c", jax.P("tp")), (".*", jax.P(None, "tp"))], "tp=4")
print(made.hash, sx.layout(tree, [(".*", [sx.BATCH, sx.HEAD])], "dp=2,fsdp=2,tp=4").hash)
print(sx.get_names_from_partition_spec({jax.P("tp", "dp"), jax.P("fsdp"), jax.P("sp")}))  # a set has no order of its own
print(sx.lint(tree, [("a", jax.P("pt")), ("b", jax.P("tq"))], "tp=4"))
"""


def test_two_processes_build_the_identical_layout():
    hashes = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


shapes = st.lists(st.sampled_from([1, 3, 4, 8, 12]), max_size=3).map(tuple)
targets = st.lists(st.sampled_from([None, "dp", "tp", ("fsdp", "dp"), "zz"]), max_size=3).map(tuple)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.tuples(shapes, targets), min_size=1, max_size=6))
def test_bytes_per_shard_times_shards_is_the_total_and_order_does_not_matter(leaves):
    tree = {name: struct(*shape) for name, (shape, _) in leaves.items()}
    rules = [
        (f"^{name}$", P(*target))
        for name, (_, target) in leaves.items()
        if len({str(a) for a in target if a}) == len([a for a in target if a])
    ]
    rules.append((".*", P()))
    made = sx.layout(tree, rules, MESH, on_misfit="adapt")
    for d in made.decisions:
        assert d.bytes_per_device * d.shards == d.nbytes == 2 * math.prod(d.shape) and d.shards * d.copies == 32
    backwards = sx.layout(dict(reversed(tree.items())), rules, MESH, on_misfit="adapt")
    assert backwards.by_path == made.by_path and backwards.hash == made.hash
    assert json.loads(json.dumps(made.to_json())) == made.to_json()


# ---- analyze_sharding_strategy --------------------------------------------------------------------------------------


def test_analyze_sharding_strategy_fills_all_five_results():  # "never fills three of its five results"
    tree = {"enc": {"w": struct(8, 16), "b": struct(16)}, "dec": jnp.ones((4, 4), jnp.float32)}
    specs = {"enc": {"w": P(("dp", "fsdp"), "tp"), "b": P()}, "dec": P("tp")}  # "raises KeyError on composite axes"
    found = sx.analyze_sharding_strategy(tree, specs, MESH)
    assert found["total_parameters"] == 8 * 16 + 16 + 16 and found["sharded_parameters"] == 8 * 16 + 16
    memory = found["memory_per_device"]
    assert memory["total"] == 2 * 8 * 16 // 32 + 32 + 64 // 4
    assert memory["replicated"] == 32 and memory["sharded"] == 8 + 16
    assert memory["by_key"]["enc"] == {"total": 40, "replicated": 32, "sharded": 8}
    assert found["balance_score"] == 1.0
    assert found["partition_stats"][P("tp")] == {"leaves": 1, "parameters": 16, "bytes": 64}


def test_balance_falls_where_a_dimension_does_not_divide():
    found = sx.analyze_sharding_strategy({"w": struct(5, 1)}, {"w": P("tp")}, "tp=4")
    assert found["memory_per_device"]["total"] == 4 and found["balance_score"] == pytest.approx((10 / 4) / 4)


def test_analyze_takes_prefixes_and_names_what_is_wrong():
    tree = {"a": [struct(8), struct(8)], "b": struct(8)}
    assert sx.analyze_sharding_strategy(tree, P("tp"), "tp=4")["sharded_parameters"] == 24
    with pytest.raises(sx.LayoutError, match="a/0: dim 0: 'pt' is not an axis"):
        sx.analyze_sharding_strategy(tree, {"a": P("pt"), "b": P()}, "tp=4")
    with pytest.raises(sx.LayoutError, match="not a prefix"):
        sx.analyze_sharding_strategy(tree, {"zzz": P()}, "tp=4")
    with pytest.raises(sx.NoMeshError):
        sx.analyze_sharding_strategy(tree, P())
