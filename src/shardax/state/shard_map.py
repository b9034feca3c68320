"""`shardax.shard_map`: `jax.shard_map` for functions whose arguments, closures and results hold cells.

Thin over the lift: the cells of an argument take that argument's spec, closed-over ones the state specs, and what is
written comes back under the spec it went in with. The compiled callable is kept per structure, so an eager second
call is a dispatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, get_abstract_mesh

from shardax._compat import backend_initialised, trace_state_clean
from shardax.errors import ArgumentError, Offence, ShardMapError, UnknownAxisError
from shardax.names.mesh import AnyMesh, MeshLike, MeshSpec, as_mesh, required_mesh
from shardax.names.mesh_build import make_mesh
from shardax.state.aliasing import refuse_shared
from shardax.state.building import mesh_key
from shardax.state.forms import Chosen
from shardax.state.graph import survey
from shardax.state.kinds import Kind, holds_cells, role_of
from shardax.state.lift import Gathered, Lift, Options
from shardax.state.lifted import Lifted
from shardax.state.map_specs import MapOptions, Specs, assign, refuse_odd_specs
from shardax.state.mapping import Mapped
from shardax.state.prefixes import is_mapping_prefix
from shardax.state.wrapping import Wrapped


class ShardMapped(Wrapped):
    """A function mapped over the shards of its arguments; made by `shard_map`."""

    _options: MapOptions

    def __init__(self, function: Callable[..., Any], options: MapOptions) -> None:
        super().__init__(function, options)
        self._lifts: dict[frozenset[str], Lift] = {}

    @property
    def inner(self) -> Callable[..., Any]:
        """`jax.shard_map` of the function itself, for plain arrays."""
        options = self._options
        return jax.shard_map(
            self._function,
            mesh=required_mesh(options.mesh, "shard_map"),
            in_specs=options.in_specs,
            out_specs=options.out_specs,
            check_vma=options.check_vma,
            axis_names=options.axis_names,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        static = (
            frozenset(name for name, value in kwargs.items() if not _is_data(value)) if kwargs else frozenset[str]()
        )
        lift = self._lifts.get(static)
        if lift is None:
            lift = self._lifts[static] = self._lift(static)
        return lift(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"shardax.shard_map({getattr(self._function, '__qualname__', self._function)!s})"

    def clear_cache(self) -> None:
        """Forget everything that was traced and compiled."""
        for lift in self._lifts.values():
            lift.clear()

    def _lift(self, static: frozenset[str]) -> Lift:
        title = getattr(self._function, "__qualname__", None) or repr(self._function)
        key = None if isinstance(self._options.mesh, Mesh) else mesh_key
        graph = (self._options.graph, self._options.graph_updates)
        lift = Lift(self._function, Options(title, Chosen((), static), graph=graph, context=key), self._compile)
        lift.compile = functools.partial(self._compile, lift)
        return lift

    def _mesh(self) -> AnyMesh:
        """The mesh of a call. One that was only spelled, with none in force, takes the devices that are there."""
        mesh = required_mesh(self._options.mesh, "shard_map")
        if isinstance(mesh, Mesh) or not get_abstract_mesh().empty:
            return mesh
        present = trace_state_clean() or backend_initialised()
        return make_mesh(mesh, axis_types=mesh.axis_types) if present and mesh.size <= jax.device_count() else mesh

    def _compile(self, lift: Lift, lifted: Lifted, gathered: Gathered) -> Callable[..., Any]:
        options = self._options
        mesh = self._mesh()
        if options.graph is False:
            refuse_shared(lifted.graph, lift.root_names(lifted.form), "shard_map")
        assigned = assign(lift, lifted, gathered, options, mesh)
        return Mapped(lifted, replace(options, mesh=mesh), assigned)


def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: MeshLike | None = None,
    in_specs: Any = ...,
    out_specs: Any = ...,
    *,
    state_in_specs: PartitionSpec | Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None = None,
    state_out_specs: PartitionSpec | Mapping[Any, Any] | Iterable[tuple[Any, Any]] | None = None,
    check_vma: bool = True,
    axis_names: Iterable[str] = frozenset(),
    fold_rng: bool = True,
    check_rep: bool | None = None,
    auto: Iterable[str] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Map a function over the shards of its arguments; it may read and write cells of any framework.

    >>> import jax.numpy as jnp, shardax as sx
    >>> from jax.sharding import PartitionSpec as P
    >>> total = sx.State(jnp.zeros(()))
    >>> def add(block):
    ...     total.value += jax.lax.psum(block.sum(), "x")
    ...     return block * 2
    >>> mapped = sx.shard_map(add, sx.make_mesh("x=8"), in_specs=P("x"), out_specs=P("x"))
    >>> float(mapped(jnp.arange(8.0)).sum()), float(total.value)
    (56.0, 28.0)

    `in_specs` is one spec for all positional arguments or a tuple with one entry each (a spec, a `StateSharding`, or a
    tree of specs); keyword arguments are replicated. `state_in_specs` and `state_out_specs` speak of the cells that
    the function closes over: one spec for all, or `{cell: spec}` (pairs where a cell does not hash, as in nnx), where a
    module stands for all its cells; one that is not covered is replicated, and what is written goes out as it came in.
    Random cells draw other numbers on every shard unless `fold_rng=False`. `mesh=None` is the mesh in force;
    `check_rep` and `auto` are the older spellings of `check_vma` and `axis_names`.
    """
    if in_specs is ... or out_specs is ...:
        missing = "in_specs" if in_specs is ... else "out_specs"
        raise ArgumentError(f"shard_map needs {missing}", remedy="P() for a replicated argument or result")
    target = None if mesh is None else as_mesh(mesh)
    names = frozenset(axis_names) if auto is None else _manual(target, frozenset(auto), frozenset(axis_names))
    for argument, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        refuse_odd_specs(specs, argument)
    options = MapOptions(
        mesh=target,
        in_specs=in_specs,
        out_specs=out_specs,
        state_in_specs=_state_specs(state_in_specs, "state_in_specs"),
        state_out_specs=_state_specs(state_out_specs, "state_out_specs"),
        check_vma=check_vma if check_rep is None else check_rep,
        axis_names=names,
        fold_rng=fold_rng,
        graph=graph,
        graph_updates=graph_updates,
    )
    if f is None:
        return lambda function: _wrap(function, options)
    return _wrap(f, options)


