"""Traffic that an operation implies though JAX accepts it: reductions over a sharded dimension, shifted blocks; and the
collectives that a program writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardax.proving.moves import Entries, Move, local_bytes
from shardax.proving.outcomes import Laid, Outcome, Sizes, Travel, bring, joined, summed
from shardax.proving.windows import WINDOWED, halos

_SHIFTING = frozenset({"slice", "pad", "split", "rev", "select_and_scatter_add", *WINDOWED})
OWN = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "pgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_psum_scatter": "reduce-scatter",
    "unreduced_psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
"""Primitives of `jax.lax` that are a collective, and which."""


def implied(
    name: str, operands: Sequence[Laid], results: Sequence[Laid], params: Mapping[str, Any], sizes: Sizes
) -> tuple[tuple[Travel, ...], str, bool]:
    """What an accepted operation sends, why, and whether a compiler may do it otherwise."""
    if not operands or not results:
        return (), "", False
    reduced = _reduced(name, params)
    if reduced is not None:
        cut = [operands[0].entries[dim] for dim in reduced]
        axes = [axis for dim in cut for axis in dim]
        found = [travel for result in results for travel in summed(cut, result, sizes)]
        if name in ("argmax", "argmin") and found:  # a value and its place, of every device
            pair = (replace(results[0], dtype=operands[0].dtype), results[0])
            every = [travel.move for each in pair for travel in summed(cut, each, sizes)]
            found = [Travel(None, _candidates(move, sizes)) for move in every]
        return tuple(found), f"reduces a dimension that is sharded over {', '.join(axes)}" if found else "", False
    if name in _SHIFTING:
        edges = halos(name, operands, results[0], params, sizes)
        if edges is not None:
            return edges, "windows reach over the edges of a sharded dimension's blocks" if edges else "", False
        return _shifted(name, operands[0], results, params, sizes)
    if name == "dynamic_slice":
        dims = [d for d, size in enumerate(params["slice_sizes"]) if size != operands[0].shape[d]]
        kept = tuple(() if dim in dims else axes for dim, axes in enumerate(operands[0].entries))
        found = bring(0, operands[0], kept, sizes)
        return tuple(found), "slices a sharded dimension at a place known only later" if found else "", False
    return (), "", False


def _reduced(name: str, params: Mapping[str, Any]) -> Sequence[int] | None:
    if name in ("argmax", "argmin") or (name.startswith("reduce_") and "axes" in params):
        return params["axes"]
    return params["dimensions"] if name == "reduce" else None


def _candidates(move: Move, sizes: Sizes) -> Move:
    count = 1
    for axis in move.axes:
        count *= sizes[axis]
    return Move("all-gather", move.axes, move.payload_bytes * count)


def _shifted(
    name: str, operand: Laid, results: Sequence[Laid], params: Mapping[str, Any], sizes: Sizes
) -> tuple[tuple[Travel, ...], str, bool]:
    """Blocks of a sharded dimension whose length or order changes go to other devices; how, only a reversal says."""
    found: list[Travel] = []
    for result in results:
        if len(result.shape) != len(operand.shape):
            continue
        turned = params["dimensions"] if name == "rev" else ()
        axes = tuple(
            axis
            for dim, held in enumerate(operand.entries)
            for axis in held
            if sizes[axis] > 1 and (dim in turned or operand.shape[dim] != result.shape[dim])
        )
        if axes:
            found.append(Travel(None, Move("collective-permute", axes, result.bytes_on(sizes))))
    why = "the blocks of a sharded dimension change places" if found else ""
    return tuple(found), why, bool(found) and name != "rev"


def concatenated(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """Arrays put together along a dimension: whole along it, alike along the others."""
    along = params["dimension"]
    out: Entries = ((),) * len(result.shape)
    for operand in operands:
        rest = tuple(() if dim == along else axes for dim, axes in enumerate(operand.entries))
        out = joined(out, rest, result.shape, sizes)
    travels = [travel for at, operand in enumerate(operands) for travel in bring(at, operand, out, sizes)]
    why = "arrays that are put together along a sharded dimension, or lie differently" if travels else ""
    return Outcome((out,), tuple(travels), why, ambiguous=bool(travels))


def own_collective(
    name: str, operands: Sequence[Laid], results: Sequence[Laid], params: Mapping[str, Any], sizes: Sizes
) -> tuple[Travel, ...]:
    """The collective that the program asks for, over the axes it names."""
    named = params.get("axes", params.get("axis_name", ()))
    listed = named if isinstance(named, (tuple, list)) else (named,)
    axes = tuple(axis for axis in listed if isinstance(axis, str) and sizes.get(axis, 1) > 1)
    if not axes:
        return ()
    carried = results if OWN[name] == "all-gather" else operands
    if OWN[name] == "ragged-all-to-all":  # its other operands say what goes where
        carried = operands[:1]
    among = max(map(len, params.get("axis_index_groups") or ()), default=0)
    return tuple(
        Travel(at, Move(OWN[name], axes, local_bytes(each.shape, each.itemsize, each.entries, sizes), among))
        for at, each in enumerate(carried)
        if at < len(operands)
    )
