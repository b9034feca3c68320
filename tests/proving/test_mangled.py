"""Text that was cut, shuffled or mistyped gives a `HloParseError` or the same answer: never another number.

A change that leaves a valid program (another constant, another operand of the same shape) is another program, and is
left out.
"""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.proving.compiled import text_of
from tests.proving.programs import PROGRAMS

import shardax as sx
from shardax.errors import HloParseError

TIERS = ["partitioner", "v5e", "h100"]
NAMES = ["fsdp_constraint", "moe_shard_map", "ring_attention", "microbatch_blocks", "two_axes_branches"]
SIGNS = 'abcdefgstuvx0123456789 ,{}()[]="%.-'
ANOTHER_PROGRAM = re.compile(r"%[\w.\-#]*$|\bconstant\(-?\d*$")

# The same examples every time: a discovery belongs to whoever searches deeper, not to an unrelated change.
fuzz = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
programs = pytest.mark.parametrize("name", NAMES)
tiers = pytest.mark.parametrize("tier", TIERS)
place = st.floats(0, 1, exclude_max=True)


def answer(text, name):
    """What anybody asks of a program: its collectives and its FLOPs."""
    module = sx.parse_hlo(text)
    ledger = sx.Ledger.of(module, PROGRAMS[name].axes)
    rows = [
        (r.op, r.axes, r.count, r.payload_bytes, r.wire_bytes, r.dtype, r.group_size, r.subset, r.link) for r in ledger
    ]
    return sorted(rows), sx.flops(module), ledger.notes


def refused_or_the_same(mangled, text, name):
    try:
        found = answer(mangled, name)
    except HloParseError as error:
        assert len(str(error).splitlines()) < 12
        return
    assert found == answer(text, name)


def anywhere(text, at):
    return int(len(text) * at)


@pytest.mark.timeout(600)
@tiers
@programs
@fuzz
@given(at=place)
def test_the_beginning_of_a_text_is_never_read_as_a_whole(tier, name, at):
    text = text_of(tier, name)
    cut = text[: anywhere(text, at)]
    if cut.strip() != text.strip():
        with pytest.raises(HloParseError):
            answer(cut, name)


@pytest.mark.timeout(600)
@tiers
@programs
@fuzz
@given(at=place, length=st.integers(1, 300))
def test_a_hole(tier, name, at, length):
    text = text_of(tier, name)
    start = anywhere(text, at)
    if not is_another_program(text, start):
        refused_or_the_same(text[:start] + text[start + length :], text, name)


@pytest.mark.timeout(600)
@tiers
@programs
@fuzz
@given(at=place, sign=st.sampled_from(SIGNS), how=st.sampled_from(["instead", "before", "gone"]))
def test_a_mistyped_character(tier, name, at, sign, how):
    text = text_of(tier, name)
    start = anywhere(text, at)
    if is_another_program(text, start):
        return
    middle, after = {"instead": (sign, 1), "before": (sign, 0), "gone": ("", 1)}[how]
    refused_or_the_same(text[:start] + middle + text[start + after :], text, name)


def is_another_program(text, start):
    return ANOTHER_PROGRAM.search(text[max(0, start - 150) : start]) is not None


@pytest.mark.timeout(600)
@tiers
@programs
@fuzz
@given(one=place, other=place, how=st.sampled_from(["lost", "twice", "swapped"]))
def test_lines_lost_repeated_or_shuffled(tier, name, one, other, how):
    text = text_of(tier, name)
    lines = text.split("\n")
    a, b = int(len(lines) * one), int(len(lines) * other)
    if how == "lost":
        del lines[a]
    elif how == "twice":
        lines.insert(b, lines[a])
    else:
        lines[a], lines[b] = lines[b], lines[a]
    refused_or_the_same("\n".join(lines), text, name)


@pytest.mark.timeout(600)
@tiers
@programs
@fuzz
@given(at=place, digit=st.sampled_from("0123456789"))
def test_a_dimension_that_changed_somewhere(tier, name, at, digit):
    """Every collective, product, loop and argument has its shapes confirmed by something else in the text."""
    text = text_of(tier, name)
    found = list(re.finditer(r"[a-z]\d*\[(?:\d+,)*(\d)", text))
    start = found[int(len(found) * at)].start(1)
    refused_or_the_same(text[:start] + digit + text[start + 1 :], text, name)


@programs
def test_groups_for_another_mesh_are_refused(name):
    module = sx.parse_hlo(text_of("partitioner", name))
    with pytest.raises(HloParseError, match="compiled for 8 devices, read for a mesh of 4"):
        sx.Ledger.of(module, {"x": 4})
