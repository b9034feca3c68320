"""The specs of `shard_map`: one per cell and array of a structure, from the specs of arguments and of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.errors import Offence, ShardMapError, UnknownAxisError, did_you_mean
from shardax.names.mesh import AnyMesh
from shardax.names.spec import Fit, axes_in, fit_cached, mesh_shape, misfit_error
from shardax.state.cells import RngState
from shardax.state.forms import Form, argument_names
from shardax.state.lift import Gathered, Lift
from shardax.state.lifted import Lifted
from shardax.state.prefixes import (
    OTHER_TREES,
    Assignment,
    is_mapping_prefix,
    is_prefix_leaf,
    odd_leaves,
    other_trees,
    per_argument,
    refuse_odd_entries,
)

REPLICATED = PartitionSpec()


@dataclass(frozen=True, eq=False)
class MapOptions:
    """The arguments of `shard_map`, made consistent."""

    mesh: Any
    in_specs: Any
    out_specs: Any
    state_in_specs: Any
    state_out_specs: Any
    check_vma: bool
    axis_names: frozenset[str]
    fold_rng: bool
    graph: bool | None
    graph_updates: bool | None


class Specs(Assignment):
    """An assignment of PartitionSpecs, which belong to no mesh."""

    def bind(self, prefix: Any) -> Any:
        """A spec stays a spec; None is replicated; a NamedSharding lends its spec."""
        if prefix is None:
            return REPLICATED
        return prefix.spec if isinstance(prefix, NamedSharding) else prefix


@dataclass(frozen=True)
class Assigned:
    """The spec of every input and, for the cells, of what is written to them."""

    inputs: tuple[PartitionSpec, ...]
    plain: tuple[Any, ...]
    written: tuple[PartitionSpec, ...]
    rng: tuple[int, ...]  # replicated cells whose key gets the shard's index folded in
    names: Callable[[], list[str]]  # what the inputs are called; worked out when an error wants to know
    arguments: tuple[str, ...]  # what the plain arguments are called


def assign(lift: Lift, lifted: Lifted, gathered: Gathered, options: MapOptions, mesh: AnyMesh) -> Assigned:
    """The specs of one structure; everything that names no axis of the mesh is listed."""
    form = lifted.form
    prefixes = _per_argument(options.in_specs, form)
    names = lift.root_names(form)
    by_number: list[Any] = [None] * len(lifted.graph.specs)
    for place, number in enumerate(lifted.own):
        by_number[number] = gathered.cells[place]
    for number, place in lifted.pinned.items():
        by_number[number] = lifted.environment.cells[place]
    found = Specs(lifted.graph.records, lambda ref: by_number[ref[1]], "in_specs")
    for place, ref, name in zip(form.stateful, lifted.graph.roots, names, strict=False):
        found.root(ref, prefixes[place], name)
    for ref, name in zip(lifted.graph.roots[len(form.stateful) :], names[len(form.stateful) :], strict=True):
        found.root(ref, REPLICATED, name)
    found.check()
    own = [found.of(("c", number)) or REPLICATED for number in lifted.own]
    closed = [options.state_in_specs.of(cell) for cell in lifted.environment.cells]
    for number, place in lifted.pinned.items():  # reached through an argument too: the argument's spec speaks
        spec = found.of(("c", number))
        closed[place] = spec if closed[place] is None else closed[place]
    inside = [REPLICATED if spec is None else spec for spec in closed]
    outside = [
        spec if (out := options.state_out_specs.of(cell)) is None else out
        for cell, spec in zip(lifted.environment.cells, inside, strict=True)
    ]
    leaves = [found.of(("l", number)) or REPLICATED for number in range(lifted.graph.leaves)]
    plain = tuple(_plain_specs(prefixes[place]) for place in form.plain)
    assigned = Assigned(
        (*own, *inside, *leaves),
        plain,
        (*own, *outside),
        _rng_places(lifted, (*own, *inside)) if options.fold_rng else (),
        lifted.input_names,
        tuple(argument_names(lift.function, form.count)[place] for place in form.plain),
    )
    _check_axes(assigned, options, mesh)
    return assigned


def _per_argument(in_specs: Any, form: Form) -> dict[int, Any]:
    if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, PartitionSpec) and len(in_specs) != form.count:
        raise ShardMapError(
            f"in_specs has {len(in_specs)} entries for {form.count} positional arguments",
            remedy="one entry per positional argument, or one spec for all; keyword arguments are replicated",
        )
    return per_argument(in_specs, form, "in_specs")


def _plain_specs(prefix: Any) -> Any:
    """The specs of an argument without state."""

    def read(leaf: Any) -> Any:
        if is_mapping_prefix(leaf):
            raise ShardMapError(f"in_specs gives {leaf!r} to an argument that holds no state", remedy="a PartitionSpec")
        return REPLICATED if leaf is None else leaf.spec if isinstance(leaf, NamedSharding) else leaf

    return jax.tree.map(read, prefix, is_leaf=is_prefix_leaf)


def _rng_places(lifted: Lifted, specs: Sequence[PartitionSpec]) -> tuple[int, ...]:
    cells = [lifted.graph.specs[number] for number in lifted.own]
    kinds = [*cells, *[(family, family.spec(cell)) for cell, family in _closed(lifted)]]
    return tuple(
        place
        for place, ((family, spec), where) in enumerate(zip(kinds, specs, strict=True))
        if not axes_in(where) and _is_rng(family, spec)
    )


def _closed(lifted: Lifted) -> list[tuple[Any, Any]]:
    return [(cell, family) for family, run in lifted.environment.families for cell in lifted.environment.cells[run]]


def _is_rng(family: Any, spec: Any) -> bool:
    """Does a cell of this family and spec hold a key that every shard should see differently?"""
    if issubclass(spec.cls, RngState):
        return bool(spec.metadata.get("fold", True))
    return bool(getattr(family, "is_rng", lambda _: False)(spec))


def _check_axes(assigned: Assigned, options: MapOptions, mesh: AnyMesh) -> None:
    known = [str(name) for name in mesh.axis_names]
    if not {*_axes((assigned.inputs, assigned.plain, assigned.written, options.out_specs)), *options.axis_names} - {
        *known
    }:
        return
    names = assigned.names()
    places: list[tuple[str, Any]] = [
        *zip(names, assigned.inputs, strict=True),
        *zip(assigned.arguments, assigned.plain, strict=True),
        *zip(names, assigned.written, strict=False),
        ("out_specs", options.out_specs),
        ("axis_names", PartitionSpec(*sorted(options.axis_names))),
    ]
    offences = [
        Offence(where, f"{axis!r} is no axis of the mesh {tuple(known)}{did_you_mean(axis, known)}", spec=spec)
        for where, tree in places
        for spec in _specs(tree)
        for axis in axes_in(spec)
        if axis not in known
    ]
    raise UnknownAxisError("shard_map names axes that the mesh does not have", dict.fromkeys(offences))


def _specs(tree: Any) -> list[PartitionSpec]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_prefix_leaf) if isinstance(leaf, PartitionSpec)]


def _axes(tree: Any) -> set[str]:
    return {axis for spec in _specs(tree) for axis in axes_in(spec)}


def cut(specs: Any) -> bool:
    """Does any of these specs cut its array?"""
    return bool(_axes(specs))


def refuse_odd_specs(specs: Any, argument: str) -> None:
    """Refuse specs that are something else, wherever they stand."""
    refuse_odd_entries(specs, argument)
    offences = odd_leaves(specs, argument, "spec")
    if offences:
        raise ShardMapError(
            f"{argument} takes specs and trees of them", offences, "PartitionSpec('axis'), P() for replicated"
        )


def check_fit(assigned: Assigned, mesh: AnyMesh, kept: Sequence[Any], plain: Any) -> None:
    """Refuse arrays that their specs do not cut evenly, and trees of other specs: all of them, by name."""
    others = other_trees(zip(assigned.arguments, assigned.plain, plain, strict=True))
    if others:
        raise ShardMapError("in_specs do not match the arguments", others, OTHER_TREES)
    shape = mesh_shape(mesh)
    pairs = [*zip(assigned.inputs, kept, strict=True), *zip(assigned.plain, plain, strict=True)]
    found: list[tuple[int, str, Fit]] = []
    for place, (prefix, tree) in enumerate(pairs):
        for path, spec, x in _leaves(prefix, tree):
            fitted = fit_cached(spec, tuple(x.shape), shape, 1, True)
            if fitted.corrections:
                found.append((place, path, fitted))
    if found:
        names = [*assigned.names(), *assigned.arguments]
        raise misfit_error(
            "shard_map cannot cut these arrays evenly",
            [(fitted, names[place] + path, None) for place, path, fitted in found],
        )


def _leaves(prefix: Any, tree: Any) -> Iterator[tuple[str, PartitionSpec, Any]]:
    """Every array of a tree that a prefix of specs cuts, with its path."""
    if not cut(prefix):
        return
    specs = jax.tree.leaves(
        jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, tree, is_leaf=is_prefix_leaf),
        is_leaf=is_prefix_leaf,
    )
    for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(tree), specs, strict=True):
        if hasattr(x, "shape") and axes_in(spec):
            yield jax.tree_util.keystr(path), spec, x
