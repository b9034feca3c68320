"""`gather`, `scatter` and `dynamic_update_slice` under layouts.

JAX's own types refuse most of these; the partitioner does them without traffic where rows are looked up by sharded
indices, and by masking where the table is sharded over its rows: every device looks up what it has, partial results
are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from shardax.proving.moves import Entries, used, without
from shardax.proving.outcomes import Laid, Outcome, Sizes, bring, joined, summed

SUMMABLE = frozenset({"scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "scatter-mul"})


def gather(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """Rows looked up in a table."""
    table, indices = operands[0], operands[1]
    numbers = params["dimension_numbers"]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    looked_up = set(numbers.collapsed_slice_dims) & set(numbers.start_index_map)
    cut = {
        dim
        for dim, size in enumerate(params["slice_sizes"])
        if dim not in looked_up and dim not in paired and size != table.shape[dim]
    }
    rows = (*indices.entries[:-1], ())  # the last dimension holds the coordinates
    for dim, at in paired.items():
        rows = (*rows[:at], rows[at] or _unused(table.entries[dim], rows), *rows[at + 1 :])
    taken = set(used(rows))
    lost = {axis for dim in cut for axis in table.entries[dim]}
    lost |= {axis for dim, axes in enumerate(table.entries) if dim not in paired for axis in axes if axis in taken}
    kept = without(table.entries, lost)
    travels = [*bring(0, table, kept, sizes), *bring(1, indices, rows, sizes)]
    windows = iter(
        kept[dim] for dim in range(len(table.shape)) if dim not in numbers.collapsed_slice_dims and dim not in paired
    )
    places = iter(rows[:-1])
    out = tuple(next(windows) if dim in numbers.offset_dims else next(places) for dim in range(len(result.shape)))
    masked = [axis for dim in sorted(looked_up) for axis in kept[dim]]
    summing = summed([masked], Laid(result.shape, result.dtype, out), sizes)
    why = "rows are looked up in a dimension that is sharded" if masked or lost else "indices lie differently"
    shared = [axis for axis in used(table.entries) if axis in taken and axis in lost]
    if shared:
        why = f"table and indices both use {', '.join(shared)}: the rows could lie as either does"
    return Outcome((out,), (*travels, *summing), why, ambiguous=bool(travels))


def _unused(axes: tuple[str, ...], rows: Entries) -> tuple[str, ...]:
    taken = set(used(rows))
    return () if taken & set(axes) else axes


def scatter(name: str, operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """Rows written into, or added to, a table: the reverse of a gather."""
    table, indices, updates = operands[0], operands[1], operands[2]
    numbers = params["dimension_numbers"]
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [dim for dim in range(len(table.shape)) if dim not in inserted]
    windows = dict(zip(kept, numbers.update_window_dims, strict=True))
    rows = [dim for dim in range(len(updates.shape)) if dim not in set(numbers.update_window_dims)]
    at_indices = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    paired = {dim: rows[at] for dim, at in at_indices.items()}
    alike = {dim: at for dim, at in (windows | paired).items() if updates.shape[at] == table.shape[dim]}
    lent = tuple(updates.entries[alike[dim]] if dim in alike else () for dim in range(len(table.shape)))
    out = joined(table.entries, lent, table.shape, sizes)
    lent = tuple(indices.entries[at_indices[dim]] if dim in at_indices else () for dim in range(len(table.shape)))
    out = joined(out, lent, table.shape, sizes)
    summable = name in SUMMABLE
    wanted = _rows_that_sum(updates, rows, set(used(out)) if summable else set(sizes))
    wanted |= dict.fromkeys(windows.values(), ()) | {at: out[dim] for dim, at in alike.items()}
    updated = tuple(wanted[at] for at in range(len(updates.shape)))
    looked = _rows_that_sum(indices, range(len(indices.shape) - 1), set(used(out)) if summable else set(sizes))
    looked |= {at: out[dim] for dim, at in at_indices.items()}
    placed = tuple(looked.get(at, ()) for at in range(len(indices.shape)))
    travels = [*bring(1, indices, placed, sizes), *bring(2, updates, updated, sizes)]
    partial = [axis for at in rows if at not in paired.values() for axis in updated[at]]
    partial += [axis for axis in used(placed) if axis not in partial and axis not in used(out)]
    summing = summed([partial], Laid(result.shape, result.dtype, out), sizes)
    why = "rows that are written are sharded" if travels or summing else ""
    return Outcome((out,), (*travels, *summing), why, ambiguous=bool(travels))


def _rows_that_sum(laid: Laid, rows: Iterable[int], taken: Collection[str]) -> dict[int, tuple[str, ...]]:
    """Rows may stay apart, to be summed afterwards, over axes that the table does not use."""
    return {at: tuple(axis for axis in laid.entries[at] if axis not in taken) for at in rows}


def dynamic_update_slice(operands: Sequence[Laid], result: Laid, params: Mapping[str, Any], sizes: Sizes) -> Outcome:
    """A part is written over: it must lie as the whole does, and be everywhere along a dimension it is a part of."""
    del result, params
    whole, part = operands[0], operands[1]
    equal = [size == other for size, other in zip(whole.shape, part.shape, strict=True)]
    lent = tuple(axes if same else () for axes, same in zip(part.entries, equal, strict=True))
    out = joined(whole.entries, lent, whole.shape, sizes)
    wanted = tuple(axes if same else () for axes, same in zip(out, equal, strict=True))
    travels = bring(1, part, wanted, sizes)
    why = "what is written lies differently than what it is written into" if travels else ""
    return Outcome((out,), tuple(travels), why, ambiguous=bool(travels))
