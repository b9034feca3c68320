"""From one lifted function to one jitted `jax.shard_map`: specs per cell, results that come back where they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh

from shardax._compat import trace_state_clean
from shardax.errors import Offence, ShardMapError, UnknownAxisError, did_you_mean
from shardax.names.mesh import AnyMesh
from shardax.names.spec import axes_in
from shardax.state.cells import RngState
from shardax.state.effects import Effects, Result
from shardax.state.forms import Form
from shardax.state.lift import Gathered, Lift
from shardax.state.lifted import Lifted
from shardax.state.prefixes import Assignment, has, has_graph_node, is_mapping_prefix, is_prefix_leaf, per_argument

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
    names: tuple[str, ...]


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
        tuple(lift.cell_paths(lifted)),
    )
    _check_axes(assigned, options, mesh)
    _check_values(gathered, assigned)
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
    places: list[tuple[str, Any]] = [
        *zip(assigned.names, assigned.inputs, strict=False),
        *((f"in_specs[{place}]", spec) for place, spec in enumerate(assigned.plain)),
        *zip(assigned.names, assigned.written, strict=False),
        ("out_specs", options.out_specs),
    ]
    offences = [
        Offence(where, f"{axis!r} is no axis of the mesh {tuple(known)}{did_you_mean(axis, known)}", spec=leaf)
        for where, tree in places
        for leaf in jax.tree.leaves(tree, is_leaf=is_prefix_leaf)
        if isinstance(leaf, PartitionSpec)
        for axis in axes_in(leaf)
        if axis not in known
    ]
    if unknown := sorted(set(options.axis_names) - set(known)):
        offences += [Offence("axis_names", f"{axis!r} is no axis of the mesh {tuple(known)}") for axis in unknown]
    if offences:
        raise UnknownAxisError("shard_map names axes that the mesh does not have", dict.fromkeys(offences))


def _check_values(gathered: Gathered, assigned: Assigned) -> None:
    offences = [
        Offence(name, f"holds {type(leaf).__name__} {leaf!r:.40}, not an array")
        for name, value in zip(assigned.names, gathered.values, strict=False)
        for leaf in jax.tree.leaves(value)
        if not (hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float, complex)))
    ]
    if offences:
        raise ShardMapError("shard_map maps arrays, and these states hold something else", offences)


class _NeedSpecs(Exception):
    """Raised out of a trace whose result needs specs that were not known when it began."""

    def __init__(self, effects: Effects, values: Sequence[Any]) -> None:
        super().__init__()
        self.effects, self.count = effects, len(values)


class Mapped:
    """The compiled callable of one structure under one assignment of specs."""

    def __init__(self, lifted: Lifted, options: MapOptions, assigned: Assigned) -> None:
        self.lifted, self.options, self.assigned = lifted, options, assigned
        self.more: tuple[Any, ...] = ()  # specs of what a recipe carries out
        self.explicit = AxisType.Explicit in options.mesh.axis_types
        lifted.needs_recipe = has(options.out_specs, is_mapping_prefix) or has_graph_node(options.out_specs)
        self.jitted = jax.jit(self.run)
        self.probed = not any(getattr(family, "discovers", False) for family, _ in lifted.environment.families)

    def __call__(self, *operands: Any) -> tuple[Any, Result]:
        while True:
            try:
                if not self.probed:  # the framework expects to be run once before it is compiled
                    jax.eval_shape(self.run, *operands)
                    self.probed = True
                return self._dispatch(operands)
            except _NeedSpecs as need:
                self.more = self._recipe_specs(need)
                self.jitted = jax.jit(self.run)
            except (TypeError, ValueError) as error:
                self._explain_clash(error)
                raise

    def _dispatch(self, operands: Any) -> tuple[Any, Result]:
        try:
            return self.jitted(*operands)
        except ValueError as error:
            if "incompatible devices" not in str(error) or not trace_state_clean():
                raise
        return self.jitted(*self._put(operands))  # committed elsewhere: placed on the mesh

    def _put(self, operands: Any) -> Any:
        donated, kept, plain, named = operands
        specs = (list(self.assigned.inputs), self.assigned.plain, REPLICATED)
        return donated, *_over(lambda spec, x: jax.device_put(x, self._named(spec)), specs, (list(kept), plain, named))

    def _named(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.options.mesh, spec)

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def run(self, donated: Any, kept: Any, plain: Any, named: Any) -> tuple[Any, Result]:
        """The mapped function over global arrays."""
        options, assigned = self.options, self.assigned
        specs = (list(assigned.inputs), assigned.plain, REPLICATED)
        inputs = (list(kept), tuple(plain), named)
        if self.explicit:
            inputs = _over(lambda spec, x: self._reshard(x, spec), specs, inputs)
        traced: list[Effects] = []
        count = self.lifted.cells

        def local(kept: Any, plain: Any, named: Any) -> tuple[Any, list[Any], list[Any]]:
            keys = {place: kept[place] for place in assigned.rng}
            out, result = self.lifted.run((), self._fold(kept, keys), plain, named)
            effects, values = result.effects, list(result.values)
            written, more = values[: len(effects.written)], values[len(effects.written) :]
            if len(more) != len(self.more):
                raise _NeedSpecs(effects, more)
            by_cell: list[Any] = [None] * count
            for place, value in zip(effects.written, written, strict=True):
                by_cell[place] = _advanced(keys[place]) if place in keys else value
            traced.append(effects)
            return out, by_cell, more

        out_specs = None if self.lifted.needs_recipe else options.out_specs
        out, by_cell, more = self._map(local, specs, (_results(out_specs), list(assigned.written), list(self.more)))(
            *inputs
        )
        effects = traced[-1]
        return out, Result(effects, [*(by_cell[place] for place in effects.written), *more])

    def _map(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        options = self.options
        context = get_abstract_mesh()
        mesh = context if not context.empty and not trace_state_clean() else options.mesh
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=options.check_vma,
            axis_names=set(options.axis_names),
        )

    def _reshard(self, x: Any, spec: PartitionSpec) -> Any:
        """Explicit axes do not move by themselves: bring an input to where its spec wants it."""
        from shardax.arrays.constrain import constrain

        return constrain(x, spec, mesh=self.options.mesh)

    def _fold(self, kept: list[Any], keys: dict[int, Any]) -> list[Any]:
        if not keys:
            return kept
        names = sorted(self.options.axis_names) or [str(name) for name in self.options.mesh.axis_names]
        index: Any = 0
        for name in names:
            index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
        return [jax.random.fold_in(key, index) if place in keys else key for place, key in enumerate(kept)]

    # ---- results and errors -----------------------------------------------------------------------------------------

    def _recipe_specs(self, need: _NeedSpecs) -> tuple[Any, ...]:
        recipe = need.effects.recipe
        assert recipe is not None
        specs: list[Any] = [REPLICATED] * need.count
        if recipe.out is not None:
            born = {number: family.make(spec, None) for number, (family, spec, _) in enumerate(recipe.born)}
            found = Specs(recipe.records, lambda ref: born[ref[1]], "out_specs")
            found.root(recipe.out, self.options.out_specs, "result")
            found.check()
            for (tag, number), (spec, _) in found.found.items():
                if tag in "bv":
                    specs[recipe.born[number][2] if tag == "b" else number] = spec
        return tuple(specs)

    def _explain_clash(self, error: Exception) -> None:
        """Replicated state against sharded data is the likeliest reason for shapes that do not agree."""
        text = str(error).lower()
        if isinstance(error, ShardMapError) or not any(w in text for w in ("incompatible shapes", "broadcast", "shape")):
            return
        closed = range(len(self.lifted.own), self.lifted.cells)
        whole = [self.assigned.names[place] for place in closed if not axes_in(self.assigned.inputs[place])]
        cut = any(
            isinstance(leaf, PartitionSpec) and axes_in(leaf)
            for leaf in jax.tree.leaves(self.assigned.plain, is_leaf=is_prefix_leaf)
        )
        if whole and cut:
            raise ShardMapError(
                f"{error}\nwhile every shard holds these states whole and the arguments are sharded",
                [Offence(name, "is replicated: no entry in state_in_specs", spec=REPLICATED) for name in whole],
                "give the state a spec with state_in_specs={the_state: P(...)} (and state_out_specs where it is written)",
            ) from error


def _results(out_specs: Any) -> Any:
    """Specs of the plain result: None stands for replicated, as for arguments."""
    if out_specs is None:
        return REPLICATED
    return jax.tree.map(lambda leaf: REPLICATED if leaf is None else leaf, out_specs, is_leaf=is_prefix_leaf)


def _over(function: Callable[[Any, Any], Any], specs: Any, inputs: Any) -> Any:
    """Apply to every array with the spec that its prefix gives it."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: function(spec, x), part), specs, inputs, is_leaf=is_prefix_leaf
    )


def _advanced(key: Any) -> Any:
    """Where a random cell stands after a mapped call: the same on every shard, and never where it was."""
    return jax.random.split(key)[0]

