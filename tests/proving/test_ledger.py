"""The ledger's contract, row by row: every form in which a compiler writes a collective, and what is told of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tests.proving.compiled import ledger_of

import shardax as sx
from shardax.errors import HloParseError
from shardax.proving.collectives import Collective, wire
from shardax.proving.remat import remat_messages

MESH = {"dp": 2, "tp": 4}
ALL, DP, TP = "[1,8]<=[8]", "[4,2]<=[2,4]T(1,0)", "[2,4]<=[8]"
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

"""


def program(body, *, computations="", devices=8):
    """An entry `(x: f32[16]) -> f32[16]`, num_partitions=8; `%x` is the parameter state['w']."""
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    return (
        f"HloModule step, num_partitions={devices}\n\n{ADD}{computations}ENTRY %main (x: f32[16]) -> f32[16] {{\n"
        "  %x = f32[16]{0} parameter(0), metadata={op_name=\"state[\\'w\\']\"}\n"
        f"{lines}  ROOT %out = f32[16]{{0}} copy(%x)\n}}\n"
    )


def ledger(body, mesh=MESH, **more):
    return sx.Ledger.of(sx.parse_hlo(program(body, **more)), mesh)


def only(body, **more):
    (row,) = ledger(body, **more)
    return row


# ---- bytes ----------------------------------------------------------------------------------------------------------

FORMS = {
    # line: op, axes, payload of one execution, sent by one device
    f"%r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add": ("all-reduce", ("tp",), 64, 96),
    f"%r = f32[16]{{0}} all-reduce(%x), replica_groups={ALL}, to_apply=%add": ("all-reduce", ("dp", "tp"), 64, 112),
    f"%r = f32[64]{{0}} all-gather(%x), replica_groups={TP}, dimensions={{0}}": ("all-gather", ("tp",), 256, 192),
    f"%r = f32[4]{{0}} reduce-scatter(%x), replica_groups={TP}, dimensions={{0}}, to_apply=%add": (
        "reduce-scatter",
        ("tp",),
        64,
        48,
    ),
    f"%r = f32[16]{{0}} all-to-all(%x), replica_groups={DP}, dimensions={{0}}": ("all-to-all", ("dp",), 64, 32),
    "%r = f32[16]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0}}": (
        "collective-permute",
        ("dp",),
        64,
        64,
    ),
    f"%r = f32[16]{{0}} collective-broadcast(%x), replica_groups={TP}": ("collective-broadcast", ("tp",), 64, 64),
}


@pytest.mark.parametrize("line", FORMS)
def test_what_one_execution_sends(line):
    op, axes, payload, sent = FORMS[line]
    row = only(line)
    assert (row.op, row.axes, row.count, row.payload_bytes, row.wire_bytes) == (op, axes, 1, payload, sent)
    size = 8 if len(axes) == 2 else MESH[axes[0]]
    assert (row.dtype, row.path, row.group_size) == ("f32", "state['w']", size)


def test_wire_bytes_are_the_textbooks():
    n, full = 8, 800
    assert wire("all-reduce", full, n) == 2 * full * (n - 1) / n
    for op in ("all-gather", "reduce-scatter", "all-to-all"):
        assert wire(op, full, n) == full * (n - 1) / n
    assert wire("collective-permute", full, n) == full


def test_a_reduction_may_add_in_a_wider_type_than_it_gives():
    """TPUs round while they reduce, where a product of rounded numbers comes next: what travels is what is added."""
    row = only(f"%r = bf16[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add")
    assert (row.dtype, row.payload_bytes, row.wire_bytes) == ("f32", 64, 96)
    with pytest.raises(HloParseError, match="all-reduce of f32 cannot give s32"):
        ledger(f"%r = s32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add")


