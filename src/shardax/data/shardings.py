"""Reading what people give as shardings: one for a whole batch, or a tree that is a prefix of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardax.errors import FeedError, Offence
from shardax.names.mesh import as_mesh, required_mesh


def is_sharding(node: Any) -> bool:
    """A jax sharding of any kind."""
    return isinstance(node, Sharding)


def read_shardings(given: Any) -> Any:
    """The tree with every spec bound to a mesh; anything that is no sharding then is an error."""
    bound = _bind(given)
    leaves = jax.tree.leaves(bound, is_leaf=is_sharding)
    strange = sorted({type(leaf).__name__ for leaf in leaves if not is_sharding(leaf)})
    if strange or not leaves:
        raise FeedError(
            f"not a sharding: {', '.join(strange) or 'an empty tree'}",
            remedy="give a Layout, a jax Sharding, a PartitionSpec (and a mesh in force), (mesh, spec), or a tree",
        )
    return bound


def _bind(given: Any) -> Any:
    if isinstance(given, PartitionSpec):
        return NamedSharding(_concrete(required_mesh(need="a PartitionSpec for a batch")), given)
    if _is_mesh_and_spec(given):
        return NamedSharding(_concrete(as_mesh(given[0])), given[1])
    if isinstance(given, Mapping):
        return {key: _bind(value) for key, value in cast("Mapping[Any, Any]", given).items()}
    if isinstance(given, (list, tuple)) and not hasattr(cast("Any", given), "_fields"):
        return type(given)(_bind(value) for value in given)
    return given


def _is_mesh_and_spec(given: Any) -> bool:
    if not isinstance(given, tuple) or len(cast("Any", given)) != 2 or not isinstance(given[1], PartitionSpec):
        return False
    return not isinstance(given[0], (PartitionSpec, Sharding))


def _concrete(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise FeedError(f"a batch needs devices, and {mesh} has none", remedy="build the mesh with sx.make_mesh(...)")
    return mesh


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
        return NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:rank]))
    return sharding
