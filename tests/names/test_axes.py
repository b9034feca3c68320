"""Semantic axes: what each resolves to in each mode, and every way they can be wrong."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.names.axes import FIELDS

TRAIN, DECODE = sx.MODE_TRAIN, sx.MODE_DECODE
GENERATION = sorted(sx.GENERATION_MODES)

# field → value without arguments, as SURFACE.md documents them.
DEFAULTS = {
    "data_parallel_axis": "dp",
    "fully_sharded_data_parallel_axis": "fsdp",
    "tensor_parallel_axis": "tp",
    "sequence_parallel_axis": "sp",
    "expert_parallel_axis": "ep",
    "batch_axis": ("fsdp", "dp"),
    "sequence_axis": "sp",
    "query_sequence_axis": "sp",
    "head_axis": "tp",
    "kv_head_axis": "tp",
    "key_sequence_axis": "sp",
    "hidden_state_axis": "tp",
    "mlp_intermediate_axis": "tp",
    "vocab_axis": "tp",
    "expert_axis": "ep",
    "expert_gate_axis": None,
    "attention_dim_axis": None,
    "attention_kv_dim_axis": None,
    "bias_head_sequence_axis": None,
    "bias_key_sequence_axis": None,
    "decode_batch_axis": ("fsdp", "dp"),
    "decode_query_sequence_axis": None,
    "decode_head_axis": "tp",
    "decode_kv_head_axis": "tp",
    "decode_key_sequence_axis": "sp",
    "decode_attention_dim_axis": None,
    "decode_attention_kv_dim_axis": None,
}

# token → (field, its value while training, field while generating)
TOKENS = {
    "BATCH": ("batch_axis", ("fsdp", "dp"), "decode_batch_axis"),
    "LENGTH": ("sequence_axis", "sp", None),
    "QUERY_LENGTH": ("query_sequence_axis", "sp", "decode_query_sequence_axis"),
    "KV_LENGTH": ("key_sequence_axis", "sp", "decode_key_sequence_axis"),
    "EMBED": ("hidden_state_axis", "tp", None),
    "HEAD": ("head_axis", "tp", "decode_head_axis"),
    "KV_HEAD": ("kv_head_axis", "tp", "decode_kv_head_axis"),
    "MLP_INTERMEDIATE": ("mlp_intermediate_axis", "tp", None),
    "VOCAB": ("vocab_axis", "tp", None),
    "EXPERT": ("expert_axis", "ep", None),
    "EXPERT_GATE": ("expert_gate_axis", None, None),
    "HEAD_DIM": ("attention_dim_axis", None, "decode_attention_dim_axis"),
    "KV_HEAD_DIM": ("attention_kv_dim_axis", None, "decode_attention_kv_dim_axis"),
    "BIAS_HEAD_SEQ": ("bias_head_sequence_axis", None, None),
    "BIAS_KV_SEQ": ("bias_key_sequence_axis", None, None),
    "DATA_PARALLEL": ("data_parallel_axis", "dp", None),
    "FULLY_SHARDED_DATA_PARALLEL": ("fully_sharded_data_parallel_axis", "fsdp", None),
    "TENSOR_PARALLEL": ("tensor_parallel_axis", "tp", None),
    "EXPERT_PARALLEL": ("expert_parallel_axis", "ep", None),
    "SEQUENCE_PARALLEL": ("sequence_parallel_axis", "sp", None),
}


@pytest.fixture(autouse=True)
def clean_registry():
    sx.PartitionAxis.clear_registered_axes()
    yield
    sx.PartitionAxis.clear_registered_axes()


# ---- Better: what the original gets wrong ---------------------------------------------------------------------------


def test_register_none_resolves_to_replicated():
    sx.PartitionAxis.register("scale", None)
    assert sx.PartitionAxis().resolve_axis(["scale"], TRAIN) == [None]
    assert sx.PartitionAxis().resolve_spec([sx.BATCH, "scale"], DECODE) == P(("fsdp", "dp"), None)


@pytest.mark.parametrize("name", ["replace", "resolve_axis", "extend", "register", "__hash__", "__class__"])
def test_a_rule_called_like_a_method_never_resolves_to_a_bound_method(name):
    sx.PartitionAxis.register("over", name)
    assert sx.PartitionAxis().resolve_axis(["over"], TRAIN) == [name]
    sx.PartitionAxis.register(name, "tp")
    assert sx.PartitionAxis().resolve_axis([name, "over"], TRAIN) == ["tp", "tp"]


def test_an_unknown_mode_is_an_error_with_a_close_match():
    with pytest.raises(sx.AxisRuleError, match="Unknown mode 'decode'.*did you mean 'MODE_DECODE'"):
        sx.PartitionAxis().resolve_axis([sx.BATCH], "decode")
    with pytest.raises(ValueError, match="MODE_TRAIN"):
        sx.PartitionAxis().resolve_spec([sx.BATCH], "anything at all")
    for mode in (1, True, None, sx.NOT_GIVEN):
        with pytest.raises(ValueError, match="mode"):
            sx.PartitionAxis().resolve_spec([sx.BATCH], mode)


def test_two_dimensions_on_one_mesh_axis_fail_at_resolve_time_and_name_both():
    with pytest.raises(sx.SpecError) as caught:
        sx.PartitionAxis().resolve_spec([sx.BATCH, sx.HEAD, sx.EMBED], TRAIN)
    text = str(caught.value)
    assert "'__HEAD__' (dim 1)" in text and "'__EMBED__' (dim 2)" in text and "'tp'" in text
    assert "hidden_state_axis" in text, "the remedy names the field to change"


def test_one_mesh_axis_twice_inside_a_composite_fails_too():
    with pytest.raises(sx.SpecError, match="'__FULLY_SHARDED_DATA_PARALLEL__' .dim 0. and '__BATCH__' .dim 0.*'fsdp'"):
        sx.PartitionAxis().resolve_spec([[sx.FSDP, sx.BATCH]], TRAIN)
    with pytest.raises(sx.SpecError, match="'dp'"):
        sx.PartitionAxis().resolve_spec([[sx.TP, ("ep", "dp")], [sx.SP, [sx.BATCH]]], TRAIN)
    sx.PartitionAxis.register("rows", ("tp", "tp"))
    with pytest.raises(sx.SpecError, match="'rows' .dim 0. and 'rows' .dim 0."):
        sx.PartitionAxis().resolve_spec(["rows"], TRAIN)


def test_every_duplicate_is_listed_not_the_first():
    with pytest.raises(sx.SpecError) as caught:
        sx.PartitionAxis().resolve_spec([sx.HEAD, sx.LENGTH, sx.EMBED, sx.QUERY_LENGTH], TRAIN)
    assert len(caught.value.offences) == 2


def test_looking_up_single_axes_may_repeat_a_mesh_axis():
    """`resolve_axis` answers one question per axis; only a spec lays them over one array."""
    assert sx.PartitionAxis().resolve_axis([sx.HEAD, sx.EMBED], TRAIN) == ["tp", "tp"]


# ---- tokens, modes, NOT_GIVEN ---------------------------------------------------------------------------------------


def test_tokens_are_distinct_strings_with_short_spellings():
    values = [getattr(sx, name) for name in TOKENS]
    assert len(set(values)) == len(values)
    assert all(value == f"__{name}__" for name, value in zip(TOKENS, values, strict=True))
    assert (sx.DP, sx.FSDP, sx.TP, sx.EP, sx.SP) == (
        sx.DATA_PARALLEL,
        sx.FULLY_SHARDED_DATA_PARALLEL,
        sx.TENSOR_PARALLEL,
        sx.EXPERT_PARALLEL,
        sx.SEQUENCE_PARALLEL,
    )
    assert sx.EMPTY == "_"


def test_modes():
    assert sorted(sx.GENERATION_MODES) == sorted([sx.MODE_DECODE, sx.MODE_INSERT])
    modes = [sx.MODE_TRAIN, sx.MODE_PREFILL, sx.MODE_DECODE, sx.MODE_INSERT]
    assert modes == ["__train__", "__prefill__", "__autoregressive__", "__insert__"]


def test_not_given_is_one_object_through_pickle_copy_and_processes():
    assert pickle.loads(pickle.dumps(sx.NOT_GIVEN)) is sx.NOT_GIVEN
    assert copy.deepcopy([sx.NOT_GIVEN])[0] is sx.NOT_GIVEN is copy.copy(sx.NOT_GIVEN)
    assert repr(sx.NOT_GIVEN) == "NOT_GIVEN" and not sx.NOT_GIVEN
    code = "import sys, pickle; import shardax as sx; assert pickle.load(sys.stdin.buffer) is sx.NOT_GIVEN"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(sx.NOT_GIVEN), check=True, timeout=120)


# ---- PartitionAxis: the table of fields -----------------------------------------------------------------------------


def test_documented_fields_in_documented_order_with_documented_values():
    paxis = sx.PartitionAxis()
    assert {name: getattr(paxis, name) for name in FIELDS} == DEFAULTS
    assert [field.name for field in dataclasses.fields(paxis)][:5] == list(DEFAULTS)[:5]
    assert sx.PartitionAxis("data", "shard").batch_axis == ("shard", "data"), "the first five are positional"


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_follows_its_field(token):
    field, value, decode = TOKENS[token]
    name = getattr(sx, token)
    for mode in (sx.MODE_TRAIN, sx.MODE_PREFILL):
        assert sx.PartitionAxis().resolve_axis([name], mode) == [value]
        assert sx.PartitionAxis(**{field: "other"}).resolve_axis([name], mode) == ["other"]
    for mode in GENERATION:
        assert sx.PartitionAxis().resolve_axis([name], mode) == [value]
        assert sx.PartitionAxis(**{field: "other"}).resolve_axis([name], mode) == ["other"]
        if decode:
            assert sx.PartitionAxis(**{decode: "other"}).resolve_axis([name], mode) == ["other"]
            assert sx.PartitionAxis(**{decode: "other"}).resolve_axis([name], TRAIN) == [value]


@pytest.mark.parametrize("decode", [decode for *_, decode in TOKENS.values() if decode])
def test_a_decode_field_of_none_means_as_in_training_and_empty_means_replicated(decode):
    field = decode.removeprefix("decode_")
    (token,) = (getattr(sx, name) for name, facts in TOKENS.items() if facts[0] == field)
    assert sx.PartitionAxis(**{field: "other", decode: None}).resolve_axis([token], DECODE) == ["other"]
    assert sx.PartitionAxis(**{field: "other", decode: sx.EMPTY}).resolve_axis([token], DECODE) == [None]


def test_derived_fields_follow_what_is_given():
    paxis = sx.PartitionAxis(tensor_parallel_axis="model", data_parallel_axis="data", batch_axis=["data", "ep"])
    assert paxis.head_axis == paxis.vocab_axis == paxis.decode_kv_head_axis == "model"
    assert paxis.batch_axis == paxis.decode_batch_axis == ("data", "ep")
    assert sx.PartitionAxis(head_axis=sx.NOT_GIVEN, data_parallel_axis=sx.NOT_GIVEN) == sx.PartitionAxis()
    assert sx.PartitionAxis(expert_gate_axis=sx.NOT_GIVEN).expert_gate_axis is None


def test_a_field_may_name_mesh_tokens():
    paxis = sx.PartitionAxis(data_parallel_axis="data", batch_axis=(sx.FSDP, sx.DP, [sx.EP]), head_axis=sx.EMPTY)
    assert paxis.batch_axis == ("fsdp", "data", "ep")
    assert paxis.resolve_axis([sx.HEAD], TRAIN) == [None]
    with pytest.raises(sx.AxisRuleError, match="head_axis.*'__KV_HEAD__'.*holds mesh axes"):
        sx.PartitionAxis(head_axis=sx.KV_HEAD)


def test_bad_field_values_are_all_listed():
    with pytest.raises(sx.AxisRuleError) as caught:
        sx.PartitionAxis(head_axis=3, vocab_axis="  ", batch_axis=("dp", 1.5))
    assert [offence.where for offence in caught.value.offences] == ["batch_axis", "head_axis", "vocab_axis"]
    with pytest.raises(TypeError, match="head_axs"):
        sx.PartitionAxis(head_axs="tp")


def test_partition_axis_is_a_frozen_value():
    paxis = sx.PartitionAxis(head_axis="model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        paxis.head_axis = "tp"
    assert paxis == sx.PartitionAxis(head_axis="model") != sx.PartitionAxis()
    assert hash(paxis) == hash(sx.PartitionAxis(head_axis="model")) != hash(sx.PartitionAxis())
    assert len({paxis, sx.PartitionAxis(head_axis="model"), sx.PartitionAxis()}) == 2
    assert repr(paxis) == "PartitionAxis(head_axis='model')" and eval(repr(paxis), vars(sx)) == paxis
    assert repr(sx.PartitionAxis()) == "PartitionAxis()"


def test_partition_axis_pickles_copies_and_hashes_alike_in_another_process():
    paxis = sx.PartitionAxis(head_axis="model", decode_batch_axis=sx.EMPTY).extend({"layers": ("pp", sx.FSDP)})
    for twin in (pickle.loads(pickle.dumps(paxis)), copy.deepcopy(paxis), dataclasses.replace(paxis)):
        assert twin == paxis and hash(twin) == hash(paxis)
        assert twin.resolve_axis(["layers", sx.BATCH], DECODE) == [("pp", "fsdp"), None]
    code = "import sys, pickle; print(hash(pickle.load(sys.stdin.buffer)))"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(paxis),
            capture_output=True,
            check=True,
            timeout=120,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert hashes == {f"{hash(paxis)}\n".encode()}


def test_replace_derives_again_what_was_derived():
    paxis = sx.PartitionAxis(head_axis="heads").replace(tensor_parallel_axis="model")
    assert (paxis.head_axis, paxis.decode_head_axis, paxis.vocab_axis) == ("heads", "heads", "model")
    with pytest.raises(TypeError, match="did you mean 'head_axis'"):
        paxis.replace(head_axs="x")


# ---- resolving ------------------------------------------------------------------------------------------------------


def test_none_and_empty_are_replicated():
    assert sx.PartitionAxis().resolve_axis([None, "_", sx.EMPTY, [], [None, "_"]], TRAIN) == [None] * 5
    assert sx.PartitionAxis().resolve_spec([], TRAIN) == P()


def test_composites_of_semantic_and_mesh_names_are_flattened():
    resolve = sx.PartitionAxis().resolve_axis
    assert resolve([[sx.FSDP, sx.SP], sx.TP], TRAIN) == [("fsdp", "sp"), "tp"]
    assert resolve([(sx.BATCH, "replica", [sx.EP, None])], TRAIN) == [("fsdp", "dp", "replica", "ep")]
    assert resolve([[sx.BATCH, "slice"]], DECODE) == [("fsdp", "dp", "slice")]
    assert sx.PartitionAxis(decode_head_axis="x").resolve_axis([[sx.HEAD, sx.EP]], DECODE) == [("x", "ep")]


def test_fields_and_own_mesh_axes_are_axes_too():
    assert sx.PartitionAxis().resolve_axis(["head_axis", "tp", ["batch_axis"]], TRAIN) == ["tp", "tp", ("fsdp", "dp")]


def test_free_dimensions_pass_through():
    assert sx.PartitionAxis().resolve_spec([sx.BATCH, sx.FREE], TRAIN) == P(("fsdp", "dp"), sx.FREE)


def test_all_unknown_axes_are_listed_with_close_matches():
    sx.PartitionAxis.register("layers", "pp")
    paxis = sx.PartitionAxis().extend({"stage": "pp"})
    with pytest.raises(sx.UnknownAxisError) as caught:
        paxis.resolve_axis(["__BACTH__", sx.HEAD, "layer", "stag", "batch", [["__HAED__"]]], TRAIN)
    text = str(caught.value)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KeyError)
    for dim, match in ((0, "__BATCH__"), (2, "layers"), (3, "stage"), (4, "__BATCH__"), (5, "__HEAD__")):
        assert any(o.where == f"dim {dim}" and f"{match!r}" in o.problem for o in caught.value.offences), (dim, text)
    with pytest.raises(ValueError, match="Unknown semantic axis name"):
        sx.PartitionAxis().resolve_axis(["__UNKNOWN_SEMANTIC__"], TRAIN)


def test_a_mistyped_token_in_a_rule_is_not_taken_for_a_mesh_axis():
    sx.PartitionAxis.register("rows", ("fsdp", "__HAED__"))
    with pytest.raises(sx.UnknownAxisError, match=r"the rule of 'rows': '__HAED__'; did you mean '__HEAD__'"):
        sx.PartitionAxis().resolve_axis(["rows"], TRAIN)


def test_axes_that_are_not_a_sequence_of_axes():
    with pytest.raises(sx.AxisRuleError, match=r"one axis per dimension.*\['__BATCH__'\]"):
        sx.PartitionAxis().resolve_axis(sx.BATCH, TRAIN)
    with pytest.raises(TypeError, match="dim 1.*3"):
        sx.PartitionAxis().resolve_axis([sx.BATCH, 3], TRAIN)
    with pytest.raises(TypeError, match="dim 0.*'dp'"):
        sx.PartitionAxis().resolve_axis([{"dp"}], TRAIN)
    with pytest.raises(TypeError, match="dim 0"):
        sx.PartitionAxis().resolve_axis([["dp", sx.FREE]], TRAIN)
    with pytest.raises(TypeError, match="one axis per dimension"):
        sx.PartitionAxis().resolve_axis(None, TRAIN)


def test_the_list_handed_out_is_the_callers_own():
    paxis = sx.PartitionAxis()
    paxis.resolve_axis([sx.BATCH], TRAIN).append("mine")
    assert paxis.resolve_axis([sx.BATCH], TRAIN) == [("fsdp", "dp")]


# ---- the registry ---------------------------------------------------------------------------------------------------


def test_register_is_process_wide_for_present_and_future_instances():
    before = sx.PartitionAxis(expert_parallel_axis="experts")
    sx.PartitionAxis.register("slots", "expert_parallel_axis")
    assert before.resolve_axis(["slots"], TRAIN) == ["experts"]
    assert sx.PartitionAxis().resolve_axis(["slots"], TRAIN) == ["ep"]
    seen = []
    thread = threading.Thread(target=lambda: seen.append(before.resolve_axis(["slots"], TRAIN)))
    thread.start()
    thread.join()
    assert seen == [["experts"]]


@pytest.mark.parametrize(
    ("rule", "resolved"),
    [
        ("head_axis", "tp"),
        ("model", "model"),
        (("fsdp", "head_axis"), ("fsdp", "tp")),
        (["dp", sx.SP, ["ep"]], ("dp", "sp", "ep")),
        (sx.BATCH, ("fsdp", "dp")),
        (None, None),
        ("_", None),
        ([], None),
    ],
)
def test_every_kind_of_rule(rule, resolved):
    sx.PartitionAxis.register("custom", rule)
    assert sx.PartitionAxis().resolve_axis(["custom"], TRAIN) == [resolved]
    assert sx.PartitionAxis().extend({"mine": rule}).resolve_axis(["mine"], TRAIN) == [resolved]


def test_existing_axes_need_override():
    sx.PartitionAxis.register("custom", "head_axis")
    for name in ("custom", " custom ", sx.DATA_PARALLEL):
        with pytest.raises(sx.AxisRuleError, match="already exists.*override=True"):
            sx.PartitionAxis.register(name, "expert_axis")
    sx.PartitionAxis.register("custom", "expert_axis", override=True)
    sx.PartitionAxis.register(sx.DATA_PARALLEL, "expert_parallel_axis", override=True)
    assert sx.PartitionAxis().resolve_axis(["custom", sx.DP], TRAIN) == ["ep", "ep"]
    sx.PartitionAxis.unregister(sx.DATA_PARALLEL)
    assert sx.PartitionAxis().resolve_axis([sx.DP], TRAIN) == ["dp"]


@pytest.mark.parametrize("name", ["", "  ", "\t"])
def test_blank_names_are_refused(name):
    with pytest.raises(sx.AxisRuleError, match="non-empty string"):
        sx.PartitionAxis.register(name, "head_axis")
    with pytest.raises(ValueError, match="non-empty string"):
        sx.PartitionAxis.unregister(name)
    with pytest.raises(ValueError, match="non-empty string"):
        sx.PartitionAxis.register("custom", name)


@pytest.mark.parametrize("name", ["_", None, 3])
def test_reserved_and_wrong_names_are_refused(name):
    with pytest.raises(sx.AxisRuleError):
        sx.PartitionAxis.register(name, "head_axis")


@pytest.mark.parametrize("rule", [3, 1.5, {"a": "b"}, ("tp", 3), {"tp", "dp"}, sx.NOT_GIVEN])
def test_rules_of_the_wrong_type_are_refused_when_registered(rule):
    with pytest.raises(TypeError, match=r"custom[\s\S]*mesh axis"):
        sx.PartitionAxis.register("custom", rule)
    assert sx.PartitionAxis.get_registered_axes() == {}


def test_unregister_missing():
    sx.PartitionAxis.unregister("nothing")
    with pytest.raises(KeyError, match="'nothing' is not registered"):
        sx.PartitionAxis.unregister("nothing", missing_ok=False)
    sx.PartitionAxis.register("layers", "pp")
    with pytest.raises(KeyError, match="did you mean 'layers'"):
        sx.PartitionAxis.unregister("layer", missing_ok=False)
    sx.PartitionAxis.unregister("layers", missing_ok=False)
    with pytest.raises(sx.UnknownAxisError):
        sx.PartitionAxis().resolve_axis(["layers"], TRAIN)


@pytest.mark.parametrize(
    ("rules", "asked", "trail"),
    [
        ({"a": "b", "b": "a"}, "a", "'a' -> 'b' -> 'a'"),
        ({"loop": "loop"}, "loop", "'loop' -> 'loop'"),
        ({sx.BATCH: (sx.BATCH, "ep")}, sx.BATCH, r"'__BATCH__' -> '__BATCH__'[\s\S]*batch_axis"),
    ],
)
def test_cycles_are_found_when_resolved(rules, asked, trail):
    """Until both ends are registered a name may as well be a mesh axis: only who follows it can tell."""
    for name, rule in rules.items():
        sx.PartitionAxis.register(name, rule, override=True)
    with pytest.raises(sx.AxisRuleError, match="Cyclic semantic axis registration.*" + trail):
        sx.PartitionAxis().resolve_axis([asked], TRAIN)
    assert sx.PartitionAxis.get_registered_axes().keys() == rules.keys()  # listing them comes to an end


def test_a_cycle_of_generation_rules_is_found_in_generation():
    sx.PartitionAxis.register("a", "b")
    assert sx.PartitionAxis().resolve_axis(["a"], TRAIN) == ["b"], "b is a mesh axis until it is registered"
    sx.PartitionAxis.register("b", "tp", generation_axis_rule=("dp", ["a"]))
    assert sx.PartitionAxis().resolve_axis(["a"], TRAIN) == ["tp"]
    with pytest.raises(sx.AxisRuleError, match="Cyclic"):
        sx.PartitionAxis().resolve_axis(["b"], DECODE)


def test_a_cycle_between_an_instance_and_the_registry_is_found_when_resolved():
    paxis = sx.PartitionAxis().extend({"x": "y"})
    sx.PartitionAxis.register("y", "x")
    with pytest.raises(sx.AxisRuleError, match="Cyclic semantic axis registration.*'x' -> 'y' -> 'x'"):
        paxis.resolve_axis(["x"], TRAIN)


def test_repeating_an_axis_is_not_a_cycle():
    sx.PartitionAxis.register("b", [sx.DP, sx.DP])
    sx.PartitionAxis.register("a", ["b", "b"])
    assert sx.PartitionAxis().resolve_axis(["a"], TRAIN) == [("dp",) * 4]


def test_generation_rule_is_inferred_from_a_field_or_an_alias():
    sx.PartitionAxis.register("field", "query_sequence_axis")
    sx.PartitionAxis.register("token", sx.HEAD)
    sx.PartitionAxis.register("alias", "field")
    sx.PartitionAxis.register("literal", "tp")
    sx.PartitionAxis.register("explicit", "query_sequence_axis", generation_axis_rule="decode_head_axis")
    sx.PartitionAxis.register("explicit-alias", "explicit")
    registered = sx.PartitionAxis.get_registered_axes()
    assert registered["field"] == {
        "axis_rule": "query_sequence_axis",
        "generation_axis_rule": "decode_query_sequence_axis",
    }
    inferred = {name: entry["generation_axis_rule"] for name, entry in registered.items()}
    assert inferred["token"] == inferred["explicit"] == inferred["explicit-alias"] == "decode_head_axis"
    assert inferred["alias"] == "decode_query_sequence_axis"
    assert inferred["literal"] is sx.NOT_GIVEN

    paxis = sx.PartitionAxis(decode_query_sequence_axis="q", decode_head_axis="h")
    names = ["field", "token", "alias", "explicit", "explicit-alias"]
    assert paxis.resolve_axis(names, TRAIN) == ["sp", "tp", "sp", "sp", "sp"]
    for mode in GENERATION:
        assert paxis.resolve_axis(names, mode) == ["q", "h", "q", "h", "h"]
        assert sx.PartitionAxis().resolve_axis(["field"], mode) == ["sp"], "a None decode field means as in training"


def test_explicit_generation_rules():
    sx.PartitionAxis.register("never", "tp", generation_axis_rule=None)
    sx.PartitionAxis.register("always", "head_axis", generation_axis_rule="head_axis")
    paxis = sx.PartitionAxis(decode_head_axis="x")
    assert paxis.resolve_axis(["never", "always"], TRAIN) == ["tp", "tp"]
    assert paxis.resolve_axis(["never", "always"], DECODE) == [None, "tp"]
    assert sx.PartitionAxis.get_registered_axes()["never"]["generation_axis_rule"] is None


def test_the_snapshot_of_registered_axes_is_the_callers_own():
    sx.PartitionAxis.register("a", ["fsdp", "dp"])
    snapshot = sx.PartitionAxis.get_registered_axes()
    snapshot.clear()
    assert sx.PartitionAxis.get_registered_axes()["a"]["axis_rule"] == ("fsdp", "dp")
    sx.PartitionAxis.clear_registered_axes()
    assert sx.PartitionAxis.get_registered_axes() == {}


def test_registering_from_many_threads_loses_nothing():
    def work(worker):
        for i in range(50):
            sx.PartitionAxis.register(f"axis{worker}-{i}", (f"mesh{worker}", "dp"))
            assert sx.PartitionAxis().resolve_axis([f"axis{worker}-{i}"], TRAIN) == [(f"mesh{worker}", "dp")]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sx.PartitionAxis.get_registered_axes()) == 200


# ---- extend: the same on one instance -------------------------------------------------------------------------------


def test_extend_touches_one_instance_and_no_global():
    base = sx.PartitionAxis()
    mine = base.extend({"layers": "pp", "scale": None}).extend({"rows": ["layers", sx.BATCH]})
    assert mine.resolve_axis(["layers", "scale", "rows"], TRAIN) == ["pp", None, ("pp", "fsdp", "dp")]
    assert sx.PartitionAxis.get_registered_axes() == {}
    with pytest.raises(sx.UnknownAxisError):
        base.resolve_axis(["layers"], TRAIN)
    assert mine != base and hash(mine) != hash(base)
    assert "layers" in repr(mine) and eval(repr(mine), vars(sx)) == mine


def test_the_order_of_extending_makes_no_difference():
    one = sx.PartitionAxis().extend({"layers": "pp", "scale": None})
    other = sx.PartitionAxis().extend({"scale": None}).extend({"layers": "pp"})
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
    assert sx.PartitionAxis(extensions={"scale": None, "layers": "pp"}) == one
    with pytest.raises(TypeError, match="The rule of 'scale' cannot be 3"):
        sx.PartitionAxis(extensions={"scale": 3})


def test_extend_has_generation_rules_and_refuses_what_register_refuses():
    paxis = sx.PartitionAxis().extend({"pages": "dp", "queries": sx.HEAD}, generation_axis_rules={"pages": "sp"})
    assert paxis.resolve_axis(["pages", "queries"], DECODE) == ["sp", "tp"]
    with pytest.raises(sx.AxisRuleError, match="already exists"):
        sx.PartitionAxis().extend({sx.HEAD: "model"})
    assert sx.PartitionAxis().extend({sx.HEAD: "model"}, override=True).resolve_axis([sx.HEAD], TRAIN) == ["model"]
    with pytest.raises(sx.AxisRuleError, match="Cyclic"):
        sx.PartitionAxis().extend({"a": "b", "b": "a"}).resolve_axis(["a"], TRAIN)
    with pytest.raises(sx.AxisRuleError, match="non-empty string"):
        sx.PartitionAxis().extend({"": "b"})
    with pytest.raises(sx.AxisRuleError, match="'pagse'.*did you mean 'pages'"):
        sx.PartitionAxis().extend({"pages": "dp"}, generation_axis_rules={"pagse": "sp"})


def test_an_instance_goes_before_the_registry():
    paxis = sx.PartitionAxis().extend({"layers": "mine"})
    sx.PartitionAxis.register("layers", "everybodys")
    assert paxis.resolve_axis(["layers"], TRAIN) == ["mine"]
    assert sx.PartitionAxis().resolve_axis(["layers"], TRAIN) == ["everybodys"]


# ---- jit follows the registry ---------------------------------------------------------------------------------------


def test_jit_retraces_when_a_registered_axis_changes():
    traced = []

    def lookup(paxis, x):
        traced.append(paxis.resolve_spec(["custom"], TRAIN))
        return x

    jitted, paxis = jax.jit(lookup, static_argnums=0), sx.PartitionAxis()
    sx.PartitionAxis.register("custom", "head_axis")
    jitted(paxis, 1.0), jitted(paxis, 1.0)
    sx.PartitionAxis.register("custom", "expert_axis", override=True)
    jitted(paxis, 1.0), jitted(paxis, 1.0)
    assert traced == [P("tp"), P("ep")]
    sx.PartitionAxis.register("custom", "head_axis", override=True)
    jitted(paxis, 1.0)
    assert len(traced) == 2, "a registry as it was before finds the old traces again"


# ---- laws -----------------------------------------------------------------------------------------------------------

tokens = st.sampled_from([getattr(sx, name) for name in TOKENS])
mesh_names = st.sampled_from(["dp", "fsdp", "tp", "pp", "slice"])
leaf_axes = st.one_of(st.none(), st.just("_"), tokens, mesh_names)
nested = st.recursive(leaf_axes, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
modes = st.sampled_from([sx.MODE_TRAIN, sx.MODE_PREFILL, sx.MODE_DECODE, sx.MODE_INSERT])
field_values = st.one_of(st.none(), st.just("_"), mesh_names, st.lists(mesh_names, max_size=2, unique=True))
paxes = st.dictionaries(st.sampled_from(list(DEFAULTS)[5:]), field_values, max_size=6).map(
    lambda given: sx.PartitionAxis(**given)
)


def leaves(axis):
    return [leaf for part in axis for leaf in leaves(part)] if isinstance(axis, (list, tuple)) else [axis]


def tupled(axis):
    return tuple(map(tupled, axis)) if isinstance(axis, list) else axis


@given(paxes, st.lists(nested, max_size=4).map(lambda axes: [[axis] for axis in axes]), modes)
def test_law_resolving_is_deterministic_and_blind_to_list_or_tuple(paxis, axes, mode):
    once = paxis.resolve_axis(axes, mode)
    assert once == paxis.resolve_axis(axes, mode) == paxis.resolve_axis(tupled(axes), mode)
    assert once == pickle.loads(pickle.dumps(paxis)).resolve_axis(axes, mode)


@given(paxes, nested, modes)
def test_law_a_composite_is_its_leaves_side_by_side(paxis, axis, mode):
    (flat,) = paxis.resolve_axis([leaves(axis)], mode)
    assert paxis.resolve_axis([[axis]], mode) == [flat]
    parts = [paxis.resolve_axis([[leaf]], mode)[0] or () for leaf in leaves(axis)]
    assert (flat or ()) == tuple(name for part in parts for name in part)
    assert flat is None or all(isinstance(name, str) and name != "_" for name in flat)


@given(paxes, tokens, modes, st.integers(min_value=1, max_value=6))
def test_law_a_chain_of_aliases_means_what_its_end_means(paxis, token, mode, length):
    chain = {f"alias{i}": f"alias{i + 1}" for i in range(length)} | {f"alias{length}": token}
    assert paxis.extend(chain).resolve_axis(["alias0"], mode) == paxis.resolve_axis([token], mode)
    try:
        for name, rule in chain.items():
            sx.PartitionAxis.register(name, rule)
        assert paxis.resolve_axis(["alias0"], mode) == paxis.resolve_axis([token], mode)
    finally:
        sx.PartitionAxis.clear_registered_axes()


@given(paxes)
def test_law_a_value_equals_what_its_repr_and_pickle_make(paxis):
    for twin in (eval(repr(paxis), vars(sx)), pickle.loads(pickle.dumps(paxis)), paxis.replace()):
        assert twin == paxis and hash(twin) == hash(paxis)


@given(paxes, st.lists(tokens, max_size=4), modes)
def test_law_a_spec_is_the_resolved_axes_or_an_error_that_names_the_repeated_mesh_axis(paxis, axes, mode):
    resolved = paxis.resolve_axis(axes, mode)
    names = [name for name in leaves(resolved) if name]
    if len(set(names)) == len(names):
        assert paxis.resolve_spec(axes, mode) == P(*resolved)
    else:
        with pytest.raises(sx.SpecError) as caught:
            paxis.resolve_spec(axes, mode)
        assert all(repr(name) in str(caught.value) for name in names if names.count(name) > 1)


def test_one_mesh_axis_for_data_and_parameters_is_in_the_batch_once():
    both = sx.PartitionAxis(data_parallel_axis="data", fully_sharded_data_parallel_axis="data")
    assert both.resolve_spec([sx.BATCH, None], sx.MODE_TRAIN) == P("data", None)
    assert sx.PartitionAxis(fully_sharded_data_parallel_axis=("fsdp", "dp")).batch_axis == ("fsdp", "dp")
