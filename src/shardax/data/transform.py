"""`sharded_transform`: a function on every device's part of a batch, lifted over its cells and compiled once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardax.state.shard_map import shard_map


def sharded_transform(
    transform: Callable[[Any], Any], mesh: Mesh, in_spec: PartitionSpec, out_spec: PartitionSpec
) -> Callable[[Any], Any]:
    """The mapped form of a transform; the same for the same function, mesh and specs."""
    return _mapped(_Named(transform), mesh, in_spec, out_spec)


@dataclass(frozen=True, eq=False)
class _Named:
    """A function by identity: what it holds may not hash, and a method is a new object whenever it is looked up."""

    function: Callable[[Any], Any]

    @property
    def _who(self) -> tuple[int, int]:
        function = self.function
        if isinstance(function, MethodType):
            return id(function.__self__), id(function.__func__)
        return id(function), 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self._who == other._who

    def __hash__(self) -> int:
        return hash(self._who)


@lru_cache(maxsize=64)
def _mapped(named: _Named, mesh: Mesh, in_spec: PartitionSpec, out_spec: PartitionSpec) -> Callable[[Any], Any]:
    return shard_map(_plain(named.function), mesh, in_specs=(in_spec,), out_specs=out_spec)


def _plain(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A module's method with its module beside it, as `shard_map` asks for."""
    return partial(transform.__func__, transform.__self__) if isinstance(transform, MethodType) else transform
