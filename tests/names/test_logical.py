"""Logical-axis rules: the answers of Flax linen and NNX, MaxText's own rule sets, and the errors."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from shardax.errors import RuleError, SpecError, UnknownAxisError
from shardax.names.logical import LogicalRules
from shardax.names.spec import FREE, canonical

SHARED = Path(__file__).parents[3] / "shared" / "data"

NAMES = ["batch", "embed", "mlp", "heads", "kv", "vocab"]
MESH = ["data", "fsdp", "tensor", "expert"]

targets = st.none() | st.sampled_from(MESH) | st.lists(st.sampled_from(MESH), unique=True, max_size=3).map(tuple)
rule_lists = st.lists(st.tuples(st.sampled_from(NAMES), targets), min_size=1, max_size=12)


def asked_of(rules, data):
    """Names that have a rule, none twice, with None and FREE between them."""
    known = sorted({name for name, _ in rules})
    picked = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
    gaps = data.draw(st.lists(st.sampled_from([None, FREE]), max_size=2))
    return tuple(data.draw(st.permutations([*picked, *gaps])))


# ---- linen ----------------------------------------------------------------------------------------------------------


@given(rule_lists, st.data())
def test_first_is_what_linen_answers(rules, data):
    linen = pytest.importorskip("flax.linen")
    asked = asked_of(rules, data)
    assert canonical(LogicalRules.of(rules).spec(asked)) == canonical(linen.logical_to_mesh_axes(asked, rules))


def logical_rule_sets():
    """Every real rule set of the shared data, by name."""
    sets = {}
    if (SHARED / "maxtext_logical_axis_rules.json").exists():
        data = json.loads((SHARED / "maxtext_logical_axis_rules.json").read_text())
        sets |= {name: entry for name, entry in data.items() if isinstance(entry, dict)}
    if (SHARED / "other_logical_axis_rules.json").exists():
        for entry in json.loads((SHARED / "other_logical_axis_rules.json").read_text()):
            for name, table in entry["tables"].items():
                if "rules" in name:
                    sets[f"{entry['name']}:{name}"] = {
                        "logical_axis_rules": table,
                        "mesh_axes": entry.get("mesh_axes", entry["tables"].get("mesh_axes", [])),
                    }
    return sets


REAL = logical_rule_sets()
needs_data = pytest.mark.skipif(not REAL, reason="../shared/data is not here")


@needs_data
@given(data=st.data())
@pytest.mark.parametrize("name", sorted(REAL))
def test_real_rule_sets_answer_as_in_linen(name, data):
    linen = pytest.importorskip("flax.linen")
    document = REAL[name]
    rules = LogicalRules.of(document)
    assert rules.mesh_axes == tuple(document["mesh_axes"])
    assert len(rules) == len(document["logical_axis_rules"])
    plain = [
        (key, tuple(target) if isinstance(target, list) else target) for key, target in document["logical_axis_rules"]
    ]
    asked = asked_of(plain, data)
    assert canonical(rules.spec(asked)) == canonical(linen.logical_to_mesh_axes(asked, plain))


@needs_data
def test_maxtext_base_rules_fall_back_and_explain():
    rules = LogicalRules.of(REAL["base"])
    assert rules.spec(("activation_vocab",)) == P(("tensor", "tensor_sequence"))
    text = rules.explain(("heads", "activation_vocab"))
    assert "replicated: no rule of it is free" in text
    assert text.count("lost: rule") == 3
    assert "'tensor' already shards dim 1" in text


# ---- nnx ------------------------------------------------------------------------------------------------------------


@given(rule_lists, st.data())
def test_last_is_what_nnx_answers(rules, data):
    spmd = pytest.importorskip("flax.core.spmd")
    asked = tuple(name for name in asked_of(rules, data) if name is not FREE)
    theirs = P(*spmd.from_sharding_rules(asked, rules))
    used = [axis for entry in theirs for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
    mine = LogicalRules.of(rules, semantics="last")
    if len(used) == len(set(used)):
        assert canonical(mine.spec(asked)) == canonical(theirs)
    else:  # nnx hands such a spec to jax, which refuses it far away
        with pytest.raises(SpecError, match="one mesh axis for two dimensions"):
            mine.spec(asked)


def test_last_agrees_with_nnx_metadata():
    nnx = pytest.importorskip("flax.nnx")
    pairs = (("embed", "data"), ("mlp", "tensor"), ("embed", "fsdp"))
    variable = nnx.Param(0.0).replace(out_sharding=("embed", "mlp"), sharding_rules=pairs, sharding=("embed", "mlp"))
    theirs = nnx.get_partition_spec(nnx.State({"w": variable}))["w"].get_raw_value()
    assert LogicalRules.of(pairs, semantics="last").spec(("embed", "mlp")) == theirs == P("fsdp", "tensor")


def test_last_lets_mesh_axes_stand_for_themselves():
    rules = LogicalRules((("embed", "fsdp"),), "last", ("fsdp", "tp"))
    assert rules.spec(("tp", "embed")) == P("tp", "fsdp")
    assert "dim 0 'tp' → itself, a mesh axis" in rules.explain(("tp", "embed"))
    with pytest.raises(UnknownAxisError, match="'tpp' has no rule"):
        rules.spec(("tpp",))


def test_last_names_both_dimensions_of_a_clash():
    rules = LogicalRules.of([("a", "tp"), ("b", "tp")], semantics="last")
    with pytest.raises(SpecError, match=r"'tp' would shard dim 0 \('a'\) and dim 1 \('b'\)"):
        rules.spec(("a", "b"))


# ---- our own: specs, composites, forms of input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "spec"),
    [
        (("batch", "embed"), P(("data", "fsdp"), "tensor")),
        (("embed", "mlp"), P("tensor", None)),  # rules speak in order, dimensions do not
        (("mlp", "embed"), P(None, "tensor")),
        (("norm", None, FREE), P(None, None, FREE)),
        ((("batch", "embed"), "norm"), P(("data", "fsdp", "tensor"), None)),
        (P("embed", "norm"), P("tensor", None)),
        ([], P()),
    ],
)
def test_specs(asked, spec):
    rules = LogicalRules.of(
        [("batch", ["data", "fsdp"]), ("embed", "tensor"), ("mlp", "tensor"), ("norm", []), ("embed", "expert")]
    )
    assert rules.spec(asked) == spec
    assert rules.resolve_spec(asked, "__train__") == spec


def test_a_rule_may_leave_a_dimension_free():
    assert LogicalRules.of([("seq", FREE)]).spec(("seq", None)) == P(FREE, None)


def test_every_form_of_input_gives_the_same_rules(tmp_path):
    pairs = [("batch", ("data", "fsdp")), ("mlp", "tensor"), ("norm", None)]
    rules = LogicalRules.of(pairs)
    text = "logical_axis_rules: [\n  ['batch', ['data', 'fsdp']],\n  ['mlp', ['tensor']],\n  ['norm', []]\n]\n"
    (tmp_path / "base.yml").write_text(text)
    assert LogicalRules.of(rules) is rules
    assert LogicalRules.of(dict(pairs)) == rules
    assert LogicalRules.of({"logical_axis_rules": [list(pair) for pair in pairs]}) == rules
    assert LogicalRules.of(text) == rules
    assert LogicalRules.of("[[batch, [data, fsdp]], [mlp, tensor], [norm, null]]") == rules
    assert LogicalRules.of("batch: [data, fsdp]\nmlp: tensor\nnorm: null") == rules
    assert LogicalRules.of(tmp_path / "base.yml") == LogicalRules.of(str(tmp_path / "base.yml")) == rules
    assert hash(LogicalRules.of(text)) == hash(rules)
    assert LogicalRules.of(rules, semantics="last").semantics == "last"
    assert eval(repr(rules), {"LogicalRules": LogicalRules.of}) == rules


def test_table():
    assert str(LogicalRules.of({"batch": ("data", "fsdp"), "norm": None})) == (
        "rule  logical axis  mesh axes\n"
        "----  ------------  ----------\n"
        "   0  batch         data+fsdp\n"
        "   1  norm          replicated"
    )


# ---- errors -----------------------------------------------------------------------------------------------------------


def test_unknown_names_are_all_listed_with_close_matches():
    rules = LogicalRules.of({"embed": "fsdp", "mlp": "tensor"})
    with pytest.raises(UnknownAxisError) as caught:
        rules.spec(("embd", "mlp", "zebra", "tensor"))
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)
    assert str(caught.value) == (
        "3 logical axes of ('embd', 'mlp', 'zebra', 'tensor') are in none of 2 rules\n"
        "  dim 0: 'embd' has no rule; did you mean 'embed'?\n"
        "  dim 2: 'zebra' has no rule\n"
        "  dim 3: 'tensor' is a mesh axis, not a logical one\n"
        "declare an axis that is never sharded with None: ('embd', None)"
    )


def test_a_name_twice_in_one_array():
    with pytest.raises(SpecError, match="'embed' names 2 dimensions"):
        LogicalRules.of({"embed": "fsdp"}).spec(("embed", "embed"))


def test_axes_that_are_no_names():
    rules = LogicalRules.of({"embed": "fsdp"})
    with pytest.raises(SpecError, match="a tuple of names, not 'embed'"):
        rules.spec("embed")
    with pytest.raises(SpecError, match="dim 1: 3 is not the name of an axis"):
        rules.spec(("embed", 3))


def test_bad_rules_are_all_listed():
    with pytest.raises(RuleError) as caught:
        LogicalRules.of([("a", 3), (4, "tp"), ("b", ("tp", "tp")), ("c", ("tp", None)), ("d", "tp")])
    message = str(caught.value)
    assert "4 logical rules cannot be read" in message
    for line in (
        "rule 0: 3 is not a mesh axis, a tuple of them or None [rule 'a']",
        "rule 1: 4 is not the name of a logical axis",
        "rule 2: 'tp' occurs twice in ('tp', 'tp') [rule 'b']",
        "rule 3: ('tp', None) is not a mesh axis",
    ):
        assert line in message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({("a", "b")}, "a set has none: hosts would disagree"),
        ("a: [tp\n", "is not YAML"),
        ("a: tp\na: fsdp", "the text repeats the key 'a'"),
        ([("a", "tp"), "bc", ("d",)], "rule 2: not a pair: \\('d',\\)"),
        (3, "a list of pairs or a mapping, not 3"),
        ("just words", "a list of pairs or a mapping, not 'just words'"),
    ],
)
def test_sources_that_are_no_rules(source, message):
    with pytest.raises(RuleError, match=message):
        LogicalRules.of(source)


def test_unknown_semantics():
    with pytest.raises(RuleError, match="semantics='fist' is unknown; did you mean 'first'"):
        LogicalRules.of({"a": "tp"}, semantics="fist")


def test_text_without_pyyaml(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RuleError, match="rules as text need PyYAML\npip install 'shardax\\[yaml\\]'"):
        LogicalRules.of("a: tp")