def _manual(mesh: AnyMesh | MeshSpec | None, auto: frozenset[str], names: frozenset[str]) -> frozenset[str]:
    """The axes that are mapped over, where those that are not were given."""
    known = list(map(str, MeshSpec.of(required_mesh(mesh, "shard_map(auto=...)")).names))
    unknown = [Offence("auto", f"{axis!r} is no axis of the mesh {tuple(known)}") for axis in sorted(auto - {*known})]
    if unknown:
        raise UnknownAxisError("shard_map names axes that the mesh does not have", unknown)
    manual = frozenset(known) - auto
    if names and names != manual:
        raise ArgumentError(
            f"auto={sorted(auto)} leaves {sorted(manual)} to map over, and axis_names={sorted(names)}",
            remedy="axis_names alone: auto is its older spelling, of the other axes",
        )
    return manual


def _wrap(function: Any, options: MapOptions) -> ShardMapped:
    if isinstance(function, type) or not callable(function):
        raise ArgumentError(
            f"shard_map needs a function, not {function!r}", remedy="map a function that makes or calls the object"
        )
    if isinstance(function, MethodType) and isinstance(role_of(type(function.__self__)), Kind):
        owner = type(function.__self__).__name__
        raise ArgumentError(
            f"shard_map does not take bound methods of modules ({owner}.{function.__name__})",
            remedy=f"decorate the method, or map {owner}.{function.__name__} and pass the instance",
        )
    return ShardMapped(function, options)


@dataclass(frozen=True)
class StateSpecs:
    """The specs of closed-over cells: one for all, or by identity; None where nothing is said."""

    for_all: PartitionSpec | None
    by_cell: Mapping[int, PartitionSpec]
    cells: tuple[Any, ...]  # kept alive: an id is a name only as long as its cell is

    def of(self, cell: Any) -> PartitionSpec | None:
        return self.by_cell.get(id(cell), self.for_all)


def _state_specs(given: Any, argument: str) -> StateSpecs:
    if given is None or isinstance(given, PartitionSpec):
        return StateSpecs(given, {}, ())
    try:
        pairs = [(holder, spec) for holder, spec in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise ShardMapError(
            f"{argument} is {type(given).__name__} {given!r}",
            remedy="a PartitionSpec for all, or {state: PartitionSpec}; pairs where a state does not hash",
        ) from None
    by_cell: dict[int, PartitionSpec] = {}
    for holder, spec in pairs:
        walked = survey([(holder, "auto")])
        if not walked.cells or not (isinstance(spec, PartitionSpec) or is_mapping_prefix(spec)):
            raise ShardMapError(
                f"{argument} maps {type(holder).__name__} to {spec!r}",
                remedy="states, or what holds some, as keys; a PartitionSpec or a StateSharding as values",
            )
        found = Specs(walked.graph.records, lambda ref, cells=walked.cells: cells[ref[1]], argument)
        found.root(walked.graph.roots[0], spec, type(holder).__name__)
        by_cell.update((id(cell), found.of(("c", number))) for number, cell in enumerate(walked.cells))
    return StateSpecs(None, by_cell, tuple(holder for holder, _ in pairs))


def _is_data(value: Any) -> bool:
    """Can JAX trace this keyword argument, or does it hold cells? Everything else is configuration."""
    return holds_cells(value) or all(
        isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)) or hasattr(leaf, "aval")
        for leaf in jax.tree.leaves(value)
    )