def test_a_ragged_exchange_sends_at_most_what_it_is_given():
    row = only(
        f"""%n = s32[4]{{0}} constant({{1, 1, 1, 1}})
        %o = f32[128]{{0}} broadcast(%n), dimensions={{}}
        %r = f32[128]{{0}} ragged-all-to-all(%x, %o, %n, %n, %n, %n), replica_groups={TP}"""
    )
    assert (row.op, row.dtype, row.payload_bytes, row.wire_bytes) == ("ragged-all-to-all", "f32", 64, 48)
    assert row.notes == ("as if all of it, evenly: how much is data",)


# ---- asynchronous and wrapped ---------------------------------------------------------------------------------------

WRAPPED = f"""%wrapped (p: f32[16]) -> f32[64] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %ag = f32[64]{{0}} all-gather(%p), channel_id=1, replica_groups={TP}, dimensions={{0}}
}}

"""
ASYNC = {
    "start and done": f"""
        %s = ((f32[16]{{0}}), f32[64]{{0}}) all-gather-start(%x), channel_id=1, replica_groups={TP}, dimensions={{0}}
        %d = f32[64]{{0}} all-gather-done(%s)""",
    "a start that shows only operand and result": f"""
        %s = (f32[16]{{0}}, f32[64]{{0}}) all-gather-start(%x), channel_id=1, replica_groups={TP}, dimensions={{0}}
        %d = f32[64]{{0}} all-gather-done(%s)""",
    "wrapped in async-start": """
        %s = ((f32[16]{0}), f32[64]{0}, u32[]) async-start(%x), calls=%wrapped
        %u = ((f32[16]{0}), f32[64]{0}, u32[]) async-update(%s)
        %d = f32[64]{0} async-done(%u)""",
    "wrapped in a call": """
        %s = ((f32[16]{0}), f32[64]{0}, u32[]) call-start(%x), to_apply=%wrapped
        %d = f32[64]{0} call-done(%s)""",
    "offloaded by a custom call": """
        %s = ((f32[16]{0}), f32[64]{0}, u32[]) custom-call-start(%x), custom_call_target="Offload", called_computations={%wrapped}
        %d = f32[64]{0} custom-call-done(%s)""",
    "inside a fusion": "%d = f32[64]{0} fusion(%x), kind=kCustom, calls=%wrapped",
    "inside a called computation": "%d = f32[64]{0} call(%x), to_apply=%wrapped",
}


@pytest.mark.parametrize("form", ASYNC)
def test_an_asynchronous_or_wrapped_collective_is_one_row(form):
    row = only(ASYNC[form], computations=WRAPPED if "%wrapped" in ASYNC[form] else "")
    assert (row.op, row.axes, row.count, row.payload_bytes, row.wire_bytes) == ("all-gather", ("tp",), 1, 256, 192)
    assert row.path == "state['w']"


def clone(name, target=""):
    mark = f'  %m = u32[] custom-call(), custom_call_target="AsyncCollective{target}"\n' if target else ""
    return (
        f"%{name} (p: f32[16]) -> f32[64] {{\n  %p = f32[16]{{0}} parameter(0)\n{mark}"
        f"  ROOT %g = f32[64]{{0}} all-gather(%p), channel_id=3, replica_groups={TP}, dimensions={{0}}\n}}\n\n"
    )


def test_an_asynchronous_fusion_holds_three_clones_of_one_collective():
    body = """
    %s = f32[64]{0} fusion(%x), kind=kCustom, calls=%starting
    %m = f32[64]{0} fusion(%x), kind=kCustom, calls=%middle
    %d = f32[64]{0} fusion(%x), kind=kCustom, calls=%ending
    """
    computations = clone("starting", "Start") + clone("middle") + clone("ending", "Done")
    assert [(row.op, row.count) for row in ledger(body, computations=computations)] == [("all-gather", 1)]


def test_a_computation_called_twice_is_one_site_executed_twice():
    body = """
    %a = f32[64]{0} call(%x), to_apply=%wrapped
    %b = f32[64]{0} call(%x), to_apply=%wrapped
    """
    row = only(body, computations=WRAPPED)
    assert (row.count, row.payload_bytes, row.wire_bytes) == (2, 256, 384)


