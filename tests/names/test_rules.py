"""`Rules` as a value: made from anything, matched, explained, saved; and every mistake in one error."""

import pickle
import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import RuleError
from shardax.names.rules import Match, Rules
from shardax.names.spec import FREE

PAIRS = [("attn/(q|k|v)/kernel", P("fsdp", "tp")), ("kernel$", ("embed", ("mlp", "x"), None)), ("bias", None)]


def test_every_form_of_input_gives_the_same_rules(tmp_path):
    rules = Rules.of([("kernel$", ["embed", ["a", "b"], None]), ("bias", None)])
    text = "partition_rules:\n- [kernel$, [embed, [a, b], null]]\n- [bias, null]\n"
    (tmp_path / "rules.yml").write_text(text)
    assert Rules.of(rules) is rules
    assert Rules.of({"kernel$": ("embed", ("a", "b"), None), "bias": None}) == rules
    assert Rules.of(text) == Rules.of(tmp_path / "rules.yml") == Rules.of(str(tmp_path / "rules.yml")) == rules
    assert Rules.of(rule for rule in rules) == rules
    assert hash(Rules.of(text)) == hash(rules)
    assert eval(repr(rules), {"Rules": Rules.of, "P": P}) == rules
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_first_match_wins_and_losers_are_known():
    rules = Rules.of(PAIRS)
    path = "layers/3/attn/q/kernel"
    assert rules.match(path) == Match(0, *PAIRS[0])
    assert rules.losers(path) == [Match(1, *PAIRS[1])]
    assert [match.index for match in rules.matches(path)] == [0, 1]
    assert rules.match("norm/scale") is None and rules.losers("norm/scale") == []
    assert rules.match_all([path, "norm/scale", "mlp/bias"]) == [rules.match(path), None, Match(2, "bias", None)]
    assert rules.match_all([]) == []


def test_search_not_match():
    assert Rules.of({"up": None}).match("mlp/up/kernel")
    assert Rules.of({"^up": None}).match("mlp/up/kernel") is None


def test_compiled_patterns_keep_their_flags():
    rules = Rules.of([(re.compile("MLP", re.IGNORECASE), None), (re.compile("(?i)UP"), None), (re.compile("x"), None)])
    assert rules.patterns == ("(?i)MLP", "(?i)UP", "x")
    assert rules.match("mlp").index == 0


def test_rules_add_up():
    rules = Rules.of({"up": P("tp")}) + [(".*", None)]
    assert len(rules) == 2 and rules.patterns == ("up", ".*")
    assert list(rules) == [("up", P("tp")), (".*", None)]


def test_ready_axes_are_targets():
    rules = Rules.of([("up", sx.ColumnWise), ("down", sx.RowWise()), ("norm", sx.Replicated)])
    assert [target for _, target in rules] == [sx.ColumnWise.axes, sx.RowWise.axes, sx.Replicated.axes]
    tree = {"up": jax.ShapeDtypeStruct((8, 8), "float32"), "norm": jax.ShapeDtypeStruct((8,), "float32")}
    made = sx.layout(tree, rules, "fsdp=2,sp=1,tp=4")
    assert made.specs == {"up": P(("fsdp", "sp"), "tp"), "norm": P(None)}
    with pytest.raises(RuleError, match=r"reads its mode from a shape \[rule 'q'\]; would work: its axes alone"):
        Rules.of({"q": sx.AttnQSharding})


def test_logical_axes_as_targets_and_as_resolver_of_a_layout():
    logical = sx.LogicalRules.of([("embed", "fsdp"), ("mlp", "tp"), ("embed", None)])
    tree = {"up": jax.ShapeDtypeStruct((8, 16), "float32"), "scale": jax.ShapeDtypeStruct((8,), "float32")}
    made = sx.layout(tree, {"up": ("embed", "mlp"), "scale": ("embed",)}, "fsdp=2,tp=4", axes=logical)
    assert made.specs == {"up": P("fsdp", "tp"), "scale": P("fsdp")}


def test_the_constructor_reads_lists_and_mappings_too():
    assert Rules([("up", ["tp"])]) == Rules({"up": ("tp",)}) == Rules.of([("up", ("tp",))])
    assert hash(Rules([("up", ["tp"])])) == hash(Rules.of({"up": ["tp"]}))


def test_table():
    assert str(Rules.of(PAIRS)) == (
        "rule  pattern              target\n"
        "----  -------------------  -----------------\n"
        "   0  attn/(q|k|v)/kernel  P('fsdp', 'tp')\n"
        "   1  kernel$              [embed, mlp+x, _]\n"
        "   2  bias                 replicated"
    ).replace("P('fsdp', 'tp')", str(P("fsdp", "tp")))


axis = st.sampled_from(["dp", "tp", "embed"])
entry = st.none() | st.just(FREE) | axis | st.tuples(axis, axis)
target = st.none() | st.lists(entry, max_size=3).map(tuple) | st.lists(entry, max_size=3).map(lambda e: P(*e))


@given(st.lists(st.tuples(st.sampled_from(["a", "b.*", r"\d+$", "(?i)x"]), target), max_size=5))
def test_json_is_the_identity(pairs):
    import json

    rules = Rules.of(pairs)
    assert Rules.from_json(json.loads(json.dumps(rules.to_json()))) == rules


def test_every_mistake_is_listed_in_order():
    def by_shape(path, leaf):
        return P()

    with pytest.raises(RuleError) as caught:
        Rules.of(
            [
                ("ok", None),
                ("a(b", P("tp")),
                (7, None),
                ("fn", by_shape),
                ("text", "tp"),
                ("dims", ("tp", 3, "")),
                ("set", {"tp"}),
                ("also(", "tp"),
            ]
        )
    message = str(caught.value)
    lines = message.splitlines()
    assert lines[0] == "8 rules cannot be read"
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [f"rule {n}" for n in (1, 2, 3, 4, 5, 6, 7, 7)]
    for text in (
        "rule 1: not a regular expression: missing ), unterminated subpattern at position 1 [rule 'a(b']",
        "rule 2: the pattern is 7, not text",
        "rule 3: the target 'by_shape' is a function; rules are values, saved and compared [rule 'fn']",
        "rule 4: the target 'tp' is one text [rule 'text']; would work: ('tp',) for the first dimension",
        "rule 5: 3, '' are not the name of an axis [rule 'dims']",
        "rule 6: the target is {'tp'}",
    ):
        assert text in message
    assert "escaped with a backslash" in lines[-1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({("up", None), ("down", None)}, "a set has none: hosts would disagree"),
        ([("up", None, 3)], "rule 0: not a pair"),
        (None, "a list of pairs or a mapping, not None"),
        ("up: tp\nup: dp", "repeats the key 'up'"),
    ],
)
def test_sources_that_are_no_rules(source, message):
    with pytest.raises(RuleError, match=message):
        Rules.of(source)


def test_equal_rules_made_twice_are_compiled_once():
    from shardax.names.matching import matcher_of

    before = matcher_of.cache_info().misses
    for _ in range(3):
        Rules.of([("never/seen/before", None)])
    assert matcher_of.cache_info().misses == before + 1
