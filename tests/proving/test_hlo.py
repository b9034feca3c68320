"""The reader of HLO text: what it makes of small texts written by hand, and of what three compilers really print."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.proving.compiled import lowered, module_of, text_of
from tests.proving.programs import PROGRAMS

import shardax as sx
from shardax.errors import HloParseError
from shardax.proving.hlo import Alias
from shardax.proving.opcodes import is_known
from shardax.proving.shapes import ArrayShape, arrays, bare, dtype_bits, element, nbytes, parts
from shardax.proving.walk import walk

TIERS = ["partitioner", "v5e", "v5p", "h100"]


def hlo(body, *, header="", tables="", rest=""):
    """A module of one entry computation `(x: f32[8]) -> f32[8]`, and what stands around it."""
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    return f"HloModule step{header}\n\n{tables}{rest}ENTRY %main (x: f32[8]) -> f32[8] {{\n{lines}}}\n"


DOUBLE = """
%x = f32[8]{0} parameter(0), metadata={op_name="state[\\'w\\']"}
ROOT %double = f32[8]{0} add(%x, %x), metadata={op_name="jit(step)/add" stack_frame_id=3}
"""
TABLES = """FileNames
1 "/home/me/train.py"
2 "/env/lib/python3.11/site-packages/flax/linen.py"

FunctionNames
1 "step"
2 "Dense.__call__"
3 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=4 end_column=9}
3 {file_name_id=1 function_name_id=3 line=40 end_line=40 column=0 end_column=9}

StackFrames
1 {file_location_id=3 parent_frame_id=0}
2 {file_location_id=1 parent_frame_id=1}
3 {file_location_id=2 parent_frame_id=2}

