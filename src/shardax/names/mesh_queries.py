"""Small questions about the mesh in force, in eformer's words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from shardax.errors import AxisTypeError, Offence, UnknownAxisError, did_you_mean
from shardax.names.mesh import AnyMesh, MeshLike, current_mesh, required_mesh


def get_incontext_mesh(raise_error: bool = True) -> AnyMesh:
    """The current mesh; without one an `AssertionError`, or an empty `Mesh` when `raise_error=False`.

    >>> get_incontext_mesh(raise_error=False).empty
    True
    """
    mesh = required_mesh(need="get_incontext_mesh") if raise_error else current_mesh()
    return Mesh(np.empty((), dtype=object), ()) if mesh is None else mesh


def get_mesh_axis_names(mesh: MeshLike | None = None) -> list[str]:
    """The axis names of a mesh (or of the one in force), major axis first.

    >>> get_mesh_axis_names("dp=2,tp=4")
    ['dp', 'tp']
    """
    return [str(name) for name in required_mesh(mesh, "get_mesh_axis_names").axis_names]


def names_in_current_mesh(*names: str) -> bool:
    """Are all these names axes of the mesh in force? Without a mesh no name is.

    >>> with jax.set_mesh(jax.make_mesh((8,), ("dp",))):
    ...     names_in_current_mesh("dp"), names_in_current_mesh("dp", "tp")
    (True, False)
    """
    mesh = current_mesh()
    return set(names) <= (set() if mesh is None else set(mesh.axis_names))


def get_axes_size_in_mesh(names: str | Sequence[str] | None, mesh: MeshLike | None = None) -> int:
    """How many devices these axes span together: the product of their sizes (1 for `None`).

    >>> get_axes_size_in_mesh(("dp", "tp"), "dp=2,tp=4")
    8
    """
    if names is None:
        return 1
    wanted = _axis_names(names)
    shape = dict(required_mesh(mesh, "get_axes_size_in_mesh").shape)
    unknown = [
        Offence(repr(name), f"not in {tuple(shape)}{did_you_mean(name, shape)}") for name in wanted if name not in shape
    ]
    if unknown:
        raise UnknownAxisError("the mesh has no such axis", unknown)
    return math.prod(shape[name] for name in wanted)


def get_mesh_axis_size(names: str | Sequence[str]) -> int:
    """Inside `shard_map`: the product of the sizes of the named axes; `()` → 1.

    >>> def add(rows):
    ...     return rows + get_mesh_axis_size(("dp", "tp"))
    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "tp"))):
    ...     jax.shard_map(add, in_specs=jax.P(), out_specs=jax.P())(np.zeros(2, int)).tolist()
    [8, 8]
    """
    return math.prod(jax.lax.axis_size(name) for name in _axis_names(names))


def get_submesh_device_index(names: str | Sequence[str]) -> jax.Array | int:
    """Inside `shard_map`: this device's row-major index over the named axes (major → minor); `()` → 0.

    >>> def number(rows):
    ...     return rows + get_submesh_device_index(("tp", "dp"))
    >>> mesh = jax.make_mesh((2, 4), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    >>> whole = jax.P(("dp", "tp"))
    >>> jax.shard_map(number, mesh=mesh, in_specs=whole, out_specs=whole)(np.zeros(8, int)).tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    index: jax.Array | int = 0
    for name in _axis_names(names):
        index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return index


def _axis_names(names: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise AxisTypeError(f"axis names are a string or a sequence of strings, not {names!r}")
    return tuple(names)
