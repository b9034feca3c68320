"""What is wrong with the values of a call, said of the caller's arguments and not of the flat list that JAX was given.

Nothing is asked before a call: JAX refuses bad values itself, before anything runs. Only then are they looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer

from shardax._compat import is_live, trace_of
from shardax.errors import (
    ArgumentError,
    DeviceMismatchError,
    DonationError,
    ForeignTraceError,
    NonArrayStateError,
    Offence,
    StateShardingError,
)

Named = Iterable[tuple[str, Any]]


def explain(error: Exception, inputs: Named, given: Named) -> None:
    """Raise a better error if what went into a call explains `error`: no arrays, devices that do not meet, donation."""
    inputs, given, text = list(inputs), list(given), str(error)
    refuse_non_arrays(inputs, error)
    _refuse_odd_arguments(given, error)
    if "pjit out_shardings" in text:
        what = re.sub(r"pjit (out_shardings)\[0\]", r"\1", text)
        raise StateShardingError(f"out_shardings do not match the result: {what}") from error
    if "incompatible devices" in text:
        _refuse_scattered([*inputs, *given], error)
    if "deleted" in text or "donate" in text:
        _refuse_donated([*inputs, *given], error)


def refuse_non_arrays(cells: Named, cause: Exception | None = None) -> None:
    """Refuse cells that hold something else than arrays."""
    offences = _non_arrays(cells)
    if offences:
        raise NonArrayStateError(
            "cells hold what no compiled function takes",
            offences,
            "cells hold arrays or trees of arrays; what is fixed belongs in metadata or in a plain attribute",
        ) from cause


def _refuse_odd_arguments(given: Named, cause: Exception) -> None:
    offences = _non_arrays(given)
    if offences:
        remedy = "pass arrays or numbers; what is fixed is static (static_argnames), or closed over"
        raise ArgumentError("these arguments are nothing that JAX traces", offences, remedy) from cause


def _non_arrays(values: Named) -> list[Offence]:
    return [
        Offence(path, f"{leaf!r} ({type(leaf).__name__}) is no array")
        for path, leaf in _leaves(values)
        if not isinstance(leaf, jax.Array) and not is_array(leaf)
    ]


def _leaves(values: Named) -> Iterator[tuple[str, Any]]:
    for path, value in values:
        for below, leaf in jax.tree_util.tree_leaves_with_path(value):
            yield path + jax.tree_util.keystr(below), leaf


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
    for path, leaf in _leaves(values):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
            ids = tuple(sorted(device.id for device in leaf.sharding.device_set))
            problem = f"on device{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
            places.setdefault(ids, []).append(Offence(path, problem, leaf.shape))
    most = max(places.values(), key=len, default=[])
    odd = [offence for offences in places.values() if offences is not most for offence in offences]
    count = sum(map(len, places.values()))
    raise DeviceMismatchError(
        f"Received incompatible devices: {len(odd)} of {count} arrays are not where the rest is",
        [*odd, *most[:1]],
        "put them on one mesh (shardax.put, jax.device_put), or let in_shardings place them",
    ) from cause


def _refuse_donated(values: Named, cause: Exception) -> None:
    """Say which arrays were given away before, and which stand in two places of this call."""
    arrays = [(path, leaf) for path, leaf in _leaves(values) if isinstance(leaf, jax.Array)]
    arrays = [(path, leaf) for path, leaf in arrays if not isinstance(leaf, Tracer)]
    gone = [Offence(path, "was donated to an earlier call", leaf.shape) for path, leaf in arrays if leaf.is_deleted()]
    if gone:
        remedy = "read a State only through its cell; keep a copy (jnp.copy) of what a donating call was given"
        raise DonationError("the buffers of these arrays are gone", gone, remedy) from cause
    first: dict[int, str] = {}
    twice = [
        Offence(f"{first[id(leaf)]} and {path}", "are one array", leaf.shape)
        for path, leaf in arrays
        if first.setdefault(id(leaf), path) is not path
    ]
    if twice:
        raise DonationError(
            "an array is donated and passed once more in the same call", twice, "give one of the two a copy (jnp.copy)"
        ) from cause
