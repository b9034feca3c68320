"""Reading what people give as shardings: one for a whole batch, or a tree that is a prefix of it."""

from __future__ import annotations

from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax.arrays.targets import mesh_of_devices
from shardax.errors import FeedError, Offence
from shardax.names.layout import Layout
from shardax.names.mesh import as_mesh, required_mesh
from shardax.names.spec import known_spec


def is_sharding(node: Any) -> bool:
    """A jax sharding of any kind."""
    return isinstance(node, Sharding)


def read_shardings(given: Any) -> Any:
    """The tree with every spec bound to a mesh of devices; anything that is no sharding then is an error."""
    tree = given.shardings if isinstance(given, Layout) else given
    bound = jax.tree.map(bound_sharding, tree, is_leaf=lambda node: is_sharding(node) or _is_mesh_and_spec(node))
    leaves = jax.tree.leaves(bound, is_leaf=is_sharding)
    strange = sorted({type(leaf).__name__ for leaf in leaves if not is_sharding(leaf)})
    if strange or not leaves:
        raise FeedError(
            f"not a sharding: {', '.join(strange) or 'an empty tree'}",
            remedy="give a Layout, a jax Sharding, a PartitionSpec (and a mesh in force), (mesh, spec), or a tree",
        )
    return bound


def bound_sharding(given: Any) -> Any:
    """A spec, or a mesh with a spec, on a mesh of devices; anything else as it is."""
    if isinstance(given, PartitionSpec):
        mesh = mesh_of_devices(required_mesh(need="a PartitionSpec for a batch"))
        return NamedSharding(mesh, known_spec(given, mesh))
    if _is_mesh_and_spec(given):
        return NamedSharding(mesh_of_devices(as_mesh(given[0])), known_spec(given[1], given[0]))
    if isinstance(given, NamedSharding) and not isinstance(given.mesh, Mesh):
        return NamedSharding(mesh_of_devices(given.mesh), given.spec, memory_kind=given.memory_kind)
    return given


def _is_mesh_and_spec(given: Any) -> bool:
    if not isinstance(given, tuple) or len(cast("Any", given)) != 2 or not isinstance(given[1], PartitionSpec):
        return False
    return not isinstance(given[0], (PartitionSpec, Sharding))


def spread(shardings: Any, batch: Any) -> list[Any]:
    """One sharding per leaf of the batch; None in the tree of shardings stands for "leave it alone"."""
    if is_sharding(shardings):
        return [shardings] * len(jax.tree.leaves(batch))
    found: list[Any] = []

    def take(sharding: Any, part: Any) -> None:
        found.extend([sharding] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(take, shardings, batch, is_leaf=lambda node: node is None or is_sharding(node))
    except (ValueError, TypeError) as error:
        raise FeedError(
            "the shardings are not a prefix of the batch",
            [Offence("shardings", _form(shardings)), Offence("batch", _form(batch))],
            "one sharding for all leaves, or a tree with a sharding where the batch has a leaf or a subtree",
        ) from error
    return found


def _form(tree: Any) -> str:
    return str(jax.tree.structure(tree, is_leaf=is_sharding)).removeprefix("PyTreeDef")


def cut_to_rank(sharding: Any, rank: int) -> Any:
    """The sharding for an array of this rank: the entries of the spec that it has dimensions for."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > rank:
        return with_spec(sharding, PartitionSpec(*tuple(sharding.spec)[:rank]))
    return sharding


def with_spec(sharding: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    """The same devices and the same kind of memory under another spec."""
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