def test_a_variadic_collective_is_the_sum_of_its_arrays():
    body = f"%r = (f32[16]{{0}}, f32[16]{{0}}) all-reduce(%x, %x), replica_groups={DP}, to_apply=%add"
    row = only(body)
    assert (row.payload_bytes, row.wire_bytes, row.dtype) == (128, 128, "f32")


# ---- what the compiler made of it -----------------------------------------------------------------------------------


def test_an_all_reduce_of_which_a_fusion_keeps_a_part_is_a_reduce_scatter():
    computations = f"""%scattering (p: f32[16]) -> f32[4] {{
  %p = f32[16]{{0}} parameter(0)
  %ar = f32[16]{{0}} all-reduce(%p), replica_groups={TP}, to_apply=%add
  ROOT %part = f32[4]{{0}} slice(%ar), slice={{[0:4]}}
}}

"""
    row = only("%r = f32[4]{0} fusion(%x), kind=kCustom, calls=%scattering", computations=computations)
    assert (row.op, row.payload_bytes, row.wire_bytes) == ("reduce-scatter", 64, 48)
    assert row.rewrite == "all-reduce-scatter fusion" and row.rewrite in row.notes


def test_what_was_asked_and_what_was_done():
    name = 'metadata={op_name="jit(step)/shard_map/reduce_scatter"}'
    row = only(f"%r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add, {name}")
    assert (row.op, row.origin, row.rewrite) == ("all-reduce", "user", "reduce-scatter done as all-reduce")


def test_a_matrix_product_in_windows_is_called_so():
    computations = """%windowed_dot_general_body (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %cp = f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}

"""
    row = only("%r = f32[16]{0} call(%x), to_apply=%windowed_dot_general_body", computations=computations)
    assert (row.rewrite, row.origin, row.axes) == ("windowed einsum", "partitioner", ("tp",))


SEND = """
    %token = token[] after-all()
    %s = (f32[16]{{0}}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="psum.4_0",_xla_megascale_target="{target}",_xla_megascale_transfer_type="{kind}"}}
    %r = (f32[{size}]{{0}}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_rendezvous="psum.4_0",_xla_megascale_target="{target}",_xla_megascale_transfer_type="{kind}"}}
    %sd = token[] send-done(%s), channel_id=2, is_host_transfer=true
    %rd = (f32[{size}]{{0}}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true
"""


@pytest.mark.parametrize(
    ("kind", "size", "op", "sent"), [("ALL_REDUCE", 16, "all-reduce", 64), ("ALL_GATHER", 32, "all-gather", 64)]
)
def test_transfers_between_slices_travel_the_network(kind, size, op, sent):
    text = program(SEND.format(target="{1,2}x{0:3}", kind=kind, size=size), devices=4)
    (row,) = sx.Ledger.of(sx.parse_hlo(text), MESH, slice_of=[0] * 4 + [1] * 4)
    assert (row.op, row.axes, row.wire_bytes, row.link, row.rewrite) == (op, ("dp",), sent, "dcn", "between slices")
    assert row.dtype == "f32" and row.group_size == 2


# ---- who, when, where -----------------------------------------------------------------------------------------------

NAMES = {
    # op_name: origin, phase
    "jit(step)/jvp()/shard_map/psum": ("user", "forward"),
    "jit(step)/transpose(jvp())/shard_map/psum": ("user", "backward"),
    "jit(step)/shard_map/psum_invariant": ("user", "forward"),
    "jit(step)/dot_general": ("partitioner", "forward"),
    "jit(step)/transpose(jvp(layer))/dot_general": ("partitioner", "backward"),
    "jit(step)/transpose": ("partitioner", "forward"),  # a matrix transposed, not a backward pass
    "": ("partitioner", "forward"),
}


