"""What the compilers say of memory, read: their numbers, their reports, and both sentences with which they refuse."""

import pytest

import shardax as sx
from shardax.proving.memory import BigBuffer, Memory, read_memory, read_refusal, report_buffers, size_of

GIB = 2**30
EARLY = (
    "RESOURCE_EXHAUSTED: {code}Ran out of memory on HBM, the total memory required for HLO temporaries (15.79G) exceeds "
    "available HBM (15.75G). HLO module: jit_step."
)
LATE = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.30G of 15.75G hbm. Exceeded hbm capacity by 561.04M.

Total hbm usage >= 16.55G:
    reserved        258.03M
    program          15.16G
    arguments         1.14G

Output size 0B; shares 0B with arguments.

Program hbm requirement 15.16G:
    global           512.0K
    scoped            64.0K
    HLO temp         14.37G (57.4% utilization: Unpadded (8.25G) Padded (14.37G), 42.6% fragmentation (6.12G))

  Largest program allocations in hbm:

  1. Size: 3.91G
     Operator: op_name="jit(step)/jvp()/dot_general" source_file="/home/me/train.py" source_line=88
     Shape: f32[1,8192,128256]{2,1,0:T(8,128)}
     Unpadded size: 3.91G
     XLA label: fusion.7 = fusion(copy.3)
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Operator: op_name="jit(step)/transpose(jvp())/mul"
     Shape: bf16[32,8192,1024]{2,1,0}
     Unpadded size: 512.00M
     XLA label: fusion.9
     Allocation type: HLO temp
"""


@pytest.mark.parametrize("code", ["", "E1000: CompileTimeHbmOom: "])  # libtpu 0.0.42 and 0.0.51
def test_the_early_refusal_is_one_sentence(code):
    found = read_refusal(EARLY.format(code=code))
    assert (found.used, found.available) == (size_of("15.79", "G"), size_of("15.75", "G"))
    assert found.program is None and found.arguments is None and found.buffers == ()


def test_the_late_refusal_has_its_parts_and_lines():
    found = read_refusal(LATE)
    assert (found.used, found.available) == (size_of("16.30", "G"), size_of("15.75", "G"))
    assert (found.program, found.arguments) == (size_of("15.16", "G"), size_of("1.14", "G"))
    assert found.buffers == (
        BigBuffer(size_of("3.91", "G"), "f32[1,8192,128256]", "train.py:88"),
        BigBuffer(512 << 20, "bf16[32,8192,1024]", "jit(step)/transpose(jvp())/mul"),
    )


def test_other_refusals_are_not_about_memory():
    assert read_refusal("INVALID_ARGUMENT: unknown option xla_no_such") is None
    assert read_refusal("RESOURCE_EXHAUSTED: too many requests") is None


REPORT = """Memory Space: default (color=0)
Total bytes: 138415616 (132.00MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
   64.00MiB( 50%);   64.00MiB;     67108864;                1; f32[4,2048,2048]
  128.00MiB(100%);   63.00MiB;            0;                3; f32[2048,8192], 2×f32[4,2048,2048]

  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
       512B(100%);       512B;            0;                2; 2×f32[], (s32[8], f32[8])
"""


def test_the_report_lists_allocations_with_the_shapes_that_share_them():
    assert report_buffers(REPORT) == [
        (64 << 20, ["f32[4,2048,2048]"]),
        (63 << 20, ["f32[2048,8192]", "f32[4,2048,2048]"]),
        (512, ["f32[]"]),  # a tuple is a table of pointers
    ]
    assert len(report_buffers(REPORT, most=1)) == 1 and report_buffers("") == []


def test_the_tables_of_several_memory_spaces_are_one_list_of_arrays():
    small, large = (
        "       24B(100%);        24B;            0;                3; ",
        "  63.00MiB(100%);   63.00MiB;  0;  1; ",
    )
    report = f"{small}(f32[32,128], f32[64,128]), f32[2], 2×(f32[8])\n{small}(f32[8], f32[9])\n{large}f32[2048,8192]\n"
    assert report_buffers(report) == [(63 << 20, ["f32[2048,8192]"]), (24, ["f32[2]"])]


STATS = {
    "argument_size_in_bytes": 10 * GIB,
    "output_size_in_bytes": 6 * GIB,
    "temp_size_in_bytes": 3 * GIB,
    "alias_size_in_bytes": 5 * GIB,
    "generated_code_size_in_bytes": 7,
}


@pytest.mark.parametrize(
    ("target", "more", "peak"),
    [
        ("cpu:8", {"peak_memory_in_bytes": 10 * GIB}, 14),  # XLA:CPU's own peak leaves the temporaries out
        ("tpu:v5p:2x2x1", {}, 14),  # an older libtpu says no total
        ("tpu:v5p:2x2x1", {"total_allocation_bytes": 15 * GIB, "peak_memory_in_bytes": 12 * GIB}, 15),
        ("gpu:h100:8", {"peak_memory_in_bytes": 12 * GIB}, 12),
        ("gpu:h100:8", {"peak_memory_in_bytes": 0}, 14),
    ],
)
def test_the_peak_is_what_each_compiler_holds_against_the_device(target, more, peak):
    found = read_memory(STATS | more, sx.Target.of(target), [("params", 9 * GIB)], [], 16 * GIB)
    assert (found.peak, found.margin) == (peak * GIB, (16 - peak) * GIB)
    assert (found.arguments, found.outputs, found.aliased, found.temporaries, found.code) == (
        10 * GIB,
        6 * GIB,
        5 * GIB,
        3 * GIB,
        7,
    )


def test_memory_tells_its_story_and_survives_its_file():
    groups, buffers = [("params", 6 * GIB), ("opt", 4 * GIB)], [BigBuffer(GIB, "f32[16,16]", "train.py:3")]
    found = read_memory(STATS, sx.Target.of("tpu:v5p:2x2x1"), groups, buffers, 12 * GIB)
    text = str(found)
    assert "params" in text and "margin" in text and "-2 GiB" in text
    assert Memory.from_json(found.to_json()) == found
    assert read_memory(STATS, sx.Target.of("cpu:8"), groups, buffers, None).margin is None
