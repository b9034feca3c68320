"""Optimiser state under the layout of its parameters: by structure, never by rules of its own.

A slot belongs to the parameter whose path ends its own (or, where a parameter has several slots, stands before the
last part of it) and whose shape it has. A factored optimiser leaves dimensions out; one that keeps a history has more
of them in front. ZeRO-1 is one argument: an extra axis over every slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardax.errors import LayoutError, did_you_mean
from shardax.names.asking import read_arrays
from shardax.names.decision import Decision, itemsize_of
from shardax.names.layout import Layout
from shardax.names.paths import flatten, rebuild
from shardax.names.spec import axes_in, axes_of, entries_of, entry_of, fit_cached

UNMATCHED = "no parameter has this path and shape: replicated"


def optimizer_layout(tx_or_abstract_state: Any, params_layout: Layout, extra_axis: str | None = None) -> Layout:
    """The layout of an optimiser's state; slots that belong to no parameter are listed by `unmatched_slots`.

    Give an optax-like transformation (something with `init`) or its state, abstract or real. With `extra_axis` every
    slot is sharded over one more mesh axis (ZeRO-1), on the dimension where it divides best.

    >>> import optax, shardax as sx
    >>> params = sx.layout({"w": jax.ShapeDtypeStruct((16, 8), "float32")}, [("w", jax.P(None, "tp"))], "dp=4,tp=2")
    >>> for decision in optimizer_layout(optax.adam(1e-3), params, extra_axis="dp").decisions:
    ...     print(decision.path, decision.spec, "|", decision.rule)
    0/count P() | scalar: nothing to shard
    0/mu/w P('dp', 'tp') | as parameter 'w', and 'dp' on dim 0
    0/nu/w P('dp', 'tp') | as parameter 'w', and 'dp' on dim 0
    """
    if not isinstance(params_layout, Layout):
        raise LayoutError(
            f"params_layout is {type(params_layout).__name__}, not a Layout", remedy="sx.layout(params, rules, mesh)"
        )
    sizes = params_layout.mesh_spec.shape
    if extra_axis is not None and extra_axis not in sizes:
        close = did_you_mean(extra_axis, sizes)
        raise LayoutError(f"extra_axis {extra_axis!r} is not an axis of the mesh {params_layout.mesh_spec}{close}")
    init = getattr(tx_or_abstract_state, "init", None)
    state = jax.eval_shape(init, params_layout.abstract) if callable(init) else tx_or_abstract_state
    arrays = read_arrays(state) if flatten(state)[0] else []  # plain SGD has no state
    index = _SuffixIndex(params_layout)
    decisions = tuple(_decide_slot(*array, index, sizes, extra_axis) for array in arrays)
    return Layout(params_layout.mesh, decisions, None, rebuild(state, list(range(len(arrays)))))


def unmatched_slots(layout: Layout) -> tuple[Decision, ...]:
    """The slots of an optimiser layout that belong to no parameter.

    >>> import jax, shardax as sx
    >>> weight, table = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (100, 3)))
    >>> params = sx.layout({"w": weight}, [("w", jax.P("dp"))], "dp=2")
    >>> [slot.path for slot in unmatched_slots(optimizer_layout({"momentum": {"w": weight}, "table": table}, params))]
    ['table']
    """
    return tuple(decision for decision in layout.decisions if decision.rule == UNMATCHED)


class _SuffixIndex:
    """Parameters by path; a slot's path is cut from the front until one is left."""

    def __init__(self, params: Layout) -> None:
        self._by_path = params.by_path

    def candidates(self, path: str) -> Iterator[Decision]:
        """Parameters whose path ends the slot's path, the longest first; then those that stand before its last part."""
        for ending in (path, path.rpartition("/")[0]):
            rest: str | None = ending
            while rest:
                if rest in self._by_path:
                    yield self._by_path[rest]
                _, cut, tail = rest.partition("/")
                rest = tail if cut else None


def _decide_slot(
    path: str, shape: tuple[int, ...], dtype: str, index: _SuffixIndex, sizes: dict[str, int], extra_axis: str | None
) -> Decision:
    mesh = tuple(sizes.items())

    def decide(spec: PartitionSpec, rule: str) -> Decision:
        found = fit_cached(spec, shape, mesh, itemsize_of(dtype), True)
        return Decision(path, shape, dtype, found.spec, rule, found)

    if math.prod(shape) <= 1:
        return decide(PartitionSpec(), "scalar: nothing to shard")
    for parameter in index.candidates(path):
        spec = _spec_for(shape, parameter)
        if spec is not None:
            rule = f"as parameter {parameter.path!r}"
            if len(shape) < len(parameter.shape):
                rule += f" {list(parameter.shape)} without some dims"
            elif len(shape) > len(parameter.shape):
                rule += f" {list(parameter.shape)} behind {list(shape[: -len(parameter.shape)])}"
            if extra_axis is None:
                return decide(spec, rule)
            dim = _extra_dim(spec, shape, sizes, extra_axis)
            if dim is None:
                return decide(spec, f"{rule}; {extra_axis!r} divides no dim")
            return decide(_with_axis(spec, shape, dim, extra_axis), f"{rule}, and {extra_axis!r} on dim {dim}")
    return decide(PartitionSpec(), UNMATCHED)


def _spec_for(shape: tuple[int, ...], parameter: Decision) -> PartitionSpec | None:
    """The parameter's spec for a slot of this shape; None where the shapes do not belong together.

    A factored slot leaves dimensions out; where there are several ways to do so, it is sharded as far as they agree.
    """
    entries = list(entries_of(parameter.spec, len(parameter.shape)))
    more = len(shape) - len(parameter.shape)
    if more >= 0:
        fits = parameter.shape != () and shape[more:] == parameter.shape
        return PartitionSpec(*[None] * more, *entries) if fits and more else parameter.spec if fits else None
    ways = [
        [entries[dim] for dim in kept]
        for kept in combinations(range(len(parameter.shape)), len(shape))
        if tuple(parameter.shape[dim] for dim in kept) == shape
    ]
    if not ways:
        return None
    return PartitionSpec(*(choices[0] if len(set(choices)) == 1 else None for choices in zip(*ways, strict=True)))


def _extra_dim(spec: PartitionSpec, shape: tuple[int, ...], sizes: dict[str, int], axis: str) -> int | None:
    """The dimension that takes the extra axis: unsharded before sharded, the largest first."""
    if axis in axes_in(spec):
        return None
    options = [
        (len(axes_of(entry)), -size, dim)
        for dim, (size, entry) in enumerate(zip(shape, entries_of(spec, len(shape)), strict=True))
        if size % (math.prod(sizes[name] for name in axes_of(entry)) * sizes[axis]) == 0
    ]
    return min(options)[2] if options else None


def _with_axis(spec: PartitionSpec, shape: tuple[int, ...], dim: int, axis: str) -> PartitionSpec:
    entries = list(entries_of(spec, len(shape)))
    entries[dim] = entry_of([*axes_of(entries[dim]), axis])
    return PartitionSpec(*entries)