@pytest.mark.parametrize("name", NAMES)
def test_origin_and_phase_come_from_the_name_stack(name):
    body = f'%r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add, metadata={{op_name="{name}"}}'
    row = only(body)
    assert (row.origin, row.phase) == NAMES[name]


def test_the_partitioners_own_mark_outweighs_a_name():
    mark = 'frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(step)/psum"}'
    assert only(f"%r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add, {mark}").origin == "partitioner"


def test_a_line_that_was_lost_is_the_nearest_and_says_so():
    at = 'metadata={op_name="jit(step)/mul" source_file="/me/train.py" source_line=31}'
    body = f"""
    %r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add
    %y = f32[16]{{0}} multiply(%r, %r), {at}
    """
    row = only(body)
    assert (row.file, row.line, row.nearest, row.place) == ("/me/train.py", 31, True, "~train.py:31")
    exact = only(f"%r = f32[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add, {at}")
    assert (exact.line, exact.nearest, exact.place) == (31, False, "train.py:31")


def test_groups_that_are_no_whole_axis_are_called_what_they_are():
    row = only("%r = f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add")
    assert (row.axes, row.group_size, row.subset) == (("tp",), 2, "2 of 4")
    assert "groups of 2 of 4" in row.notes


def test_groups_of_one_send_nothing():
    assert len(ledger("%r = f32[16]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add")) == 0


def test_in_a_branch_it_runs_at_most_so_often():
    rows = ledger_of("partitioner", "two_axes_branches").where(op="all-reduce")
    assert [row.conditional for row in rows] == [True]
    assert "in a branch: at most this often" in rows[0].notes


def test_a_parameter_is_known_behind_the_barrier_of_a_rematerialization():
    """`jax.checkpoint` puts an opt-barrier before what it computes again, so that XLA does not merge it away."""

    def loss(w, x):
        x, _ = lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, w)
        return x.sum()

    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32)
    proof = sx.prove(jax.grad(loss), *shapes, mesh="fsdp=8", in_specs=(jax.P(None, "fsdp"), jax.P("fsdp")))
    assert " opt-barrier(" in proof.hlo
    gathers = [row for row in proof.ledger.where(op="all-gather") if row.path == "w"]
    assert [(row.phase, row.count) for row in gathers] == [("forward", 4), ("backward", 4)]


# ---- altered text ---------------------------------------------------------------------------------------------------

ALTERED = {
    "all-reduce without replica_groups": "%r = f32[16]{0} all-reduce(%x), to_apply=%add",
    "all-gather of 16 elements among 4 devices cannot give 32": f"%r = f32[32]{{0}} all-gather(%x), replica_groups={TP}",
    "reduce-scatter of 16 elements among 4 devices": f"%r = f32[8]{{0}} reduce-scatter(%x), replica_groups={TP}, to_apply=%add",
    "all-reduce of f32 cannot give s8": f"%r = s8[16]{{0}} all-reduce(%x), replica_groups={TP}, to_apply=%add",
    "all-to-all of f32 cannot give s32": f"%r = s32[16]{{0}} all-to-all(%x), replica_groups={TP}",
    "a device twice": "%r = f32[16]{0} all-reduce(%x), replica_groups={{0,1},{1,2}}, to_apply=%add",
    "one sends or receives twice": "%r = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{0,2}}",
    "no source_target_pairs": "%r = f32[16]{0} collective-permute(%x), channel_id=1",
    "not a notation of replica groups": "%r = f32[16]{0} all-reduce(%x), replica_groups=<8>, to_apply=%add",
}


@pytest.mark.parametrize("message", ALTERED)
def test_a_collective_that_does_not_add_up_is_refused(message):
    with pytest.raises(HloParseError) as failure:
        ledger(ALTERED[message])
    assert message in str(failure.value)


