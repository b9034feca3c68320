"""Spec arithmetic: a table of fits first, then the laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.names.spec import axes_in, canonical, fit, local_shape, replication_factor, shard_count

MESH = "dp=2,fsdp=4,tp=4,one=1"
FREE = sx.FREE

FITS = [
    # asked, shape, given (stored), reasons
    (P(), (8, 8), P(), []),
    (P("dp"), (8, 8), P("dp"), []),
    (P("dp", None), (8, 8), P("dp", None), []),
    (P("one", "tp"), (3, 8), P("one", "tp"), []),  # size-1 axes stay
    (P("sp"), (8,), P(), ["unknown-axis"]),
    (P(("fsdp", "sp")), (8,), P("fsdp"), ["unknown-axis"]),  # Better: sp absent must not lose fsdp
    (P(("dp", "fsdp")), (8,), P(("dp", "fsdp")), []),
    (P(("dp", "fsdp")), (4,), P("dp"), ["indivisible"]),  # the largest leading part that divides
    (P(("fsdp", "dp")), (2,), P(), ["indivisible"]),
    (P("dp", "dp"), (8, 8), P("dp"), ["duplicate"]),
    (P("dp", ("dp", "tp")), (8, 8), P("dp", "tp"), ["duplicate"]),
    (P("tp", "tp"), (6, 8), P(None, "tp"), ["indivisible"]),  # what dim 0 gives up is free for dim 1
    (P("dp", "tp"), (8,), P("dp"), ["too-long"]),
    (P("dp", None, None), (8,), P("dp", None, None), []),  # surplus None loses nothing
    (P(FREE, "tp"), (3, 8), P(FREE, "tp"), []),
    (P("tp"), (0,), P("tp"), []),
    (P("dp"), (), P(), ["too-long"]),
    (P("sp", "tp", "dp"), (8, 6), P(), ["unknown-axis", "indivisible", "too-long"]),
]


@pytest.mark.parametrize("asked, shape, expected, reasons", FITS, ids=[f"{a}{s}" for a, s, _, _ in FITS])
def test_fit(asked, shape, expected, reasons):
    found = fit(asked, shape, MESH, "adapt")
    assert found.spec == expected and [c.reason for c in found.corrections] == reasons
    assert found.exact == (not reasons)
    if reasons:
        with pytest.raises(ValueError) as error:
            fit(asked, shape, MESH)
        assert len(error.value.offences) == len(reasons)
        with pytest.warns(UserWarning) as caught:
            assert fit(asked, shape, MESH, "warn") == found
        assert len(caught) == len(reasons)


def test_what_an_activation_loses_becomes_free():
    assert fit(P("tp", "dp"), (6, 8), MESH, "adapt", stored=False).spec == P(FREE, "dp")
    assert fit(P(("dp", "fsdp")), (4,), MESH, "adapt", stored=False).spec == P("dp")  # it kept a part: that part rules


def test_free_and_replicated_are_distinct_values():
    assert sx.FREE is not sx.REPLICATED and P(sx.FREE) != P(sx.REPLICATED)


def test_costs_are_bytes_per_device():
    (correction,) = fit(P("dp", "tp"), (8, 6), MESH, "adapt", dtype=np.float32).corrections
    # given: (8/2) × 6 floats = 96 bytes; with tp it would have been 24
    assert correction.bytes_per_device == 96 - 24
    (correction,) = fit(P("dp", "tp"), (8, 6), MESH, "adapt", dtype=np.dtype("bfloat16")).corrections
    assert correction.bytes_per_device == 48 - 12


@pytest.mark.parametrize(
    "asked, shape, kind, words",
    [
        (P("fspd"), (8,), sx.UnknownAxisError, "'fspd' is not an axis of the mesh .*did you mean 'fsdp'"),
        (
            P("tp"),
            (6,),
            sx.SpecError,
            r"6 does not divide by 'tp' \(4\).*would work: a dim of 8; or another axis, 'dp' \(2\)",
        ),
        (
            P(("dp", "fsdp")),
            (4,),
            sx.SpecError,
            r"4 does not divide by 'dp' \(2\)×'fsdp' \(4\) = 8.*would work: 'dp' alone",
        ),
        (P("dp", "dp"), (8, 8), sx.SpecError, "'dp' already shards dim 0.*'dp' on one dim only"),
        (P("dp", "tp"), (8,), sx.SpecError, "the spec has 2 entries for 1 dim"),
    ],
)
def test_messages(asked, shape, kind, words):
    with pytest.raises(kind, match=words):
        fit(asked, shape, MESH)


def test_an_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="on_misfit='adpat' is unknown; did you mean 'adapt'"):
        fit(P("tp"), (6,), MESH, "adpat")


@pytest.mark.parametrize("bad", [3, P(3), "dp"])
def test_not_a_spec(bad):
    with pytest.raises(sx.SpecError):
        fit(bad, (8,), MESH)


AXES = ("dp", "fsdp", "tp", "one")
entries = st.one_of(st.none(), st.sampled_from(AXES), st.lists(st.sampled_from([*AXES, "zz"]), max_size=3).map(tuple))
shapes = st.lists(st.integers(0, 24), max_size=4).map(tuple)
specs = st.lists(entries, max_size=5).map(
    lambda parts: (
        P(*parts)
        if len({a for p in parts for a in ([p] if isinstance(p, str) else p or ())})
        == sum(len([p] if isinstance(p, str) else p or ()) for p in parts)
        else None
    )
)


@given(specs.filter(lambda s: s is not None), shapes)
def test_adapted_specs_always_fit(asked, shape):
    found = fit(asked, shape, MESH, "adapt")
    again = fit(found.spec, shape, MESH, "adapt")
    assert all(c.reason == "too-long" for c in again.corrections) or again.exact
    blocks = local_shape(found.spec, shape, MESH)
    assert math.prod(blocks) * shard_count(found.spec, MESH) == math.prod(shape)  # bytes per shard × shards = total


@given(specs.filter(lambda s: s is not None and "zz" not in axes_in(s)))
def test_canonical_changes_the_spelling_only(asked):
    plain = canonical(asked, MESH)
    assert canonical(plain, MESH) == plain and not (plain and plain[-1] is None)
    assert shard_count(plain, MESH) == shard_count(asked, MESH)
    assert replication_factor(asked, MESH) * shard_count(asked, MESH) == 32


def test_canonical_spellings_are_one():
    assert canonical(P("dp")) == canonical(P("dp", None)) == canonical(P(("dp",), None)) == P("dp")
    assert canonical(P("dp", "one"), MESH) == P("dp") and canonical(P(FREE, None)) == P(FREE)


def test_counting_unknown_axes_is_an_error():
    with pytest.raises(sx.UnknownAxisError, match="did you mean 'tp'"):
        shard_count(P("tpp"), MESH)


def test_nested_entries_are_flat():
    assert sx.fit([["dp", ["tp"]]], (8,), "dp=2,tp=4").spec == P(("dp", "tp"))
