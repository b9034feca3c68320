"""Convolutions, pooling and slices along a sharded dimension: which rows of the neighbours' blocks a device needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.proving.moves import Move
from shardax.proving.outcomes import Laid, Sizes, Travel, shards

WINDOWED = frozenset(
    {"conv_general_dilated", "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}
)


@dataclass(frozen=True, slots=True)
class _Window:
    """How a window goes along one dimension; `reach` is its last position, seen from its first."""

    reach: int = 0
    stride: int = 1
    low: int = 0

    def edges(self, block: int, outputs: int) -> tuple[int, int] | None:
        """Rows needed of the block before and after; None where that differs from device to device, or is too far.

        >>> _Window(reach=2, low=1).edges(8, 8), _Window(reach=2, stride=2).edges(8, 4), _Window().edges(8, 4)
        ((1, 1), (0, 1), None)
        """
        before, after = max(self.low, 0), max(self.reach - self.low - self.stride + 1, 0)
        if block != outputs * self.stride or max(before, after) > block:
            return None
        return before, after


def halos(
    name: str, operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes
) -> tuple[Travel, ...] | None:
    """One permute for every edge that windows reach over; None for what is no window, or is not done so."""
    windows = _windows(name, operands, params)
    if windows is None:
        return None
    operand, found = operands[0], list[Travel]()
    held = operand.bytes_on(sizes)
    for dim, (window, outputs) in windows.items():
        axes = tuple(axis for axis in operand.entries[dim] if sizes[axis] > 1)
        if not axes:
            continue
        count = shards((axes,), sizes)
        size, made = operand.shape[dim], result.shape[outputs]
        if size % count or made % count:
            return None
        edges = window.edges(size // count, made // count)
        if edges is None:
            return None
        row = held // (size // count)
        found += [Travel(None, Move("collective-permute", axes, rows * row)) for rows in edges if rows]
        held += row * sum(edges)  # the next dimension's edges have corners
    return tuple(found)


def _windows(name: str, operands: Sequence[Laid], params: Mapping[str, Any]) -> dict[int, tuple[_Window, int]] | None:
    """For every dimension of the operand its window, and the dimension of the result that it makes."""
    if name == "conv_general_dilated":
        return _of_convolution(operands[1], params)
    if name == "slice":
        strides = params["strides"] or (1,) * len(operands[0].shape)
        starts = params["start_indices"]
        return {dim: (_Window(0, stride, -starts[dim]), dim) for dim, stride in enumerate(strides)}
    if name not in WINDOWED or any(each != 1 for each in params["base_dilation"]):
        return None
    facts = zip(
        params["window_dimensions"], params["window_dilation"], params["window_strides"], params["padding"], strict=True
    )
    return {
        dim: (_Window((size - 1) * apart, stride, low), dim)
        for dim, (size, apart, stride, (low, _)) in enumerate(facts)
    }


def _of_convolution(kernel: Laid, params: Mapping[str, Any]) -> dict[int, tuple[_Window, int]] | None:
    numbers = params["dimension_numbers"]
    dims = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    if any(each != 1 for each in params["lhs_dilation"]) or any(kernel.entries[dim] for dim in dims[1]):
        return None
    facts = zip(*dims, params["rhs_dilation"], params["window_strides"], params["padding"], strict=True)
    return {
        left: (_Window((kernel.shape[taps] - 1) * apart, stride, low), out)
        for left, taps, out, apart, stride, (low, _) in facts
    }
