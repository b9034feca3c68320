"""Axes and mode as one value, usable as class or instance, and the ready ones for transformer parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.errors import AxisRuleError, AxisTypeError, SpecError
from shardax.names.resolving import frozen_axes
from shardax.names.tokens import (
    BATCH,
    DP,
    EMBED,
    EMPTY,
    EP,
    FSDP,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    MODE_DECODE,
    MODE_TRAIN,
    NOT_GIVEN,
    QUERY_LENGTH,
    SP,
    TP,
    Axis,
    NotGiven,
    is_generation,
)


@dataclass(frozen=True, init=False)
class DynamicShardingAxes:
    """The axes of an array and the mode to read them in. An integer mode is the dimension whose size 1 means decode.

    A subclass that sets `axes` and `mode` is usable as it stands, without an instance.

    >>> import shardax as sx
    >>> class Scores(sx.DynamicShardingAxes):
    ...     axes = [sx.BATCH, sx.HEAD, sx.QUERY_LENGTH, sx.EMPTY]
    ...     mode = 2
    >>> manager = sx.PartitionManager(sx.PartitionAxis(decode_query_sequence_axis=sx.EMPTY))
    >>> manager.resolve(Scores, shape=(8, 16, 128, 128))
    P(('fsdp', 'dp'), 'tp', 'sp', None)
    >>> manager.resolve(sx.DynamicShardingAxes(Scores.axes, 2), shape=(8, 16, 1, 128))
    P(('fsdp', 'dp'), 'tp', None, None)
    """

    axes: Sequence[Axis]
    mode: str | int

    def __init__(self, axes: Sequence[Axis] | NotGiven = NOT_GIVEN, mode: str | int | NotGiven = NOT_GIVEN) -> None:
        axes = getattr(type(self), "axes", NOT_GIVEN) if axes is NOT_GIVEN else axes
        mode = getattr(type(self), "mode", NOT_GIVEN) if mode is NOT_GIVEN else mode
        if axes is NOT_GIVEN or mode is NOT_GIVEN:
            raise AxisTypeError(f"{type(self).__name__} needs axes and a mode")
        object.__setattr__(self, "axes", frozen_axes(axes))
        object.__setattr__(self, "mode", checked_mode(mode))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "axes" in vars(cls):
            cls.axes = frozen_axes(cls.axes)
        if "mode" in vars(cls):
            cls.mode = checked_mode(cls.mode)

    def __iter__(self) -> Iterator[Any]:
        """`axes, mode = dynamic`."""
        return iter((self.axes, self.mode))


def checked_mode(mode: Any) -> str | int:
    """A mode by name, or the dimension that decides it.

    >>> checked_mode(MODE_TRAIN), checked_mode(-2)
    ('__train__', -2)
    """
    if hasattr(mode, "__index__") and not isinstance(mode, bool):
        return int(mode)
    _ = is_generation(mode)
    return mode


def mode_for(mode: Any, shape: Sequence[int] | None) -> str:
    """The mode of an array: the one named, or what the size of the deciding dimension says.

    >>> mode_for(1, (8, 1, 64)) == MODE_DECODE, mode_for(1, (8, 128, 64)) == MODE_TRAIN
    (True, True)
    """
    mode = checked_mode(mode)
    if isinstance(mode, str):
        return mode
    if shape is None:
        raise AxisRuleError(
            f"The mode is dimension {mode} of an array, so its shape should be provided",
            remedy="pass shape=x.shape, or one of MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT",
        )
    if not -len(shape) <= mode < len(shape):
        raise SpecError(f"The mode is dimension {mode}, but the shape {tuple(shape)} has {len(shape)} dimensions")
    return MODE_DECODE if shape[mode] == 1 else MODE_TRAIN


def is_dynamic(value: Any) -> bool:
    """Is this a pair of axes and mode, as class or instance (ours, or a named tuple that looks like it)?

    >>> is_dynamic(Replicated), is_dynamic(Replicated()), is_dynamic([BATCH])
    (True, True, False)
    """
    return not isinstance(value, (str, list)) and hasattr(value, "axes") and hasattr(value, "mode")


# ---- activations: the mode follows from the length -------------------------------------------------------------------


class HiddenStateSharding(DynamicShardingAxes):
    """Hidden states `(batch, length, width)`.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(HiddenStateSharding, shape=(8, 128, 64))
    P(('fsdp', 'dp'), 'sp', 'tp')
    """

    axes = (BATCH, QUERY_LENGTH, EMBED)
    mode = 1


class AttnQSharding(DynamicShardingAxes):
    """Queries `(batch, length, heads, head width)`.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(AttnQSharding, shape=(8, 128, 16, 64))
    P(('fsdp', 'dp'), 'sp', 'tp', None)
    """

    axes = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
    mode = 1


class AttnKVSharding(DynamicShardingAxes):
    """Keys and values `(batch, length, key heads, head width)`.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis(kv_head_axis=None)).resolve(AttnKVSharding, shape=(8, 128, 2, 64))
    P(('fsdp', 'dp'), 'sp', None, None)
    """

    axes = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
    mode = 1


class ExpertActivations(DynamicShardingAxes):
    """Activations per expert `(batch, length, experts, width)`.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertActivations)
    P('dp', 'sp', 'ep', 'tp')
    """

    axes = (DP, SP, EP, TP)
    mode = MODE_TRAIN


class ExpertActivationsAlt(DynamicShardingAxes):
    """Activations after routing `(batch, length, width)`.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertActivationsAlt)
    P('dp', 'sp', ('tp', 'fsdp'))
    """

    axes = (DP, SP, (TP, FSDP))
    mode = MODE_TRAIN


# ---- weights ---------------------------------------------------------------------------------------------------------


class RowWise(DynamicShardingAxes):
    """A weight whose rows are split: `(in, out)`, with `in` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(RowWise)
    P('tp', ('fsdp', 'sp'))
    """

    axes = (TP, (FSDP, SP))
    mode = MODE_TRAIN


class SRowWise(DynamicShardingAxes):
    """A vector that goes with the rows of a row-wise weight.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(SRowWise)
    P('tp',)
    """

    axes = (TP,)
    mode = MODE_TRAIN


class ColumnWise(DynamicShardingAxes):
    """A weight whose columns are split: `(in, out)`, with `out` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ColumnWise)
    P(('fsdp', 'sp'), 'tp')
    """

    axes = ((FSDP, SP), TP)
    mode = MODE_TRAIN


class SColumnWise(DynamicShardingAxes):
    """A vector that goes with the rows of a column-wise weight.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(SColumnWise)
    P(('fsdp', 'sp'),)
    """

    axes = ((FSDP, SP),)
    mode = MODE_TRAIN


class Replicated(DynamicShardingAxes):
    """A vector that every device holds whole.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(Replicated)
    P(None,)
    """

    axes = (EMPTY,)
    mode = MODE_TRAIN


class ExpertColumnWise(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with `out` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertColumnWise)
    P('ep', 'fsdp', 'tp')
    """

    axes = (EP, FSDP, TP)
    mode = MODE_TRAIN


