"""`gather`: a tree of arrays, on any mesh, to host memory, as a stream.

Blocks are copied one after another into the host array that they belong to, a window ahead. No device ever holds more
than it already has (many processes: a small buffer on one device each), nothing is compiled for a leaf, and no host
copy stays cached on the arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from shardax.arrays.exchange import exchange
from shardax.errors import LeafError, Offence, PlacementError, plural
from shardax.names.paths import flatten, rebuild

AHEAD_BYTES = 64 << 20
"""So many bytes are on their way to the host before the first of them is used (one array at least)."""

DELETED = "was deleted: it has been donated"

Index = tuple[slice, ...]


def gather(tree: Any) -> Any:
    """Every array of a tree as one whole NumPy array, on every process; what is no jax.Array stays as it is.

    With several processes all must call it, with the same tree. A PRNG key array has no NumPy form: it comes back as
    a key array on one local device.

    >>> import shardax as sx
    >>> tree = {"w": np.arange(8.0)}
    >>> gather(sx.put(tree, sx.layout(tree, {"w": jax.P("dp")}, sx.make_mesh("dp=8"))))
    {'w': array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)}
    """
    paths, leaves = flatten(tree)
    return rebuild(tree, to_host(leaves, paths))


def to_host(leaves: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """The leaves with every jax.Array as a NumPy array (a key array as a local one)."""
    found = list(leaves)
    _check_held(paths, found)
    keys = {place: jax.random.key_impl(leaf) for place, leaf in enumerate(found) if is_key(leaf)}
    for place in keys:
        found[place] = jax.random.key_data(found[place])
    here, away = _by_reach(found)
    _check_reachable([paths[place] for place in away], [found[place] for place in away])
    # The processes meet first: one that fails over its own leaves must not leave the others waiting.
    whole = dict(zip(away, exchange([found[place] for place in away]) if away else (), strict=True))
    whole.update(zip(here, _stream([found[place] for place in here]), strict=True))
    for place, value in whole.items():
        found[place] = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=keys[place]) if place in keys else value
    return found


def _by_reach(leaves: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The places of the arrays that this process holds whole, and of those it does not."""
    here: list[int] = []
    away: list[int] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            (away if _held(leaf.sharding, leaf.shape) is None else here).append(place)
    return here, away


def is_key(leaf: Any) -> bool:
    """Is this a PRNG key array, which has no NumPy form?"""
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _check_held(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """The arrays among the leaves have values: they are not part of a program, and not given up."""
    problems: list[Offence] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tracer):
            problems.append(
                Offence(path, "is traced: it has no value yet", leaf.shape, remedy="gather what is returned")
            )
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            problems.append(Offence(path, DELETED, leaf.shape))
    if problems:
        raise LeafError(f"{plural(len(problems), 'leaf has', 'leaves have')} no values to copy to the host", problems)


def _check_reachable(paths: Sequence[str], arrays: Sequence[jax.Array]) -> None:
    everyone = set(range(jax.process_count()))
    problems = [
        Offence(path, f"lives on processes {sorted(present)} of {len(everyone)}", shape=array.shape)
        for path, array in zip(paths, arrays, strict=True)
        for present in [{device.process_index for device in array.sharding.device_set}]
        if present != everyone
    ]
    if problems:
        raise PlacementError(
            f"process {jax.process_index()} cannot gather arrays of which other processes know nothing",
            problems,
            "gather them on a mesh that spans all processes, or on the processes that hold them whole",
        )


# ---- the stream -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _held(sharding: Sharding, shape: tuple[int, ...]) -> tuple[tuple[int, Index], ...] | None:
    """Which local shards, each with its place, make up the whole array; None where this process lacks some of it."""
    places = [_bounds(index, shape) for index in sharding.devices_indices_map(shape).values()]
    mine: dict[Any, tuple[int, Index]] = {}
    for number, index in enumerate(sharding.addressable_devices_indices_map(shape).values()):
        if index is not None:
            mine.setdefault(_bounds(index, shape), (number, index))
    return tuple(mine.values()) if set(places) == set(mine) else None


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _stream(arrays: Sequence[jax.Array]) -> Iterator[np.ndarray[Any, Any]]:
    started: deque[tuple[jax.Array, list[jax.Array]]] = deque()
    ahead = 0
    for array in arrays:
        blocks = _blocks(array)
        started.append((array, blocks))
        ahead += array.nbytes
        while ahead > AHEAD_BYTES and len(started) > 1:
            ahead -= started[0][0].nbytes
            yield _assemble(*started.popleft())
    while started:
        yield _assemble(*started.popleft())


def _blocks(array: jax.Array) -> list[jax.Array]:
    """One single-device array for every distinct block, on its way to the host."""
    blocks = [array.addressable_data(number) for number, _ in _held(array.sharding, array.shape) or ()]
    if next(iter(array.sharding.addressable_devices)).platform == "cpu":  # its copies are views
        return blocks
    alone = [_alone(block) for block in blocks]  # each its own object: what is copied is cached on the object
    for block in alone:
        block.copy_to_host_async()
    return alone


def _alone(data: jax.Array) -> jax.Array:
    return jax.make_array_from_single_device_arrays(data.shape, SingleDeviceSharding(*data.devices()), [data])


def _assemble(array: jax.Array, blocks: Sequence[jax.Array]) -> np.ndarray[Any, Any]:
    if len(blocks) == 1:
        return np.asarray(blocks[0])
    whole = np.empty(array.shape, array.dtype)
    for (_, index), block in zip(_held(array.sharding, array.shape) or (), blocks, strict=True):
        whole[index] = np.asarray(block)
    return whole
