"""match_partition_rules and create_pattern_based_partition_spec, as their contracts say."""

import collections
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import RuleError, UnknownAxisError
from shardax.names.patterns import create_pattern_based_partition_spec, match_partition_rules

REAL = Path(__file__).parents[3] / "shared" / "data" / "real_model_params.json"


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


# ---- match_partition_rules ----------------------------------------------------------------------------------------------


def test_first_match_by_search_over_joined_paths():
    tree = {"layers": [{"attn": {"q": array(8, 8)}, "mlp": array(8, 8)}]}
    rules = [("0/attn", P("tp")), ("attn", P("dp")), ("layers/./mlp", P(None, "tp"))]
    assert match_partition_rules(rules, tree) == {"layers": [{"attn": {"q": P("tp")}, "mlp": P(None, "tp")}]}


def test_same_keys_and_order_out_as_in():
    tree = {"z": array(4), "a": {"y": array(4), "b": array(4)}, "m": collections.OrderedDict(q=array(4), c=array(4))}
    specs = match_partition_rules([(".*", P("tp"))], tree)
    assert list(specs) == ["z", "a", "m"]
    assert list(specs["a"]) == ["y", "b"]
    assert list(specs["m"]) == ["q", "c"] and isinstance(specs["m"], collections.OrderedDict)


def test_flat_keys_with_slashes():
    specs = match_partition_rules([(".*weight", P("model", None)), (".*", P())], {"layer/weight": array(2, 2), "x": 0})
    assert specs == {"layer/weight": P("model", None), "x": P()}


def test_strict_scalars_and_shapeless_leaves_need_no_rule():
    tree = {"step": 3, "lr": np.float32(1), "zero": array(), "name": "adam", "none": None, "w": array(4)}
    specs = match_partition_rules([("w", P("tp"))], tree)
    assert specs == {"step": P(), "lr": P(), "zero": P(), "name": P(), "none": None, "w": P("tp")}


@pytest.mark.parametrize(("min_size", "spec"), [(0, P("tp")), (8, P("tp")), (9, P())])
def test_strict_min_size(min_size, spec):
    assert match_partition_rules([("w", P("tp"))], {"w": array(2, 4)}, min_size=min_size) == {"w": spec}


def test_min_size_none_reads_the_environment_when_used(monkeypatch):
    tree, rules = {"small": array(100, 100), "large": array(128, 128)}, [(".*", P("tp"))]
    monkeypatch.delenv("MIN_SHARDING_SIZE", raising=False)
    assert match_partition_rules(rules, tree, min_size=None) == {"small": P(), "large": P("tp")}
    monkeypatch.setenv("MIN_SHARDING_SIZE", "10000")
    assert match_partition_rules(rules, tree, min_size=None) == {"small": P("tp"), "large": P("tp")}
    monkeypatch.setenv("MIN_SHARDING_SIZE", "many")
    with pytest.raises(RuleError, match="MIN_SHARDING_SIZE='many'"):
        match_partition_rules(rules, tree, min_size=None)


def test_strict_trims_surplus_entries_and_records_lost_axes():
    rules = [(".*", P("fsdp", "tp", None))]
    with sx.corrections() as log:
        assert match_partition_rules(rules, {"b": array(8), "w": array(8, 8)}) == {"b": P("fsdp"), "w": P("fsdp", "tp")}
    assert [(decision.path, decision.fit.corrections[0].axes) for decision in log] == [("b", ("tp",))]


def test_every_move_is_warned_about_on_request(monkeypatch):
    monkeypatch.setenv("LOG_SHARDING_MOVE", "1")
    with pytest.warns(UserWarning, match="smaller than 100 elements: b, c"):
        match_partition_rules([(".*", P("tp"))], {"b": array(8), "c": array(9), "w": array(100)}, min_size=100)
    with pytest.warns(UserWarning, match="b: .*too-long"):
        match_partition_rules([(".*", P("tp", "dp"))], {"b": array(8)})


def test_not_strict_is_the_raw_first_match():
    tree = {"i": 1, "s": array(), "b": array(2), "t": "text"}
    spec = P("fsdp", "tp")
    assert match_partition_rules([(".*", spec)], tree, min_size=10**9, strict=False) == dict.fromkeys(tree, spec)
    assert match_partition_rules([(".*", spec)], [0, 1, 2], strict=False) == [spec] * 3


@pytest.mark.parametrize("strict", [True, False])
def test_all_unmatched_paths_are_listed(strict):
    tree = {"a": {"w": array(4), "b": array(3, 4)}, "c": array(4), "step": array()}
    with pytest.raises(ValueError) as caught:
        match_partition_rules([("c|step", P())], tree, strict=strict, min_size=10**6)
    assert isinstance(caught.value, RuleError)
    message = str(caught.value)
    assert "2 leaves of 4 are matched by none of 1 rule" in message
    assert "a/w: no rule matches [shape (4,)]" in message and "a/b: no rule matches [shape (3, 4)]" in message
    assert "('.*', PartitionSpec()) as the last one" in message


def test_rules_in_any_form():
    tree, specs = {"w": array(4)}, {"w": P("tp")}
    for rules in ((("w", P("tp")),), {"w": P("tp")}, sx.Rules.of({"w": P("tp")})):
        assert match_partition_rules(rules, tree) == specs
    assert match_partition_rules({"w": (sx.EMBED, None)}, {"w": array(4, 4)}) == {"w": P("tp", None)}
    assert match_partition_rules({"w": None}, tree) == {"w": P()}


def test_empty_trees():
    assert match_partition_rules([(".*", P())], {}) == {}
    assert match_partition_rules([], {"a": {}}) == {"a": {}}


