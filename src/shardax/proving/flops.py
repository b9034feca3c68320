"""FLOPs of a compiled step on one device: matrix products and convolutions, times the loops around them.

The compiler's own count takes every loop body once, so it is not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardax.errors import HloParseError, Offence, plural
from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.integrity import consistent
from shardax.proving.shapes import ArrayShape, arrays
from shardax.proving.walk import walk

_LIBRARY_MATMUL = re.compile(r'custom_call_target="__(?:cublas\$[\w$]*(?:gemm|matmul)[\w$]*|onednn\$matmul)"', re.I)
# Which of operands and result are a convolution's input, kernel and output; its labels are always the forward one's.
_LIBRARY_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(BackwardInput|BackwardFilter|\w*Forward\w*)"')
_ROLES = {"BackwardInput": ("result", 1, 0), "BackwardFilter": (0, "result", 1)}
_FORWARD = (0, 1, "result")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ension(?:s)?":\[)([\d",]*)[\]}]')
_SIZES = ("size", "stride", "lhs_dilate", "rhs_dilate")
# Instructions that backends compute in ways of their own: none is counted, all are named.
_UNCOUNTED = frozenset({"fft", "cholesky", "triangular-solve"})
# Custom calls that compute nothing worth counting.
_PLUMBING = re.compile(
    r"AllocateBuffer|AssumeGatherIndicesInBound|GatherScatterIndices\w*|SliceId|PrepareAsync\w*|AsyncCollective\w*|"
    r"Sharding|SPMD\w*|TODO\(.*|MoveTo\w+|annotate_device_placement|LayoutConstraint|xla\.sdy\..*|TopK|ResizeFilter\w*|"
    r"X64\w+|PartialReduce|ApproxTopK|NaiveTopK|BufferCopy|Pin|Unpin|CreateBuffer|nop.*|xla_\w*callback\w*|__gpu\$TopK|ConcatBitcast"
)


def is_product(instruction: Instruction) -> bool:
    """A matrix product, a convolution, or a library's version of one."""
    opcode = instruction.opcode
    if opcode in _COUNTS:
        return True
    return opcode == "custom-call" and bool(
        _LIBRARY_MATMUL.search(instruction.tail) or _LIBRARY_CONVOLUTION.search(instruction.tail)
    )


def flops(module: HloModule) -> int:
    """What the products and convolutions of a compiled step compute on one device, loops multiplied.

    >>> import jax, jax.numpy as jnp
    >>> from shardax.proving.hlo import parse_hlo
    >>> product = jax.jit(jnp.matmul).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
    >>> flops(parse_hlo(product.as_text()))
    1024
    """
    return sum(flops_by_dtype(module).values())


def flops_by_dtype(module: HloModule) -> dict[str, int]:
    """The same by the element type of the first operand, which decides how fast a chip is.

    >>> import jax, jax.numpy as jnp
    >>> from shardax.proving.hlo import parse_hlo
    >>> product = jax.jit(jnp.matmul).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
    >>> flops_by_dtype(parse_hlo(product.as_text()))
    {'f32': 1024}
    """
    counted: dict[str, int] = {}
    with consistent(module.name):
        for execution in walk(module, is_product):
            for instruction in filter(is_product, execution.computation.instructions):
                dtype, count = product_flops(execution.computation, instruction)
                counted[dtype] = counted.get(dtype, 0) + count * execution.times
    return counted


def opaque_calls(module: HloModule) -> tuple[str, ...]:
    """Custom kernels (Pallas, Triton, fused attention) whose FLOPs nobody outside them can see; and Fourier transforms
    and triangular solves, which are not counted."""
    lines = [line for computation in module.computations.values() for line in computation.instructions]
    targets = {
        match[1]
        for line in lines
        if line.opcode.startswith("custom-call") and not is_product(line) and (match := _TARGET.search(line.tail))
    }
    uncounted = {line.opcode for line in lines if line.opcode in _UNCOUNTED}
    return tuple(sorted(uncounted | {target for target in targets if not _PLUMBING.fullmatch(target)}))


def doubts(module: HloModule) -> tuple[str, ...]:
    """What the sums of a program's work leave out, or take too often, in words."""
    with consistent(module.name):
        loops = walk(module, lambda _: True, into_fusions=False).notes
        within = [execution for execution in walk(module, is_product) if execution.conditional]
    more = f" (and {plural(len(loops) - 1, 'other loop')})" if len(loops) > 1 else ""
    found = [f"work and time of a loop without a known length: {loops[0]}{more}"] if loops else []
    if any(is_product(line) for execution in within for line in execution.computation.instructions):
        found.append("work: every branch of a conditional is counted, of which at most one runs each time")
    opaque = opaque_calls(module)
    if opaque:
        found.append(f"FLOPs are not counted inside {', '.join(opaque)}")
    return tuple(found)


def product_flops(computation: Computation, instruction: Instruction) -> tuple[str, int]:
    """Element type and FLOPs of one execution of a product; a complex multiplication is four real ones."""
    count = _COUNTS.get(instruction.opcode) or (_convolution if "$conv" in instruction.tail else _dot)
    dtype = arrays(computation.shape(instruction.operands[0]))[0].dtype
    return dtype, count(computation, instruction) * (4 if dtype.startswith("c") else 1)


