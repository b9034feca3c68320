"""From the rows that a process holds to one global `jax.Array`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from numpy.typing import NDArray

from shardax.data.split import RowSplit, row_split, show_rows
from shardax.errors import FeedError, Offence, SplitError
from shardax.names.spec import axes_of, entries_of


def place_rows(local: NDArray[Any], rows: NDArray[np.int64], sharding: Sharding, shape: Sequence[int]) -> jax.Array:
    """The global array of `shape` of which this process holds `rows`, whole, in order; each device gets its block.

    The rows are sorted, so what a device needs of them lies together: one slice, no copy before the transfer.

    >>> device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> place_rows(np.arange(6.0).reshape(3, 2), np.arange(3), device, (3, 2)).shape
    (3, 2)
    """
    first = int(rows[0]) if len(rows) else 0
    together = len(rows) == 0 or int(rows[-1]) - first + 1 == len(rows)

    def block(index: Any) -> NDArray[Any]:
        start, stop, _ = index[0].indices(shape[0])
        begin = start - first if together else int(np.searchsorted(rows, start))
        return local[(slice(begin, begin + stop - start), *index[1:])]

    return jax.make_array_from_callback(tuple(shape), sharding, block, dtype=device_dtype(local.dtype))


def device_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype that an array gets on a device: 64 bits become 32 unless JAX is told otherwise."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def check_range(path: str, local: NDArray[Any]) -> None:
    """Whole numbers of 64 bits must fit the 32 that JAX gives them: it would keep their lower half without a word."""
    given = device_dtype(local.dtype)
    if local.dtype.kind not in "iu" or given == local.dtype or not local.size:
        return
    limits = np.iinfo(given)
    low, high = int(local.min()), int(local.max())
    if low < limits.min or high > limits.max:
        raise FeedError(
            f"numbers of {local.dtype} do not fit {given}, which they have on a device",
            [Offence(path, f"holds {low if low < limits.min else high}", shape=local.shape)],
            "jax.config.update('jax_enable_x64', True), or keep the leaf on the host",
        )


def split_of_local(sharding: NamedSharding, local_shape: Sequence[int], process: int) -> RowSplit:
    """The split of the global array of which a process's whole rows have `local_shape`.

    How many rows there are in all follows from the part of them that the process owns.

    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    >>> split_of_local(NamedSharding(mesh, jax.sharding.PartitionSpec("dp")), (6, 3), process=0).shape
    (6, 3)
    """
    ways = math.prod(sharding.mesh.shape[axis] for axis in axes_of(next(entries_of(sharding.spec, 1))))
    unit = row_split(sharding, (ways, *local_shape[1:]))
    mine = unit.rows(process)
    if not len(mine):
        raise SplitError(
            f"process {process} owns no device of this sharding, yet it holds {local_shape[0]} rows",
            remedy="sx.Feed loads rows only where the mesh wants them",
        )
    if local_shape[0] % len(mine):
        raise SplitError(
            f"{local_shape[0]} rows do not divide over the {len(mine)} row shards that process {process} owns",
            [Offence(f"process {process}", f"owns shards {show_rows(mine)} of {ways}", spec=sharding.spec)],
            f"would work: a multiple of {len(mine)} rows in this process",
        )
    return row_split(sharding, (local_shape[0] // len(mine) * ways, *local_shape[1:]))
