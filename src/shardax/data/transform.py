"""`sharded_transform`: a function on every device's part of a batch, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


@lru_cache(maxsize=256)
def sharded_transform(
    transform: Callable[[Any], Any], mesh: Mesh, in_spec: PartitionSpec, out_spec: PartitionSpec
) -> Callable[[Any], Any]:
    """The compiled form of a transform; the same for the same function, mesh and specs."""
    return jax.jit(jax.shard_map(transform, mesh=mesh, in_specs=in_spec, out_specs=out_spec))