"""

# ---- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[0,8]", 0),
        ("bf16[8,256]{1,0:T(8,128)(2,1)S(1)}", 4096),
        ("s4[3]", 2),  # half a byte each, rounded up
        ("pred[8]", 8),
        ("(f32[16]{0}, (bf16[8,2]{1,0}, token[]), /*index=2*/u32[]{:S(2)})", 100),
        ("f8e4m3b11fnuz[4,4]", 16),
        ("c128[2]", 32),
        ("f32[<=8,2]", 64),  # a dynamic dimension counts at its bound
    ],
)
def test_bytes_of_shapes(shape, size):
    assert nbytes(shape) == size


@pytest.mark.parametrize("dtype", ["f31", "bf17", "s3", "c32", "f2", "x32", "f8", "predd", "f8e4"])
def test_what_is_no_element_type_is_refused(dtype):
    with pytest.raises(HloParseError, match="not an element type"):
        dtype_bits(dtype)


def test_tuples_are_cut_at_their_own_commas():
    shape = "(s32[], /*index=1*/(bf16[8,2]{1,0}, f32[4]{0}), pred[2,2]{1,0})"
    assert element(shape, 1) == "(bf16[8,2]{1,0}, f32[4]{0})"
    assert bare(shape) == "(s32[], (bf16[8,2], f32[4]), pred[2,2])"
    assert parts("a(b,c), {d,e}, f") == ["a(b,c)", "{d,e}", "f"]
    with pytest.raises(HloParseError, match="has no element 3"):
        element(shape, 3)
    assert arrays("bf16[8]{0:T(8)S(5)}") == (ArrayShape("bf16", (8,), 5),)


# ---- instructions ---------------------------------------------------------------------------------------------------

LINES = {
    "commas in strings": (
        '%c = f32[8]{0} custom-call(%x), custom_call_target="a(b, %c", metadata={op_name="f(\\"a\\", b)"}',
        ("x",),
        'f("a", b)',
    ),
    "elements of tuples": ("%c = f32[8]{0} add(%t#1, %t#0)", ("t#1", "t#0"), ""),
    "shapes before operands": ("%c = f32[8]{0} add(f32[8]{0} %x, f32[8]{0} %x)", ("x", "x"), ""),
    "names without a sign": ("c = f32[8]{0} add(x, x)", ("x", "x"), ""),
    "a number is no operand": ("%c = f32[8]{0} constant({1, 2, 3, 4, 5, 6, 7, 8})", (), ""),
}


@pytest.mark.parametrize("case", LINES)
def test_operands_and_names_of_one_line(case):
    line, operands, op_name = LINES[case]
    percent = "" if "without" in case else "%"
    body = f"""
    {percent}x = f32[8]{{0}} parameter(0)
    {percent}t = (f32[8]{{0}}, f32[8]{{0}}) tuple({percent}x, {percent}x)
    {line}
    ROOT {percent}r = f32[8]{{0}} add({percent}c, {percent}c)
    """
    found = sx.parse_hlo(hlo(body)).entry.by_name["c"]
    assert (found.operands, found.op_name) == (operands, op_name)


def test_attributes_and_callees():
    region = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    region += "  ROOT %s = f32[] add(%a, %b)\n}\n\n"
    body = """
    %x = f32[8]{0} parameter(0)
    ROOT %r = f32[8]{0} all-reduce(%x), channel_id=7, replica_groups=[1,8]<=[8], to_apply=%add, backend_config={"n":"1"}
    """
    module = sx.parse_hlo(hlo(body, header=", replica_count=2, num_partitions=4", rest=region))
    root = module.entry.root
    assert root.is_root and root.opcode == "all-reduce"
    assert root.attribute("channel_id") == "7" and root.attribute("nothing") is None
    assert root.callees == (("to_apply", "add"),) and root.callee("body") is None
    assert root.attributes == "channel_id=7, replica_groups=[1,8]<=[8], to_apply=%add"
    assert (module.name, module.num_partitions, module.replica_count) == ("step", 4, 2)
    assert module.entry.users["x"] == (root,)


def test_the_header_tells_what_is_donated():
    header = ", input_output_alias={ {0}: (1, {}, may-alias), {1,0}: (0, {2}, must-alias) }, buffer_donor={ (3, {}) }"
    module = sx.parse_hlo(hlo(DOUBLE, header=header))
    assert module.aliases == (Alias((0,), 1, (), "may-alias"), Alias((1, 0), 0, (2,), "must-alias"))
    assert module.donors == ((3, ()),)
    (parameter,) = module.parameters
    assert (parameter.path, parameter.dtype, parameter.shape, parameter.bytes) == ("state['w']", "f32", (8,), 32)
    assert parameter.aliased and not parameter.donor


# ---- two places for lines -------------------------------------------------------------------------------------------


def test_stack_frames_show_the_innermost_line_that_is_the_users():
    module = sx.parse_hlo(hlo(DOUBLE, tables=TABLES))
    found = module.source(module.entry.root)
    assert (found.file, found.line, found.function) == ("/home/me/train.py", 12, "step")
    assert [place.line for place in module.sources.chains[3]] == [99, 12, 40]
    assert module.source(module.entry.by_name["x"]) is None


def test_parents_counted_from_one_are_the_same_chain():
    """libtpu numbers parents one higher, where the first frame is its own parent."""
    shifted = TABLES.replace("parent_frame_id=2", "parent_frame_id=3").replace("parent_frame_id=1", "parent_frame_id=2")
    shifted = shifted.replace("parent_frame_id=0", "parent_frame_id=1")
    plain, other = (sx.parse_hlo(hlo(DOUBLE, tables=tables)).sources.chains for tables in (TABLES, shifted))
    assert plain == other


def test_older_text_has_the_line_in_place():
    body = DOUBLE.replace("stack_frame_id=3", 'source_file="/home/me/old.py" source_line=7')
    module = sx.parse_hlo(hlo(body))
    found = module.source(module.entry.root)
    assert (found.file, found.line) == ("/home/me/old.py", 7)


# ---- text that is not whole -----------------------------------------------------------------------------------------

WHOLE = hlo(DOUBLE, tables=TABLES)
BROKEN = {
    "nothing": ("", "does not begin with 'HloModule'"),
    "another language": ("module @jit_step {\n}\n", "does not begin with 'HloModule'"),
    "only a header": ("HloModule step\n", "no computation"),
    "cut in the middle": (WHOLE[: len(WHOLE) // 2], None),
    "no last bracket": (WHOLE.rstrip("}\n") + "\n", None),
    "two roots": (WHOLE.replace("%x = f32[8]{0} p", "ROOT %x = f32[8]{0} p"), "2 ROOT instructions"),
    "no root": (WHOLE.replace("ROOT ", ""), "0 ROOT instructions"),
    "an operand from nowhere": (WHOLE.replace("add(%x, %x)", "add(%x, %y)"), "%y is used and nowhere defined"),
    "one name twice": (WHOLE.replace("%double =", "%x ="), "two instructions of one name"),
    "a shape that changed": (WHOLE.replace("%x = f32[8]", "%x = f32[9]"), "where its first line says"),
    "a root that changed": (WHOLE.replace("%double = f32[8]", "%double = f32[4]"), "where its first line says"),
    "an open bracket": (WHOLE.replace("add(%x, %x)", "add(%x, %x"), "brackets that do not match"),
    "an open string": (WHOLE.replace('"jit(step)/add"', '"jit(step)/add'), "string that does not end"),
    "a line of prose": (WHOLE.replace("  ROOT", "  hello\n  ROOT"), "not an instruction"),
    "a line outside": (WHOLE + "left over\n", "belongs nowhere"),
    "a mangled table": (WHOLE.replace("\n2 {file_loc", "\n2x{file_loc"), "tables of source lines"),
    "working under an unknown name": (
        WHOLE.replace("add(%x, %x)", "al-reduce(%x), replica_groups={}"),
        "unknown instruction 'al-reduce' (%double) with replica_groups=",
    ),
    "two entries": (WHOLE + WHOLE[WHOLE.index("ENTRY") :].replace("%main", "%other"), "2 ENTRY computations"),
    "entry shapes of another program": (
        WHOLE.replace("HloModule step", "HloModule step, entry_computation_layout={(f32[9]{0})->f32[8]{0}}"),
        "not those of the module's first line",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_text_that_is_not_whole_is_refused_in_words(case):
    text, message = BROKEN[case]
    with pytest.raises(HloParseError) as failure:
        sx.parse_hlo(text)
    assert message is None or message in str(failure.value)
    assert len(str(failure.value).splitlines()) < 6


def test_a_new_instruction_without_work_is_let_through():
    """XLA gains instructions; one that sends, multiplies or calls nothing cannot make a sum wrong."""
    module = sx.parse_hlo(hlo(DOUBLE.replace("add(", "squareplus(")))
    assert not is_known(module.entry.root.opcode) and sx.flops(module) == 0


# ---- what compilers print -------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", TIERS)
def test_every_program_of_every_compiler_resolves(tier):
    for name, program in PROGRAMS.items():
        module = module_of(tier, name)
        assert module.num_partitions == 8 and module.replica_count == 1, name
        arguments = jax.tree.leaves(program.build(program.mesh(jax.devices()[:8]))[1])
        assert len(module.parameters) <= len(arguments) and all(each.path for each in module.parameters), name
        for computation in module.computations.values():
            assert computation.root.is_root
            for line in computation.instructions:
                assert is_known(line.opcode), (name, line.opcode)
                for operand in line.operands:
                    assert computation.shape(operand)
        walked = walk(module, lambda _: True)
        assert not walked.notes, (name, walked.notes)  # every loop is counted
        assert any(module.source(line) for line in module.entry.instructions), name


@pytest.mark.parametrize("name", ["fsdp_shard_map", "ring_attention", "two_axes_branches"])
def test_xla_reads_the_same_out_of_its_own_program(name):
    """Against the compiler's own objects: names, operands and kinds of all instructions."""
    compiled = lowered(name).compile()
    (theirs,) = compiled.runtime_executable().hlo_modules()
    ours = sx.parse_hlo(theirs.to_string())
    computations = theirs.computations()
    assert sorted(each.name for each in computations) == sorted(ours.computations)
    kinds = set()
    for each in computations:
        mine = ours.computations[each.name].by_name
        for line in each.instructions():
            assert mine[line.name].operands == tuple(operand.name for operand in line.operands())
            kinds.add((line.opcode, mine[line.name].opcode))
        assert len(mine) == len(each.instructions())
    assert (
        len(kinds) == len({theirs for theirs, _ in kinds}) == len({ours for _, ours in kinds})
    )  # one word for one kind


