"""What is wrong with the values of a call, said of the caller's arguments and not of the flat list that JAX was given.

Nothing is asked before a call: JAX refuses bad values itself, before anything runs. Only then are they looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from shardax._compat import is_live, trace_of
from shardax.errors import DeviceMismatchError, ForeignTraceError, NonArrayStateError, Offence

Named = Iterable[tuple[str, Any]]


def explain(error: Exception, inputs: Named, given: Named) -> None:
    """Raise a better error if the inputs of a call explain `error`: no arrays, or devices that do not meet."""
    inputs = list(inputs)
    refuse_non_arrays(inputs, error)
    if "incompatible devices" in str(error):
        _refuse_scattered([*inputs, *given], error)


def refuse_non_arrays(cells: Named, cause: Exception | None = None) -> None:
    """Refuse cells that hold something else than arrays."""
    offences: list[Offence] = []
    for path, value in cells:
        for below, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if not isinstance(leaf, jax.Array) and not is_array(leaf):
                where = path + jax.tree_util.keystr(below)
                offences.append(Offence(where, f"{leaf!r} ({type(leaf).__name__}) is no array"))
    if offences:
        raise NonArrayStateError(
            "cells hold what no compiled function takes",
            offences,
            "cells hold arrays or trees of arrays; what is fixed belongs in metadata or in a plain attribute",
        ) from cause


def refuse_leaked(cells: Named) -> None:
    """Refuse cells that were left holding a tracer of a transformation inside, which is over."""
    offences = [
        Offence(path, f"was written under {type(trace_of(leaf)).__name__}")
        for path, value in cells
        for leaf in jax.tree.leaves(value)
        if isinstance(leaf, Tracer) and not is_live(leaf)
    ]
    if offences:
        raise ForeignTraceError(
            "cells are written under a jax transformation inside that does not know them",
            offences,
            "inside scan, cond, grad or vmap, return the value and write it after, or use the framework's transforms",
        )


def is_array(value: Any) -> bool:
    """Can a compiled function take it?"""
    try:
        jax.typeof(value)
    except TypeError:
        return False
    return True


def _refuse_scattered(values: Sequence[tuple[str, Any]], cause: Exception) -> None:
    """Say which committed arrays are on which devices."""
    places: dict[tuple[int, ...], list[Offence]] = {}
    for path, value in values:
        for below, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
                ids = tuple(sorted(device.id for device in leaf.sharding.device_set))
                problem = f"on device{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
                places.setdefault(ids, []).append(Offence(path + jax.tree_util.keystr(below), problem, leaf.shape))
    most = max(places.values(), key=len, default=[])
    odd = [offence for offences in places.values() if offences is not most for offence in offences]
    count = sum(map(len, places.values()))
    raise DeviceMismatchError(
        f"Received incompatible devices: {len(odd)} of {count} arrays are not where the rest is",
        [*odd, *most[:1]],
        "put them on one mesh (shardax.put, jax.device_put), or let in_shardings place them",
    ) from cause