def test_tpus_add_in_a_wider_type_than_they_are_given():
    computations = "%cast (p: f32[16]) -> bf16[16] {\n  %p = f32[16]{0} parameter(0)\n"
    computations += "  ROOT %c = bf16[16]{0} convert(%p)\n}\n\n"
    body = f"""
    %narrow = bf16[16]{{0}} fusion(%x), kind=kLoop, calls=%cast
    %r = f32[16]{{0}} all-reduce(%narrow), replica_groups={TP}, to_apply=%add
    """
    row = only(body, computations=computations)
    assert (row.dtype, row.payload_bytes) == ("f32", 64)


# ---- the ledger as a value ------------------------------------------------------------------------------------------


def test_sums_by_axis_line_and_op():
    found = ledger_of("partitioner", "fsdp_shard_map")
    assert {op: group.executions for op, group in found.by_op().items()} == {"all-gather": 8, "reduce-scatter": 4}
    (axes,) = found.by_axis()
    assert axes == ("fsdp",) and found.by_axis()[axes].wire_bytes == found.wire_bytes
    assert sum(group.wire_bytes for group in found.by_line().values()) == found.wire_bytes
    assert all(line.rpartition(":")[2].isdigit() for line in found.by_line())
    assert found.group_by(lambda row: row.phase).keys() == {"forward", "backward"}
    assert found.executions == 12 and len(found) == len(list(found)) == 3
    backward = found.where(phase="backward")
    assert {row.phase for row in backward} == {"backward"} and len(backward) == 2
    assert found.where(axes="fsdp").rows == found.rows and len(found.where(op="all-to-all")) == 0
    assert found[0] is found.rows[0] and found[:2] == found.rows[:2]


def test_a_ledger_survives_its_file():
    found = ledger_of("partitioner", "two_axes_branches")
    assert sx.Ledger.from_json(found.to_json()) == found
    assert isinstance(Collective.from_json(found[0].to_json()), Collective)


def test_a_table_of_the_largest_first():
    text = str(ledger_of("partitioner", "fsdp_shard_map"))
    assert text.startswith("12 collectives, 1.3 MiB sent by each device")
    assert "programs.py:" in text and "(layer)" in text
    assert str(ledger("")) == "no collectives"
    table = ledger_of("partitioner", "tensor_parallel").table(1)
    assert len(table.rows) == 1 and "more" in " ".join(table.notes)


# ---- the partitioner's complaints -----------------------------------------------------------------------------------

OLD = (
    "W0000 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The compiler was not able to go from "
    "sharding {devices=[1,8]<=[8]} to {devices=[8,1]<=[8]} without doing a full rematerialization of the tensor for HLO "
    'operation: %copy = f32[8]{0} copy(%x), metadata={op_name="jit(f)/sharding_constraint"}. You probably want to enrich '
    "the sharding annotations to prevent this from happening."
)


def test_complaints_are_read_once():
    (message,) = remat_messages(f"{OLD}\nnoise\n{OLD}\n")
    assert message.source_sharding == "{devices=[1,8]<=[8]}" and message.op_name == "jit(f)/sharding_constraint"
    assert str(message).startswith("replicated on the way from {devices=[1,8]<=[8]} to {devices=[8,1]<=[8]}")
    assert remat_messages("nothing of the kind") == ()


def test_a_complaint_goes_to_the_row_that_pays():
    name = 'metadata={op_name="jit(f)/sharding_constraint"}'
    body = f"%r = f32[64]{{0}} all-gather(%x), replica_groups={TP}, dimensions={{0}}, {name}"
    found = sx.Ledger.of(sx.parse_hlo(program(body)), MESH, messages=OLD)
    assert [len(row.warnings) for row in found] == [1] and not found.warnings
    assert "involuntary full rematerialization" in str(found)
    other = sx.Ledger.of(sx.parse_hlo(program("")), MESH, messages=OLD)
    assert len(other.warnings) == 1 and "involuntary full rematerialization" in str(other)
