"""The instructions that HLO has, to tell a new one from a mangled one."""

from __future__ import annotations

from functools import lru_cache

KNOWN = frozenset(
    {
        "abs", "acos", "acosh", "add", "add-dependency", "after-all", "all-gather", "all-reduce", "all-to-all",
        "and", "asin", "asinh", "async", "atan2", "atanh", "batch-norm-grad", "batch-norm-inference",
        "batch-norm-training", "bitcast", "bitcast-convert", "broadcast", "call", "cbrt", "ceil", "cholesky",
        "clamp", "collective-broadcast", "collective-permute", "compare", "complex", "concatenate", "conditional",
        "constant", "convert", "convolution", "copy", "cosh", "cosine", "count-leading-zeros", "custom-call",
        "divide", "domain", "dot", "dynamic-reshape", "dynamic-slice", "dynamic-update-slice", "erf", "exponential",
        "exponential-minus-one", "fft", "floor", "fusion", "gather", "get-dimension-size", "get-tuple-element",
        "imag", "infeed", "iota", "is-finite", "log", "log-plus-one", "logistic", "map", "maximum", "minimum",
        "mulhi", "multiply", "negate", "not", "opt-barrier", "or", "outfeed", "pad", "parameter", "partition-id",
        "popcnt", "power", "ragged-all-to-all", "ragged-dot", "real", "recv", "reduce", "reduce-precision",
        "reduce-scatter", "reduce-window", "remainder", "replica-id", "reshape", "reverse", "rng",
        "rng-bit-generator", "rng-get-and-update-state", "round-nearest-afz", "round-nearest-even", "rsqrt",
        "scaled-dot", "scan", "scatter", "select", "select-and-scatter", "send", "set-dimension-size", "shift-left",
        "shift-right-arithmetic", "shift-right-logical", "shuffle", "sign", "sine", "sinh", "slice", "sort", "sqrt",
        "stochastic-convert", "subtract", "tan", "tanh", "topk", "transpose", "triangular-solve", "tuple", "while",
        "xor"
    }
)  # fmt: skip


# Those that name other computations.
_CALLING = frozenset(
    {
        "all-reduce", "async", "call", "conditional", "custom-call", "fusion", "map", "reduce", "reduce-scatter",
        "reduce-window", "scan", "scatter", "select-and-scatter", "sort", "topk", "while"
    }
)  # fmt: skip


@lru_cache(maxsize=1024)
def may_call(opcode: str) -> bool:
    """Can it name other computations? Of an instruction that nobody knows one cannot tell.

    >>> may_call("all-reduce-start"), may_call("add"), may_call("tupl")
    (True, False, True)
    """
    return opcode in _CALLING or opcode.rpartition("-")[0] in _CALLING or not is_known(opcode)


@lru_cache(maxsize=1024)
def is_known(opcode: str) -> bool:
    """Is it an instruction of HLO, or the start or the end of one?

    >>> is_known("all-gather-start"), is_known("tupl")
    (True, False)
    """
    if opcode in KNOWN:
        return True
    base, _, stage = opcode.rpartition("-")
    return stage in ("start", "done", "update") and base in KNOWN