def _array(computation: Computation, instruction: Instruction, operand: int) -> ArrayShape:
    return arrays(computation.shape(instruction.operands[operand]))[0]


def _dot(computation: Computation, instruction: Instruction) -> int:
    left, right = (_array(computation, instruction, place) for place in (0, 1))
    out = arrays(instruction.shape)[0]
    match = _CONTRACTED.search(instruction.tail)
    chosen = [int(dim) for dim in re.findall(r"\d+", match[1])] if match else []
    if any(dim >= len(left.dims) for dim in chosen):
        _refuse(instruction, f"contracts dimension {max(chosen)} of {left.dims}")
    contracted = math.prod(left.dims[dim] for dim in chosen)
    if instruction.opcode == "dot" and not _fits(left, right, out, contracted, instruction):
        _refuse(instruction, f"{left.dims} and {right.dims} cannot give {out.dims}")
    return 2 * out.size * contracted


def _fits(left: ArrayShape, right: ArrayShape, out: ArrayShape, contracted: int, instruction: Instruction) -> bool:
    match = re.search(r"lhs_batch_dims=\{([\d,]*)\}", instruction.tail)
    batch = math.prod(left.dims[int(dim)] for dim in match[1].split(",") if dim) if match else 1
    if not contracted * batch:
        return True
    return left.size * right.size == out.size * contracted * contracted * batch


def _refuse(instruction: Instruction, problem: str) -> None:
    raise HloParseError("HLO text that cannot be read", [Offence(f"%{instruction.name}", problem)])


@dataclass(frozen=True, slots=True)
class _Window:
    """One spatial dimension of a convolution."""

    size: int = 1
    stride: int = 1
    pad: int = 0
    pad_high: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1

    def outputs(self, inputs: int) -> int:
        """How many positions the window has."""
        spread = (inputs - 1) * self.lhs_dilate + 1 if inputs else 0
        reach = (self.size - 1) * self.rhs_dilate + 1
        return max(0, (spread + self.pad + self.pad_high - reach) // self.stride + 1)

    def touched(self, inputs: int, outputs: int) -> int:
        """Pairs of output and window positions that meet an input and not padding or a dilation's hole.

        >>> _Window(size=3, pad=1).touched(4, 4)
        10
        """
        starts = np.arange(outputs) * self.stride - self.pad
        total = 0
        for offset in range(0, self.size * self.rhs_dilate, self.rhs_dilate):
            at = starts + offset
            total += int(((at >= 0) & (at % self.lhs_dilate == 0) & (at < inputs * self.lhs_dilate)).sum())
        return total


def _windows(instruction: Instruction, rank: int) -> list[_Window]:
    match = re.search(r"window=\{([^}]*)\}", instruction.tail)
    fields = dict(re.findall(r"(\w+)=(\S+)", match[1])) if match else {}
    pads = [part.split("_") for part in fields.pop("pad", "").split("x") if part]
    values = {key: [int(part) for part in text.split("x")] for key, text in fields.items() if key in _SIZES}
    if pads:
        values |= {"pad": [int(low) for low, _ in pads], "pad_high": [int(high) for _, high in pads]}
    return [_Window(**{key: parts[place] for key, parts in values.items()}) for place in range(rank)]


def _group_count(instruction: Instruction, kind: str) -> int:
    return int(instruction.attribute(f"{kind}_group_count") or 1)


def _parts(computation: Computation, instruction: Instruction) -> list[tuple[int, ...]]:
    """Dimensions of input, kernel and output."""
    library = _LIBRARY_CONVOLUTION.search(instruction.tail) if instruction.opcode == "custom-call" else None
    roles = _ROLES.get(library[1], _FORWARD) if library else _FORWARD
    return [
        arrays(instruction.shape)[0].dims if isinstance(role, str) else _array(computation, instruction, role).dims
        for role in roles
    ]


def _convolution(computation: Computation, instruction: Instruction) -> int:
    match = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.tail)
    if not match:
        _refuse(instruction, "a convolution without dim_labels")
        return 0
    left, kernel, result = match.groups()
    inputs, weights, outputs = _parts(computation, instruction)
    if (len(left), len(kernel), len(result)) != (len(inputs), len(weights), len(outputs)):
        _refuse(instruction, f"dim_labels={match[0]} for {inputs}, {weights}, {outputs}")
    features, batches = _group_count(instruction, "feature"), _group_count(instruction, "batch")
    agree = (
        inputs[left.index("f")] == weights[kernel.index("i")] * features,
        outputs[result.index("f")] == weights[kernel.index("o")],
        inputs[left.index("b")] == outputs[result.index("b")] * batches,
    )
    if not all(agree):
        _refuse(instruction, f"{inputs} and {weights} cannot give {outputs} ({match[0]})")
    spatial = sorted(label for label in result if label.isdigit())
    touched = 1
    for label, window in zip(spatial, _windows(instruction, len(spatial)), strict=True):
        given, made = inputs[left.index(label)], outputs[result.index(label)]
        if window.size != weights[kernel.index(label)] or made != window.outputs(given):
            _refuse(instruction, f"a window of {window.size} over {given} cannot give {made}")
        touched *= window.touched(given, made)
    return 2 * outputs[result.index("b")] * outputs[result.index("f")] * weights[kernel.index("i")] * touched


_COUNTS: dict[str, Callable[[Computation, Instruction], int]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _dot,
    "convolution": _convolution,
}
