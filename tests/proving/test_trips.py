"""How often loops run: against a counter that really counts, and what is said of loops that nobody can count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import HloParseError
from shardax.proving.trips import Frame, trips
from shardax.proving.walk import walk

COMPARE = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
}


def loop(
    start="constant(0)", limit="constant(4)", step="add(%i, %one)", compare="compare(%j, %n), direction=LT", **more
):
    """A loop over `(counter, limit, data)`; `more` adds computations, attributes, or changes what the counter starts with."""
    tuple_of = "(s32[], s32[], f32[8]{0})"
    return f"""HloModule loop, num_partitions=8

{more.get("computations", "")}%body (p: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {{
  %p = {tuple_of} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] get-tuple-element(%p), index=1
  %data = f32[8]{{0}} get-tuple-element(%p), index=2
  %one = s32[] constant({more.get("by", 1)})
  %next = s32[] {step}
  %sum = f32[8]{{0}} all-reduce(%data), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %t = {tuple_of} tuple(%next, {more.get("handed", "%limit")}, %sum)
}}

%condition (q: (s32[], s32[], f32[8])) -> pred[] {{
  %q = {tuple_of} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=1
  ROOT %go = pred[] {compare}
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[8], y: s32[]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = s32[] parameter(1)
  %end = s32[] {limit}
  %start = s32[] {start}
  %made = {tuple_of} tuple(%start, %end, %x)
  %w = {tuple_of} while(%made), condition=%condition, body=%body{more.get("attributes", "")}
  ROOT %out = f32[8]{{0}} get-tuple-element(%w), index=2
}}
"""


def trips_of(text):
    module = sx.parse_hlo(text)
    return trips(Frame(module, module.entry), module.entry.by_name["w"])


def counted(start, limit, step, direction):
    times = 0
    while COMPARE[direction](start, limit):
        start += step
        times += 1
        if times > 1000:
            return None
    return times


@settings(deadline=None)
@given(
    start=st.integers(-20, 20),
    limit=st.integers(-20, 20),
    step=st.integers(-5, 5),
    direction=st.sampled_from(sorted(COMPARE)),
    down=st.booleans(),
    flipped=st.booleans(),
)
def test_derived_counts_are_those_of_a_counter(start, limit, step, direction, down, flipped):
    mirrored = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
    compare = f"compare(%n, %j), direction={mirrored}" if flipped else f"compare(%j, %n), direction={direction}"
    text = loop(
        f"constant({start})",
        f"constant({limit})",
        "subtract(%i, %one)" if down else "add(%one, %i)",
        compare,
        by=-step if down else step,
    )
    found = trips_of(text)
    expected = counted(start, limit, step, direction)
    if expected is None:  # it runs for ever (until it wraps): no number is given
        assert found.count is None
    elif found.count is not None:
        assert found.count == expected and found.how == "derived"
    else:  # a step of nought, or one in the wrong direction, that happens not to run
        assert expected in (0, 1)


FUSED = """%bump (u: s32[]) -> s32[] {
  %u = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %v = s32[] add(%u, %two)
}

%less (l: s32[], m: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %m = s32[] parameter(1)
  ROOT %k = pred[] compare(%l, %m), direction=LT
}

"""
FOLLOWED = {
    "plainly": (loop(), 4),
    "a start in a call": (loop("call(%end), to_apply=%bump", "constant(9)", computations=FUSED), 0),
    "a step in a fusion": (loop(step="fusion(%i), kind=kLoop, calls=%bump", computations=FUSED), 2),
    "a comparison in a fusion": (loop(compare="fusion(%j, %n), kind=kLoop, calls=%less", computations=FUSED), 4),
    "known and derived": (loop(attributes=', backend_config={"known_trip_count":{"n":"4"}}'), 4),
    "known where nothing can be derived": (
        loop(limit="copy(%y)", attributes=', backend_config={"known_trip_count":{"n":"7"}}'),
        7,
    ),
}


@pytest.mark.parametrize("case", FOLLOWED)
def test_the_counter_is_followed_through(case):
    text, count = FOLLOWED[case]
    assert trips_of(text).count == count


def test_rows_are_multiplied():
    (row,) = sx.Ledger.of(sx.parse_hlo(loop(limit="constant(12)")), {"dp": 8})
    assert (row.op, row.axes, row.count, row.payload_bytes, row.wire_bytes) == ("all-reduce", ("dp",), 12, 32, 12 * 56)


UNCOUNTED = {
    "its limit depends on data": loop(limit="copy(%y)"),
    "its counter does not start or step by a constant": loop(start="copy(%y)"),
    "its condition is not a comparison of a counter": loop(compare="not(%j)"),
    "its counter never meets NE": loop(step="add(%i, %one)", by=3, compare="compare(%j, %n), direction=NE"),
}


@pytest.mark.parametrize("why", UNCOUNTED)
def test_a_loop_that_cannot_be_counted_is_counted_once_and_said(why):
    ledger = sx.Ledger.of(sx.parse_hlo(UNCOUNTED[why]), {"dp": 8})
    assert [row.count for row in ledger] == [1]
    (note,) = ledger.notes
    assert note == f"loop %w is counted once: {why}"
    assert note in str(ledger)


def test_a_limit_that_the_body_changes_is_not_believed():
    assert trips_of(loop(handed="%next")).count is None


def test_counts_that_contradict_each_other_are_refused():
    with pytest.raises(HloParseError, match="runs 4 times but says 5"):
        trips_of(loop(attributes=', backend_config={"known_trip_count":{"n":"5"}}'))


def test_a_comparison_without_direction_is_refused():
    with pytest.raises(HloParseError, match="compares without a direction"):
        trips_of(loop(compare="compare(%j, %n)"))


def test_the_condition_runs_once_more():
    module = sx.parse_hlo(loop())
    times = {each.computation.name: each.times for each in walk(module, lambda _: True)}
    assert times["body"] == 4 and times["condition"] == 5 and times["main"] == 1
