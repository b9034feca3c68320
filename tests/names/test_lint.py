"""The linter: one finding of every kind, all in one report, and real models that lint clean."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardax.errors import RuleError
from shardax.names.lint import lint
from shardax.names.logical import LogicalRules

REAL = Path(__file__).parents[3] / "shared" / "data" / "real_model_params.json"
MESH = "fsdp=2,tp=4"


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def kinds(report):
    return [(finding.kind, finding.offence.where) for finding in report.findings]


TREE = {"mlp": {"up": array(16, 64), "bias": array(64)}, "step": 3}


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ([("mlp", P("fsdp"))], []),
        ([("up", P("fsdp", "tp")), ("bias", P("tp"))], []),
        ([("up", None)], [("unmatched", "mlp/bias")]),
        ([("mlp", None), ("lora", None)], [("unused", "rule 1 'lora'")]),
        ([("mlp", None), ("up", None)], [("shadowed", "rule 1 'up'")]),
        ([("mlp", P("fsdp", "tp"))], [("rank", "mlp/bias")]),
        ([("mlp", P("fdsp"))], [("unknown-axis", "rule 0 'mlp'")]),
        ([("up", P("tp", "tp")), ("bias", None)], [("duplicate", "rule 0 'up'")]),
        ([("mlp", ("__BATCH__",))], [("unknown-axis", "rule 0 'mlp'")]),  # dp is not on this mesh
        ([("mlp", ("__EMBD__",))], [("unknown-axis", "rule 0 'mlp'")]),
        ([("up", ("__EMBED__", "__HEAD__")), ("bias", None)], [("duplicate", "rule 0 'up'")]),
    ],
)
def test_each_kind(rules, found):
    report = lint(TREE, rules, MESH)
    assert kinds(report) == found
    assert report.ok == (not found)


def test_indivisible_names_the_leaf_and_what_would_work():
    report = lint({"w": array(6, 8)}, {"w": P("tp")}, MESH)
    (finding,) = report.findings
    assert finding.kind == "indivisible"
    assert str(finding).startswith(
        "indivisible: w: dim 0: 6 does not divide by 'tp' (4) [shape (6, 8), spec P('tp',), rule 0 'w']; would work:"
    )


def test_trailing_none_is_not_a_rank_mismatch():
    assert lint({"b": array(8)}, {"b": P("tp", None)}, MESH).ok


def test_an_empty_tree_and_a_leaf_that_is_no_array():
    assert kinds(lint({}, {".*": None}, MESH)) == [("no-leaves", ""), ("unused", "rule 0 '.*'")]
    assert kinds(lint({"w": "text"}, {".*": None}, MESH)) == [("not-an-array", "w")]
    assert lint({"w": np.ones(4), "n": np.float32(1)}, {"w": None}, MESH).ok


def test_close_matches_on_both_sides_of_a_typo():
    report = lint({"decoder": {"kernal": array(8, 8)}}, {"decoder/kernel": None, "encoder/bias": None}, MESH)
    texts = {finding.kind: str(finding) for finding in report.findings}
    assert texts["unmatched"].startswith(
        "unmatched: decoder/kernal: no rule matches: 'kernal' is in no rule; did you mean 'kernel'?"
    )
    assert "'kernel' is in no path; did you mean 'kernal'?" in str(report.findings[1])


def test_shadowing_needs_every_leaf():
    tree = {"a": {"up": array(8), "down": array(8)}}
    assert lint(tree, [("a/up", None), ("a", None)], MESH).ok
    report = lint(tree, [("up", None), ("down", None), ("a/.*", None)], MESH)
    (finding,) = report.findings
    assert finding.offence.problem == "always comes too late: rule 0 'up', rule 1 'down' take its 2 leaves"


def test_logical_axes_are_resolved_first():
    logical = LogicalRules.of({"embed": "fsdp", "mlp": "tp"})
    assert lint(TREE, {"up": ("embed", "mlp"), "bias": ("mlp",)}, MESH, logical).ok
    report = lint(TREE, {"up": ("embd", "mlp"), "bias": ("mlp",)}, MESH, logical)
    (finding,) = report.findings
    assert finding.kind == "unknown-axis"
    assert "dim 0: 'embd' has no rule; did you mean 'embed'?" in finding.offence.problem


def test_without_a_mesh_paths_are_checked_and_the_report_says_so():
    report = lint(TREE, {"up": P("nowhere")})
    assert kinds(report) == [("unmatched", "mlp/bias")]
    assert "no mesh given: axes are not checked" in str(report)


def test_the_mesh_in_force_is_used():
    with jax.set_mesh(jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        assert kinds(lint(TREE, {"mlp": P("dp")})) == [("unknown-axis", "rule 0 'mlp'")]


def test_the_report_as_table_error_and_subset():
    report = lint({"mlp": {"up": array(16, 6)}}, [("up", P("fsdp", "tp")), ("lora", P("xx"))], MESH)
    assert [finding.kind for finding in report.findings] == ["unused", "unknown-axis", "indivisible"]
    lines = str(report.table()).splitlines()
    assert lines[0] == "3 problems with 1 leaf and 2 rules; on mesh fsdp=2,tp=4"
    assert lines[1].split() == ["kind", "where", "problem", "would", "work", "rule"]
    assert len(lines) == 3 + 3
    with pytest.raises(RuleError) as caught:
        report.raise_if_bad()
    assert len(caught.value.offences) == 3
    assert "rule 1 'lora': unused: matches no leaf: 'lora' is in no path" in str(caught.value)
    assert [finding.kind for finding in report.of("unused")] == ["unused"]
    left = report.without("unused", "unknown-axis", "indivisible")
    assert left.ok
    left.raise_if_bad()
    assert str(left) == "no problem with 1 leaf and 2 rules; on mesh fsdp=2,tp=4"


# ---- real models ------------------------------------------------------------------------------------------------------

EASYDEL = [
    ("embed_tokens/embedding", P("tp", "fsdp")),
    ("(q|k|v)_proj/kernel", P("fsdp", "tp")),
    ("o_proj/kernel", P("tp", "fsdp")),
    ("(gate|up)_proj/kernel", P("fsdp", "tp")),
    ("down_proj/kernel", P("tp", "fsdp")),
    ("lm_head/kernel", P("fsdp", "tp")),
    ("norm/kernel", None),
]


@pytest.mark.skipif(not REAL.exists(), reason="../shared/data is not here")
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_real_models(model):
    rows = json.loads(REAL.read_text())["models"][model]["easydel"]["path_shape_dtype"]
    tree = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape, dtype in rows}
    assert lint(tree, EASYDEL, "fsdp=8,tp=8").ok, str(lint(tree, EASYDEL, "fsdp=8,tp=8"))
    broken = lint(tree, [*EASYDEL[:2], ("o_prj/kernel", P("tp", "fsdp")), *EASYDEL[3:]], "fsdp=8,tp=3")
    layers = sum("o_proj" in path for path, _, _ in rows)
    assert len(broken.of("unmatched")) == layers
    assert len(broken.of("unused")) == 1
    assert len(broken.of("indivisible")) > layers