class ExpertRowWise(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with `in` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertRowWise)
    P('ep', 'tp', 'fsdp')
    """

    axes = (EP, TP, FSDP)
    mode = MODE_TRAIN


class ExpertColumnWiseAlt(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with `in` over fsdp and sp, `out` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertColumnWiseAlt)
    P('ep', ('fsdp', 'sp'), 'tp')
    """

    axes = (EP, (FSDP, SP), TP)
    mode = MODE_TRAIN


class ExpertRowWiseAlt(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with `in` over tp, `out` over fsdp and sp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertRowWiseAlt)
    P('ep', 'tp', ('fsdp', 'sp'))
    """

    axes = (EP, TP, (FSDP, SP))
    mode = MODE_TRAIN


class UnifiedExpertColumnWise(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with experts over fsdp, sp and ep together, `out` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(UnifiedExpertColumnWise)
    P(('fsdp', 'sp', 'ep'), None, 'tp')
    """

    axes = ((FSDP, SP, EP), EMPTY, TP)
    mode = MODE_TRAIN


class UnifiedExpertRowWise(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with experts over fsdp, sp and ep together, `in` over tp.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(UnifiedExpertRowWise)
    P(('fsdp', 'sp', 'ep'), 'tp', None)
    """

    axes = ((FSDP, SP, EP), TP, EMPTY)
    mode = MODE_TRAIN


class ExpertTensorParallel(DynamicShardingAxes):
    """Expert weights `(experts, in, out)`, with experts over tp: expert and tensor parallelism on one mesh axis.

    >>> import shardax as sx
    >>> sx.PartitionManager(sx.PartitionAxis()).resolve(ExpertTensorParallel)
    P('tp', None, None)
    """

    axes = (TP, EMPTY, EMPTY)
    mode = MODE_TRAIN