def test_every_kind_of_instruction_that_xla_has_is_known():
    """Its own names of them, but for those that text writes otherwise."""
    otherwise = {"kClz", "kCos", "kExp", "kExp2", "kExpm1", "kLog1p", "kLog2", "kPopulationCount", "kSin", "kTopK"}
    new = {"kOptimizationBarrier", "kCollectiveReduce"}  # printed opt-barrier; not counted: refused where it appears
    (module,) = lowered("three_axes").compile().runtime_executable().hlo_modules()
    kinds = type(module.computations()[0].instructions()[0].opcode)
    written = {name: re.sub(r"(?<!^)([A-Z])", r"-\1", name[1:]).lower() for name in dir(kinds) if name[0] == "k"}
    assert {name for name, text in written.items() if not is_known(text)} <= otherwise | new
    assert len(written) > 100 and is_known("opt-barrier") and is_known("sine") and is_known("count-leading-zeros")


def test_arguments_keep_their_paths_and_donations():
    def step(state, x):
        return {"w": state["w"] + x.sum(), "b": state["b"] * 2}, x

    shapes = {"w": jax.ShapeDtypeStruct((8,), jnp.float32), "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}
    compiled = jax.jit(step, donate_argnums=0).lower(shapes, jax.ShapeDtypeStruct((2, 3), jnp.float32)).compile()
    module = sx.parse_hlo(compiled.as_text())
    found = {each.path: (each.dtype, each.shape, each.aliased) for each in module.parameters}
    assert found == {
        "state['b']": ("bf16", (4,), True),
        "state['w']": ("f32", (8,), True),
        "x": ("f32", (2, 3), False),
    }


def test_reading_is_quick():
    """Not a benchmark (that is benchmarks/proving.py): a reader that became quadratic would take minutes here."""
    text = text_of("partitioner", "fsdp_constraint")
    start = text.index("ENTRY")
    body = "".join(f"  %c{at} = f32[] constant({at})\n" for at in range(20_000))
    long = text[:start] + text[start:].replace("{\n", "{\n" + body, 1)
    assert len(sx.parse_hlo(long).entry.instructions) > 20_000


def test_values_print_small():
    module = module_of("partitioner", "three_axes")
    assert repr(module).startswith("HloModule('jit_") and "8 partitions" in repr(module)
    assert "instructions)" in repr(module.entry) and np.all([len(repr(c)) < 200 for c in module.computations.values()])
