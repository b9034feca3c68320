"""FLOPs and bytes of single instructions against NumPy's idea of the same product, and against the chips' rooflines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from tests.proving.test_hlo import hlo

import shardax as sx
from shardax.errors import HloParseError
from shardax.proving.chips import chip
from shardax.proving.cost import estimate, peak_rate
from shardax.proving.flops import doubts, flops_by_dtype, opaque_calls
from shardax.proving.traffic import hbm_bytes, kernels

F32, BF16 = jnp.float32, jnp.bfloat16


def module_of(fn, *shapes):
    args = [jax.ShapeDtypeStruct(size, dtype) for size, dtype in shapes]
    return sx.parse_hlo(jax.jit(fn).lower(*args).compiler_ir("hlo").as_hlo_text())


def compiled(fn, *shapes):
    args = [jax.ShapeDtypeStruct(size, dtype) for size, dtype in shapes]
    return sx.parse_hlo(jax.jit(fn).lower(*args).compile().as_text())


# ---- products -------------------------------------------------------------------------------------------------------

EINSUMS = [
    # subscripts, sizes, multiplications
    ("mk,kn->mn", {"m": 3, "k": 5, "n": 7}, 3 * 5 * 7),
    ("bmk,bkn->bmn", {"b": 2, "m": 3, "k": 5, "n": 7}, 2 * 3 * 5 * 7),
    ("bqhd,bkhd->bhqk", {"b": 2, "q": 3, "k": 5, "h": 4, "d": 8}, 2 * 3 * 5 * 4 * 8),
    ("mkl,kln->mn", {"m": 3, "k": 5, "l": 2, "n": 7}, 3 * 10 * 7),
    ("k,k->", {"k": 11}, 11),
]


@pytest.mark.parametrize(("subscripts", "sizes", "products"), EINSUMS)
def test_a_product_is_two_flops_per_multiplication(subscripts, sizes, products):
    left, right = (tuple(sizes[letter] for letter in operand) for operand in subscripts.partition("->")[0].split(","))
    module = module_of(lambda a, b: jnp.einsum(subscripts, a, b), (left, F32), (right, F32))
    assert sx.flops(module) == 2 * products


def by_hand(x, w, stride, pad, spread, holes, groups):
    """Multiplications of a one-dimensional convolution that meet an input, one by one."""
    length, width, total = x, w, 0
    reach = (width - 1) * holes + 1
    dilated = (length - 1) * spread + 1
    for out in range((dilated + 2 * pad - reach) // stride + 1):
        for tap in range(width):
            at = out * stride - pad + tap * holes
            total += 0 <= at < dilated and at % spread == 0
    return total


@settings(deadline=None, max_examples=30)
@given(
    length=st.integers(4, 9),
    width=st.integers(1, 4),
    stride=st.integers(1, 3),
    pad=st.integers(0, 3),
    spread=st.integers(1, 3),
    holes=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
)
def test_a_convolution_counts_what_meets_an_input(length, width, stride, pad, spread, holes, groups):
    if (length - 1) * spread + 1 + 2 * pad < (width - 1) * holes + 1:
        return
    batch, inputs, outputs = 2, 4, 6

    def convolve(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride,),
            [(pad, pad)],
            lhs_dilation=(spread,),
            rhs_dilation=(holes,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )

    module = module_of(convolve, ((batch, length, inputs), F32), ((width, inputs // groups, outputs), F32))
    touched = by_hand(length, width, stride, pad, spread, holes, groups)
    assert sx.flops(module) == 2 * batch * outputs * (inputs // groups) * touched


def test_gradients_of_a_convolution_cost_what_it_costs():
    def loss(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    shapes = ((8, 12, 12, 4), F32), ((3, 3, 4, 16), F32)
    forward = sx.flops(module_of(loss, *shapes))
    assert forward == 2 * 8 * 16 * 4 * (12 * 3 - 2) ** 2
    assert sx.flops(module_of(jax.grad(loss, argnums=1), *shapes)) == forward  # XLA drops the forward one
    assert sx.flops(module_of(jax.grad(loss, argnums=0), *shapes)) == forward


def test_loops_multiply_and_dtypes_are_told_apart():
    def step(x, w):
        x, _ = lax.scan(lambda x, _: ((x @ w).astype(BF16), None), x, None, length=6)
        return x.astype(F32) @ w.astype(F32)

    module = compiled(step, ((8, 16), BF16), ((16, 16), BF16))
    assert sum(flops_by_dtype(module).values()) == 2 * 8 * 16 * 16 * 7
    assert sx.flops(module) == 2 * 8 * 16 * 16 * 7


GEMM = """
%x = f32[8]{0} parameter(0)
%a = bf16[64,32]{1,0} broadcast(%x), dimensions={}
%b = bf16[32,16]{1,0} broadcast(%x), dimensions={}
%c = (bf16[64,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
ROOT %r = f32[8]{0} add(%x, %x)
"""


def test_library_products_count_and_custom_kernels_are_named():
    assert sx.flops(sx.parse_hlo(hlo(GEMM))) == 2 * 64 * 32 * 16
    kernel = GEMM.replace("__cublas$lt$matmul", "tpu_custom_call")
    assert sx.flops(sx.parse_hlo(hlo(kernel))) == 0
    assert opaque_calls(sx.parse_hlo(hlo(kernel))) == ("tpu_custom_call",)
    assert opaque_calls(sx.parse_hlo(hlo(GEMM.replace("__cublas$lt$matmul", "ConcatBitcast")))) == ()
    assert opaque_calls(sx.parse_hlo(hlo(GEMM))) == ()


CUDNN = """
%x = f32[8]{0} parameter(0)
%i = bf16[8,32,32,64]{3,2,1,0} broadcast(%x), dimensions={}
%k = bf16[128,3,3,64]{3,2,1,0} broadcast(%x), dimensions={}
%o = bf16[8,32,32,128]{3,2,1,0} broadcast(%x), dimensions={}
LINE, window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convKIND"
ROOT %r = f32[8]{0} add(%x, %x)
"""


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("Forward", "%c = (bf16[8,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%i, %k)"),
        ("BiasActivationForward", "%c = (bf16[8,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%i, %k, %x)"),
        ("BackwardInput", "%c = (bf16[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%o, %k)"),
        ("BackwardFilter", "%c = (bf16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%i, %o)"),
    ],
)
def test_library_convolutions_cost_the_same_each_way(kind, line):
    module = sx.parse_hlo(hlo(CUDNN.replace("LINE", line).replace("KIND", kind)))
    assert sx.flops(module) == 2 * 8 * 128 * 64 * (32 * 3 - 2) ** 2
    assert opaque_calls(module) == ()


DOT = """
%x = f32[8]{0} parameter(0)
%a = f32[4,8]{1,0} broadcast(%x), dimensions={1}
%b = f32[8,4]{1,0} broadcast(%x), dimensions={0}
%c = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
ROOT %r = f32[8]{0} add(%x, %x)
"""


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("%c = f32[4,4]", "%c = f32[4,5]", r"\(4, 8\) and \(8, 4\) cannot give \(4, 5\)"),
        ("lhs_contracting_dims={1}", "lhs_contracting_dims={2}", r"contracts dimension 2 of \(4, 8\)"),
        ("%b = f32[8,4]", "%b = f32[7,4]", "cannot give"),
    ],
)
def test_products_that_cannot_be_are_refused(was, now, message):
    assert sx.flops(sx.parse_hlo(hlo(DOT))) == 2 * 4 * 8 * 4
    with pytest.raises(HloParseError, match=message):
        sx.flops(sx.parse_hlo(hlo(DOT.replace(was, now))))


# ---- bytes to and from memory ---------------------------------------------------------------------------------------


def test_kernels_read_and_write_their_arrays():
    module = compiled(lambda x: jnp.sin(x) * 2 + 1, ((1024, 1024), F32))
    assert hbm_bytes(module) == 2 * 4 * 1024**2  # one fused kernel: read once, written once


def test_slices_and_updates_in_place_move_only_their_part():
    def step(cache, new, at):
        cache = lax.dynamic_update_slice(cache, new, (at, 0))
        return cache, lax.dynamic_slice(cache, (at, 0), (1, 128)) * 2

    args = [jax.ShapeDtypeStruct(size, F32) for size in ((4096, 128), (1, 128))]
    at = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(step, donate_argnums=0).lower(*args, at).compile().as_text()
    assert hbm_bytes(sx.parse_hlo(text)) < 20 * 128 * 4


def test_loops_move_their_bytes_every_time():
    def step(x):
        return lax.fori_loop(0, 50, lambda i, x: jnp.sin(x) + i, x)

    once = hbm_bytes(compiled(lambda x: jnp.sin(x) + 1, ((512, 512), F32)))
    assert hbm_bytes(compiled(step, ((512, 512), F32))) == pytest.approx(50 * once, rel=0.1)


# ---- time -----------------------------------------------------------------------------------------------------------


def bound(fn, *shapes):
    return estimate(compiled(fn, *shapes), sx.Ledger(()), chip("h100"))


def test_the_roofline_names_what_a_program_waits_for():
    product = bound(lambda a, b: a @ b, ((8192, 8192), F32), ((8192, 8192), F32))
    assert product.bottleneck == "compute"
    assert product.compute_seconds == pytest.approx(2 * 8192**3 / chip("h100").peak_flops["tf32"], rel=0.01)
    sweep = bound(lambda x: x * 2, ((2**14, 2**14), F32))
    assert sweep.bottleneck == "HBM"
    assert sweep.seconds == pytest.approx(2 * 4 * 2**28 / chip("h100").hbm_bandwidth, rel=0.01)
    tiny = bound(lambda x: lax.fori_loop(0, 1000, lambda i, x: jnp.sin(x) + i, x), ((8,), F32))
    assert tiny.bottleneck == "dispatch" and tiny.seconds >= 1000 * chip("h100").launch_seconds
    assert product.serial_seconds >= product.seconds
    assert "bound by compute" in str(product) and type(product).from_json(product.to_json()) == product


def test_rates_that_no_data_sheet_gives_are_those_of_the_wider_type():
    rates = chip("h100").peak_flops
    assert peak_rate(rates, "f8e4m3fn") == rates["f8"] > peak_rate(rates, "bf16")
    assert peak_rate(rates, "s8") == rates["f8"] and peak_rate(rates, "f32") == rates["tf32"]
    assert peak_rate(chip("v5p").peak_flops, "f32") == chip("v5p").peak_flops["bf16"]


def test_kernels_say_what_they_are():
    found = kernels(compiled(lambda a, b: jnp.tanh(a @ b), ((64, 32), F32), ((32, 16), F32)))
    assert sum(count for kernel in found for _, count in kernel.flops) == 2 * 64 * 32 * 16
    assert all(kernel.times == 1 for kernel in found) and np.sum([kernel.bytes for kernel in found]) > 0


# ---- what the sums leave out is said --------------------------------------------------------------------------------


def test_a_complex_multiplication_is_four_real_ones():
    module = module_of(lambda a, b: a @ b, ((8, 16), jnp.complex64), ((16, 4), jnp.complex64))
    assert sx.flops(module) == 4 * 2 * 8 * 16 * 4


def test_a_loop_that_nobody_can_count_is_named_though_nothing_travels_in_it():
    def until(x, w):
        return lax.while_loop(lambda c: c[1].sum() > 0, lambda c: (jnp.tanh(c[0] @ w), c[1] - 1), (x, x[:, 0]))

    (said,) = doubts(compiled(until, ((8, 16), F32), ((16, 16), F32)))
    assert "is counted once: its " in said and "test_flops.py:" in said
    assert doubts(compiled(lambda a, b: a @ b, ((8, 16), F32), ((16, 16), F32))) == ()


def test_branches_and_transforms_are_named():
    def step(x, w):
        y = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ (w * w) @ w)
        return jnp.fft.fft(y)

    branches, transform = doubts(compiled(step, ((8, 16), F32), ((16, 16), F32)))
    assert "every branch of a conditional is counted" in branches
    assert transform == "FLOPs are not counted inside fft"
