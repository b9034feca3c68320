"""The words that semantic axes are written in: axis tokens, runtime modes, and "not given"."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from shardax.errors import AxisRuleError, did_you_mean

# ---- semantic axes: what a dimension means ---------------------------------------------------------------------------

BATCH: Final = "__BATCH__"
LENGTH: Final = "__LENGTH__"
QUERY_LENGTH: Final = "__QUERY_LENGTH__"
KV_LENGTH: Final = "__KV_LENGTH__"
EMBED: Final = "__EMBED__"
HEAD: Final = "__HEAD__"
KV_HEAD: Final = "__KV_HEAD__"
MLP_INTERMEDIATE: Final = "__MLP_INTERMEDIATE__"
VOCAB: Final = "__VOCAB__"
EXPERT: Final = "__EXPERT__"
EXPERT_GATE: Final = "__EXPERT_GATE__"
HEAD_DIM: Final = "__HEAD_DIM__"
KV_HEAD_DIM: Final = "__KV_HEAD_DIM__"
BIAS_HEAD_SEQ: Final = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ: Final = "__BIAS_KV_SEQ__"

EMPTY: Final = "_"
"""Replicated, in writing. In a decode field it differs from None, which means "as in training"."""

# ---- mesh tokens: what a mesh axis is for ----------------------------------------------------------------------------

DATA_PARALLEL: Final = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL: Final = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL: Final = "__TENSOR_PARALLEL__"
EXPERT_PARALLEL: Final = "__EXPERT_PARALLEL__"
SEQUENCE_PARALLEL: Final = "__SEQUENCE_PARALLEL__"

DP: Final = DATA_PARALLEL
FSDP: Final = FULLY_SHARDED_DATA_PARALLEL
TP: Final = TENSOR_PARALLEL
EP: Final = EXPERT_PARALLEL
SP: Final = SEQUENCE_PARALLEL

# ---- modes: what the program is doing --------------------------------------------------------------------------------

MODE_TRAIN: Final = "__train__"
MODE_PREFILL: Final = "__prefill__"
MODE_DECODE: Final = "__autoregressive__"
MODE_INSERT: Final = "__insert__"

GENERATION_MODES: Final = frozenset({MODE_DECODE, MODE_INSERT})
"""The modes in which the decode fields of a PartitionAxis apply."""

MODES: Final = {
    MODE_TRAIN: "MODE_TRAIN",
    MODE_PREFILL: "MODE_PREFILL",
    MODE_DECODE: "MODE_DECODE",
    MODE_INSERT: "MODE_INSERT",
}
"""Every mode, with the name it is written by."""


def is_generation(mode: Any) -> bool:
    """Do the decode fields apply? Anything that is not a mode is an error.

    >>> is_generation(MODE_DECODE), is_generation(MODE_PREFILL)
    (True, False)
    """
    if isinstance(mode, str) and mode in MODES:
        return mode in GENERATION_MODES
    names = list(MODES.values())
    if isinstance(mode, str):
        raise AxisRuleError(f"Unknown mode {mode!r}{did_you_mean(mode, names)}", remedy=f"modes: {', '.join(names)}")
    raise AxisRuleError(
        f"A mode is one of {', '.join(names)}, not {mode!r}",
        remedy="an integer mode (the dimension whose size 1 means decode) needs a shape: PartitionManager.resolve(...)",
    )


# ---- not given -------------------------------------------------------------------------------------------------------


class NotGiven(Enum):
    """The type of `NOT_GIVEN`. An enum, because its members stay single through pickling and copying."""

    NOT_GIVEN = "NOT_GIVEN"

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __bool__(self) -> Literal[False]:
        return False


NOT_GIVEN: Final = NotGiven.NOT_GIVEN
"""No argument: derive it. Distinct from None, which means replicated (or, in a decode field, "as in training")."""

Axis: TypeAlias = "str | Sequence[Axis] | None"
"""A semantic axis, a mesh axis, None, or several of them over one dimension."""

MeshAxes: TypeAlias = "str | tuple[str, ...] | None"
"""What a dimension is laid over: one mesh axis, several (major to minor), or none."""
