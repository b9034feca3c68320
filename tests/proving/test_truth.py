"""Ledger and FLOPs against numbers worked out by hand, on the partitioner's text and on three real compilers.

The table below is what each program must send, from its shapes alone. Where a compiler makes something else of it, the
test says what and why (`REWRITES`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.proving.compiled import SCRIPT, ledger_of, lowered, module_of
from tests.proving.programs import CAPACITY, EXPERTS, LAYERS, MODEL, PROGRAMS, WIDTH

import shardax as sx

BF16, F32 = 2, 4
SOURCE = SCRIPT.read_text().splitlines()
ACCELERATORS = ["v5e", "v5p", "h100"]


@dataclass(frozen=True)
class Site:
    op: str
    axes: tuple
    count: int
    payload: int
    dtype: str
    origin: str
    phase: str = "forward"
    path: str | None = None
    line: tuple = ()  # any of these must stand on its Python line
    n: int = 8
    subset: str = ""
    rewrite: str = ""

    @property
    def wire(self):
        """Sent by one device: twice the reduced array's share, once the full array's share, or all of what is passed on."""
        shares = {"all-reduce": 2 * (self.n - 1) / self.n, "collective-permute": 1}
        return self.payload * shares.get(self.op, (self.n - 1) / self.n) * self.count


LAYER_BYTES = WIDTH * WIDTH * BF16
ROWS = 64 * 128 * BF16  # tokens x model of the Megatron MLP
SEQUENCE = 256 * 128 * BF16
EXPERT_ROWS = EXPERTS * CAPACITY * MODEL * BF16  # what one device hands out
GRADIENT = 256 * 256 * F32
PSUM = 1024 // 8 * 128 * F32


def gathers(origin, line, path="w"):
    phases = ("forward", "backward")  # backward: remat gathers again
    return [Site("all-gather", ("fsdp",), LAYERS, LAYER_BYTES, "bf16", origin, phase, path, line) for phase in phases]


EXPECTED = {
    # the gradient of a 256 x 512 f32 weight, reduced once
    "data_parallel": [Site("all-reduce", ("dp",), 1, 256 * 512 * F32, "f32", "partitioner", "backward", line=("tanh(x @ w",))],
    # every layer gathered forward and again in the rematerialised backward; its gradient scattered
    "fsdp_shard_map": [
        *gathers("user", ("lax.all_gather(w_shard",)),
        Site("reduce-scatter", ("fsdp",), LAYERS, LAYER_BYTES, "bf16", "user", "backward", line=("lax.all_gather(w_shard",)),
    ],
    # by sharding alone: the same gathers; the gradient is reduced, and the scatter left to the backend
    "fsdp_constraint": [
        *gathers("partitioner", ("h @ w_layer", "lax.scan(layer")),
        Site("all-reduce", ("fsdp",), LAYERS, LAYER_BYTES, "bf16", "partitioner", "backward", line=("h @ w_layer",)),
    ],
    "gather_gradient": [
        Site("all-gather", ("fsdp",), 1, 512 * 256 * BF16, "bf16", "user", "forward", "w", ("lax.all_gather(w, ",)),
        Site("reduce-scatter", ("fsdp",), 1, 512 * 256 * BF16, "bf16", "user", "backward", None, ("lax.all_gather(w, ",)),
    ],
    # Megatron: one all-reduce per layer forward; backward one per layer but the first, whose input needs no gradient
    "tensor_parallel": [
        *[Site("all-reduce", ("tp",), 1, ROWS, "bf16", "partitioner", "forward", line=("@ up) @ down",))] * 3,
        *[Site("all-reduce", ("tp",), 1, ROWS, "bf16", "partitioner", "backward", line=("@ up) @ down",))] * 2,
    ],
    "sequence_parallel": [
        Site("all-gather", ("tp",), 1, SEQUENCE, "bf16", "user", path="x", line=("lax.all_gather(x",)),
        Site("reduce-scatter", ("tp",), 1, SEQUENCE, "bf16", "user", line=("lax.psum_scatter(y",)),
    ],
    "moe_shard_map": [
        Site("all-to-all", ("ep",), 1, EXPERT_ROWS, "bf16", "user", path="x", line=("lax.all_to_all(x",)),
        Site("all-to-all", ("ep",), 1, EXPERT_ROWS, "bf16", "user", line=("lax.all_to_all(y",)),
    ],
    "moe_constraint": [
        Site("all-to-all", ("ep",), 1, EXPERT_ROWS, "bf16", "partitioner", path="x", line=("with_sharding_constraint",)),
        Site("all-to-all", ("ep",), 1, EXPERT_ROWS, "bf16", "partitioner", line=("with_sharding_constraint",)),
    ],
    # 8 stages + 4 microbatches - 1 ticks; a [32, 128] activation handed on at each
    "pipeline": [Site("collective-permute", ("pp",), 11, 32 * 128 * BF16, "bf16", "user", line=("lax.ppermute(y",))],
    # eight hops of keys and of values, [32, 4, 64] each
    "ring_attention": [Site("collective-permute", ("sp",), 8, 32 * 4 * 64 * BF16, "bf16", "user", line=("lax.ppermute(k",))] * 2,
    # 8 x 32 rows of 128
    "embedding_gather": [Site("all-reduce", ("tp",), 1, 8 * 32 * 128 * BF16, "bf16", "partitioner", line=("jnp.take(table",))],
    # one f32 per token: the maximum, the sum of exponents, the target's logit
    "vocab_parallel_loss": [
        Site("all-reduce", ("tp",), 1, 256 * F32, "f32", "user", line=("lax.pmax",)),
        Site("all-reduce", ("tp",), 1, 256 * F32, "f32", "user", line=("lax.psum(jnp.exp",)),
        Site("all-reduce", ("tp",), 1, 256 * F32, "f32", "user", line=("lax.psum(jnp.where",)),
    ],
    # the gradient, once per microbatch
    "microbatch_apart": [Site("all-reduce", ("dp",), 4, GRADIENT, "f32", "partitioner", "backward", line=("tanh(x @ w)",))],
    # each microbatch lives on two devices: its rows are gathered among the other four, its gradient reduced in pairs
    "microbatch_blocks": [
        Site("all-reduce", ("dp",), 4, GRADIENT, "f32", "partitioner", "backward", None, ("tanh(x @ w)",), 2, "2 of 8"),
        Site("all-gather", ("dp",), 4, 128 // 2 * 256 * F32, "f32", "partitioner", "forward", "x", (), 4, "4 of 8"),
    ],
    "three_axes": [
        Site("all-reduce", ("a", "c"), 1, PSUM, "f32", "user", line=("lax.psum(x * 2",), n=4),
        Site("all-reduce", ("b",), 1, PSUM, "f32", "user", line=("lax.psum(jnp.tanh",), n=2),
        Site("all-reduce", ("b", "c"), 1, PSUM, "f32", "user", line=("lax.psum(jnp.sin",), n=4),
    ],
    # one in a branch, one in a loop of three inside a loop of five
    "two_axes_branches": [
        Site("all-reduce", ("tp",), 1, 32 * 16 * F32, "f32", "user", path="x", line=("lax.psum(z",), n=4),
        Site("collective-permute", ("dp",), 15, 32 * 16 * F32, "f32", "user", line=("lax.ppermute(jnp.sin",), n=2),
    ],
}  # fmt: skip


def scattered(site, rewrite=""):
    return replace(site, op="reduce-scatter", rewrite=rewrite)


def rewrites(tier, name, sites):
    """What a real compiler makes of them, said in words."""
    if name == "fsdp_constraint" and tier == "v5e":  # all-reduce + slice becomes a reduce-scatter inside one fusion
        return [*sites[:2], scattered(sites[2], "all-reduce-scatter fusion")]
    if name == "fsdp_constraint" and tier == "h100":  # ... or a plain reduce-scatter
        return [*sites[:2], scattered(sites[2])]
    if tier == "v5p" and name in (
        "fsdp_shard_map",
        "gather_gradient",
        "sequence_parallel",
    ):  # no torus in 2x2x2: scatter by all-reduce + slice
        return [*sites[:-1], replace(sites[-1], op="all-reduce", rewrite="reduce-scatter done as all-reduce")]
    if (
        tier == "h100" and name == "fsdp_shard_map"
    ):  # the last backward layer is peeled off the loop to overlap its gather
        peeled = [replace(site, count=count) for site in sites[1:] for count in (1, LAYERS - 1)]
        return [sites[0], *peeled]
    if tier == "h100" and name == "ring_attention":  # keys and values in one permute
        return [replace(sites[0], payload=2 * sites[0].payload)]
    if name == "vocab_parallel_loss":  # the two independent sums are merged
        return [sites[0], replace(sites[1], payload=2 * sites[1].payload, line=(*sites[1].line, *sites[2].line))]
    if name == "microbatch_apart":  # the sum over microbatches is moved before the reduction: one instead of four
        return [replace(sites[0], count=1, phase="*", line=(*sites[0].line, "lax.scan(one"))]
    if name == "microbatch_blocks":  # likewise; TPU rounds the rows to bf16 before it gathers them, as its matmul would
        rows = sites[1] if tier == "h100" else replace(sites[1], dtype="bf16", payload=sites[1].payload // 2, phase="*")
        return [replace(sites[0], count=1, phase="*", line=()), rows]
    return sites


def seen(row, site):
    phase = "*" if site.phase == "*" else row.phase
    return (
        row.op,
        row.axes,
        row.count,
        row.payload_bytes,
        row.dtype,
        row.origin,
        phase,
        row.path,
        row.subset,
        row.rewrite,
    )


def wanted(site):
    return (
        site.op,
        site.axes,
        site.count,
        site.payload,
        site.dtype,
        site.origin,
        site.phase,
        site.path,
        site.subset,
        site.rewrite,
    )


def compare(ledger, sites):
    assert len(ledger) == len(sites), str(ledger)
    left = list(ledger)
    for site in sites:
        row = next((row for row in left if seen(row, site) == wanted(site) and on_line(row, site)), None)
        assert row is not None, f"no row for {site} in\n{ledger}"
        assert row.wire_bytes == round(site.wire), (row, site.wire)
        left.remove(row)
    assert not ledger.notes


def on_line(row, site):
    assert Path(row.file).name == "programs.py"
    return row.nearest or not site.line or any(text in SOURCE[row.line - 1] for text in site.line)


@pytest.mark.parametrize("name", EXPECTED)
def test_partitioner_sends_what_the_shapes_say(name):
    compare(ledger_of("partitioner", name), EXPECTED[name])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("tier", ACCELERATORS)
def test_compilers_send_the_same_or_a_stated_rewrite(tier, name):
    compare(ledger_of(tier, name), rewrites(tier, name, EXPECTED[name]))


def test_every_program_has_hand_computed_numbers():
    assert set(EXPECTED) == set(FLOPS) == set(PROGRAMS)
    assert len(EXPECTED) >= 12


# ---- FLOPs: 2 m k n per product, per device ----------------------------------------------------------------------

LAYER_FLOPS = 2 * (64 // 8) * WIDTH * WIDTH
PRODUCT = 2 * 64 * 128 * (512 // 8)
FLOPS = {
    "data_parallel": 2 * 2 * 8 * 256 * 512,  # forward, gradient of the weight
    "fsdp_shard_map": 4 * LAYERS * LAYER_FLOPS,  # forward, forward again, two backward
    "fsdp_constraint": 4 * LAYERS * LAYER_FLOPS,
    "gather_gradient": 2 * 2 * (64 // 8) * 512 * 256,
    "tensor_parallel": (3 * 2 + 3 * 4 - 1) * PRODUCT,  # two forward, four backward; the first input needs no gradient
    "sequence_parallel": 2 * 256 * 128 * 64 * 2,
    "moe_shard_map": 2 * (EXPERTS * CAPACITY) * MODEL * MODEL,
    "moe_constraint": 2 * (EXPERTS * CAPACITY) * MODEL * MODEL,
    "pipeline": 11 * 2 * 32 * 128 * 128,
    "ring_attention": 8 * 2 * (2 * 4 * 32 * 32 * 64),  # scores and values, each hop
    "embedding_gather": 0,
    "vocab_parallel_loss": 2 * 256 * 128 * (4096 // 8),
    "microbatch_apart": 2 * 2 * (128 // 8) * 256 * 256,
    "microbatch_blocks": 4
    * 2
    * 2
    * (128 // 8)
    * 256
    * 256,  # four times: each block is computed by every pair of devices
    "three_axes": 0,
    "two_axes_branches": 0,
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_of_the_partitioned_program_are_the_closed_form(name):
    assert sx.flops(module_of("partitioner", name)) == pytest.approx(FLOPS[name], rel=0.02)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FLOPS)
@pytest.mark.parametrize("tier", ACCELERATORS)
def test_flops_of_the_compiled_program_are_the_closed_form(tier, name):
    assert sx.flops(module_of(tier, name)) == pytest.approx(FLOPS[name], rel=0.02)


# ---- two slices: v5e:2x2*2 ---------------------------------------------------------------------------------------


def across(ledger):
    return [(row.op, row.axes, row.count, row.payload_bytes, row.wire_bytes) for row in ledger if row.link == "dcn"]


def within(ledger):
    return [(row.op, row.axes, row.count, row.payload_bytes, row.wire_bytes) for row in ledger if row.link == "ici"]


SLICES = ("v5e:2x2*2", 2)


@pytest.mark.timeout(600)
def test_a_reduction_over_two_slices_is_scatter_transfer_gather():
    ledger = ledger_of(SLICES[0], "data_parallel", SLICES[1])
    whole = 256 * 512 * F32
    assert across(ledger) == [("all-reduce", ("dp",), 1, whole // 4, whole // 4)]
    assert sorted(within(ledger)) == [
        ("all-gather", ("dp",), 1, whole, whole * 3 // 4),
        ("reduce-scatter", ("dp",), 1, whole, whole * 3 // 4),
    ]
    assert ledger.wire_bytes == whole * 2 * 7 // 8  # the same bytes as in one slice, on two networks
    assert {row.rewrite for row in ledger} == {"between slices", "within a slice"}


@pytest.mark.timeout(600)
def test_transfers_between_slices_inside_loops_are_multiplied():
    ledger = ledger_of(SLICES[0], "fsdp_shard_map", SLICES[1])
    part = LAYER_BYTES // 4
    assert sorted(across(ledger)) == [
        ("all-gather", ("fsdp",), LAYERS, part, part // 2 * LAYERS),
        ("all-gather", ("fsdp",), LAYERS, part, part // 2 * LAYERS),
        ("reduce-scatter", ("fsdp",), LAYERS, part, part // 2 * LAYERS),
    ]
    assert {row.path for row in ledger if row.link == "dcn" and row.op == "all-gather"} == {"w"}


@pytest.mark.timeout(600)
def test_only_the_axis_between_slices_travels_the_network():
    ledger = ledger_of(SLICES[0], "three_axes", SLICES[1])
    assert across(ledger) == [
        ("all-reduce", ("a",), 1, PSUM // 2, PSUM // 2)
    ]  # a c = scatter over c, a between, gather over c
    assert ("all-reduce", ("b",), 1, PSUM, PSUM) in within(ledger)
    assert ("all-reduce", ("b", "c"), 1, PSUM, PSUM * 3 // 2) in within(ledger)


# ---- what XLA:CPU makes of it is not reported, but must be readable ----------------------------------------------


def test_the_final_cpu_program_widens_bf16():
    module = sx.parse_hlo(lowered("tensor_parallel").compile().as_text())
    ledger = sx.Ledger.of(module, PROGRAMS["tensor_parallel"].axes)
    assert {(row.op, row.payload_bytes, row.dtype) for row in ledger} == {("all-reduce", 2 * ROWS, "f32")}