def test_arrays_states_and_a_bare_leaf():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    specs = match_partition_rules([("kernel$", P("fsdp", "tp")), ("bias$", P("tp"))], nnx.state(model))
    assert specs["kernel"].get_raw_value() == P("fsdp", "tp")
    assert match_partition_rules([("", P("tp"))], np.ones(4)) == P("tp")


@pytest.mark.skipif(not REAL.exists(), reason="../shared/data is not here")
@pytest.mark.parametrize("style", ["easydel", "hf"])
def test_real_models_match_as_a_plain_loop_does(style):
    import re

    rules = [
        ("embed", P("tp", "fsdp")),
        (r"(q|k|v|gate|up)_proj", P("fsdp", "tp")),
        (r"(o|down)_proj|lm_head", P("tp", "fsdp")),
        (r"experts/\d+/w[13]|c_(attn|fc)", P("fsdp", "tp")),
        (r"^.*layers/1\d/", P("dp")),
        ("norm", P()),
        (".*", P(None)),
    ]
    for model in json.loads(REAL.read_text())["models"].values():
        if style not in model:
            continue
        rows = model[style]["path_shape_dtype" if style == "easydel" else "name_shape"]
        tree = {path: array(*shape) for path, shape, *_ in rows}
        specs = match_partition_rules(rules, tree, strict=False)
        assert specs == {path: next(s for p, s in rules if re.search(p, path)) for path in tree}
        assert list(specs) == list(tree)


# ---- create_pattern_based_partition_spec ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "spec"),
    [
        ("attention|mlp->data,hidden->model", "layers/0/attention/q", P("data")),
        ("attention|mlp->data,hidden->model", "mlp/up", P("data")),
        ("attention|mlp->data,hidden->model", "hidden", P("model")),
        ("attention|mlp->data,hidden->model", "norm", P()),
        ("w->a.b", "w", P("a", "b")),
        ("w->fsdp+dp._.tp", "w", P(("fsdp", "dp"), None, "tp")),
        ("w->None.tp", "w", P(None, "tp")),
        ("w->_", "w", P(None)),
        (" w | v -> a . b + c , u -> d ", "v", P("a", ("b", "c"))),
        (" w | v -> a . b + c , u -> d ", "u", P("d")),
        ("up.*kernel$->tp,kernel->dp", "up/0/kernel", P("tp")),
        ("up.*kernel$->tp,kernel->dp", "down/kernel", P("dp")),
        ("layer_[0,1]$|w{1,2}->tp", "layer_1", P("tp")),
        ("(q|k)_proj->tp,v->dp", "k_proj", P("tp")),
        ("tensor-model->my-axis", "tensor-model", P("my-axis")),
    ],
)
def test_the_pattern_language(pattern, name, spec):
    assert create_pattern_based_partition_spec(pattern)(name, np.ones((2, 2, 2))) == spec


def test_default_spec_arrays_and_key_paths():
    spec_of = create_pattern_based_partition_spec("kernel->fsdp.tp", default_spec=P("dp"))
    assert spec_of("bias", np.ones(3)) == P("dp")
    assert spec_of("kernel", None) == spec_of("kernel", array(4, 4)) == P("fsdp", "tp")
    assert spec_of("kernel", array(4)) == P("fsdp")  # no dimension for tp
    tree = {"layer": {"kernel": array(4, 4), "bias": array(4)}}
    specs = jax.tree_util.tree_map_with_path(spec_of, tree)
    assert specs == {"layer": {"kernel": P("fsdp", "tp"), "bias": P("dp")}}
    assert eval(repr(spec_of.default), {"P": P}) == P("dp")


def test_it_needs_no_mesh_and_uses_one_that_is_given():
    assert create_pattern_based_partition_spec("a->tp", mesh="dp=2,tp=4")("a", None) == P("tp")
    with pytest.raises(UnknownAxisError) as caught:
        create_pattern_based_partition_spec("a->fdsp.tp,b->dp+ttp", mesh="fsdp=2,tp=4,dp=1")
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "2 mistakes" in message
    assert "position 3: 'fdsp' is not an axis of the mesh ('fsdp', 'tp', 'dp'); did you mean 'fsdp'" in message
    assert "position 17: 'ttp' is not an axis" in message and "did you mean 'tp'" in message


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "position 0: no rule here"),
        ("a->b,", "position 5: no rule here"),
        ("a", "position 0: no '->' between names and spec"),
        ("a->b, c", "position 6: no '->' between names and spec \\[rule 'c'\\]"),
        ("->b", "position 0: no name before '->'"),
        ("a||c->b", "position 2: no name at '\\|'"),
        ("a->", "position 3: no axis"),
        ("a->b.", "position 5: no axis"),
        ("a->b+", "position 5: no axis"),
        ("a->b+None", "position 5: 'None' is no axis"),
        ("a->b c", "position 3: 'b c' is no axis"),
        ("a->b->c", "position 4: a second '->'"),
        ("a->b.b", "position 3: 'b' is used 2 times"),
        ("a(->b", "not a regular expression: missing \\)"),
    ],
)
def test_mistakes_and_their_positions(pattern, message):
    with pytest.raises(RuleError, match=message):
        create_pattern_based_partition_spec(pattern)


def test_all_mistakes_at_once():
    with pytest.raises(RuleError) as caught:
        create_pattern_based_partition_spec("a,b->,->c", mesh="tp=2")
    assert len(caught.value.offences) == 4
    assert "write names->spec" in str(caught.value)


def test_a_pattern_that_is_no_text():
    with pytest.raises(RuleError, match="a pattern is text, not 3"):
        create_pattern_based_partition_spec(3)
