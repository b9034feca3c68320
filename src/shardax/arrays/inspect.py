"""What arrays say about themselves: their shardings, their specs, and the axis names in them. No data moves."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardax.arrays.targets import check_axes_of_specs
from shardax.errors import LeafError, NoMeshError, Offence, plural
from shardax.names.layout import Layout
from shardax.names.mesh import AnyMesh, MeshLike, as_mesh, current_mesh
from shardax.names.paths import flatten, rebuild
from shardax.names.spec import FREE, axes_of


def extract_shardings(tree: Any, mesh: MeshLike | None = None) -> Any:
    """The NamedSharding of every leaf, or None. A leaf whose `.sharding` is a PartitionSpec is bound to a mesh.

    In traced code it is what JAX knows of the value: all of it on Explicit axes, nothing on Auto ones.

    >>> import shardax as sx
    >>> mesh = sx.make_mesh("dp=2,tp=4")
    >>> x = sx.put(np.ones((4, 8)), NamedSharding(mesh, jax.P("dp")))
    >>> {name: found and found.spec for name, found in extract_shardings({"x": x, "n": 3}).items()}
    {'x': P('dp',), 'n': None}
    """
    given = None if mesh is None else as_mesh(mesh)
    paths, leaves = flatten(tree)
    bare = [None if isinstance(leaf, jax.Array) else getattr(leaf, "sharding", None) for leaf in leaves]
    if any(isinstance(spec, PartitionSpec) for spec in bare) and (target := current_mesh(given)) is not None:
        check_axes_of_specs(paths, bare, target)
    found = [_sharding_of(leaf, given) for leaf in leaves]
    unbound = [
        Offence(path, "has a spec and no mesh", spec=sharding)
        for path, sharding in zip(paths, found, strict=True)
        if isinstance(sharding, PartitionSpec)
    ]
    if unbound:
        raise NoMeshError(
            f"{plural(len(unbound), 'leaf', 'leaves')} cannot be bound: no mesh is in force",
            unbound,
            "pass mesh=…, or enter `with jax.set_mesh(mesh):` (or `with mesh:`)",
        )
    return rebuild(tree, found)


def extract_sharding_structure(tree: Any) -> Any:
    """The tree with a NamedSharding, or None, in place of every leaf; a spec that finds no mesh counts as None.

    >>> extract_sharding_structure({"w": np.ones(3)})
    {'w': None}
    """
    found = [_sharding_of(leaf, None) for leaf in flatten(tree)[1]]
    return rebuild(tree, [sharding if isinstance(sharding, NamedSharding) else None for sharding in found])


def get_shardings_with_structure(tree: Any) -> Any:
    """The same as `extract_sharding_structure`: a NamedSharding, or None, in place of every leaf.

    >>> get_shardings_with_structure([np.ones(3), 1])
    [None, None]
    """
    return extract_sharding_structure(tree)


def get_partition_spec(tree: Any) -> Any:
    """The tree with each array's spec: `P()` for an unsharded array and for a Python or NumPy scalar.

    >>> get_partition_spec({"x": jax.numpy.ones(3), "n": 2})
    {'x': P(), 'n': P()}
    """
    paths, leaves = flatten(tree)
    problems = [
        Offence(path, f"is {type(leaf).__name__}", remedy="sx.put it first" if isinstance(leaf, np.ndarray) else None)
        for path, leaf in zip(paths, leaves, strict=True)
        if not _has_spec(leaf)
    ]
    if problems:
        raise LeafError(f"{plural(len(problems), 'leaf has', 'leaves have')} no partition spec", problems)
    return rebuild(tree, [_spec_of(leaf) for leaf in leaves])


def get_names_from_partition_spec(specs: Any) -> list[str]:
    """Every mesh axis in a spec, or in any nesting of specs, once, in the order in which they are first seen.

    >>> get_names_from_partition_spec({"b": jax.P(("fsdp", "dp"), None), "a": [jax.P("tp", "dp")]})
    ['fsdp', 'dp', 'tp']
    """
    return list(dict.fromkeys(_names(specs)))


# ---- one leaf -------------------------------------------------------------------------------------------------------


def _sharding_of(leaf: Any, mesh: AnyMesh | None) -> NamedSharding | PartitionSpec | None:
    """A NamedSharding, None, or a spec that there is no mesh for."""
    if isinstance(leaf, Tracer):
        sharding = jax.typeof(leaf).sharding
        return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, PartitionSpec):
        target = current_mesh(mesh)
        return sharding if target is None else NamedSharding(target, sharding)
    return sharding if isinstance(sharding, NamedSharding) else None


def _has_spec(leaf: Any) -> bool:
    scalar = isinstance(leaf, np.ndarray) and leaf.ndim == 0
    return scalar or isinstance(leaf, (jax.Array, np.generic, numbers.Number))


def _spec_of(leaf: Any) -> PartitionSpec:
    sharding = _sharding_of(leaf, None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


# ---- names ----------------------------------------------------------------------------------------------------------


def _names(specs: Any) -> Iterator[str]:
    if specs is None or specs is FREE:
        return
    if isinstance(specs, str):
        yield specs
    elif isinstance(specs, NamedSharding):
        yield from _names(specs.spec)
    elif isinstance(specs, PartitionSpec):
        for entry in specs:
            yield from axes_of(entry)
    elif isinstance(specs, Layout):
        yield from _names([decision.spec for decision in specs.decisions])
    elif isinstance(specs, Mapping):
        yield from _names(list(specs.values()))
    elif isinstance(specs, (list, tuple, set, frozenset)):
        for part in sorted(specs, key=str) if isinstance(specs, (set, frozenset)) else specs:
            yield from _names(part)
    else:
        leaves = jax.tree.leaves(specs)
        if leaves and leaves[0] is specs:
            raise LeafError(f"there are no axis names in {specs!r} ({type(specs).__name__})")
        yield from _names(leaves)
