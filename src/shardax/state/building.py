"""From one lifted function to one `jax.jit`: its shardings, its donation, and what must come back as it went in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardax._compat import compilations_of
from shardax.errors import StateShardingError
from shardax.names.mesh import current_mesh
from shardax.names.spec import fit_cached, mesh_shape, misfit_error
from shardax.state.effects import Result, with_moved
from shardax.state.forms import argument_names
from shardax.state.lift import Gathered, Lift
from shardax.state.lifted import Lifted, weakly
from shardax.state.prefixes import (
    OTHER_TREES,
    Assignment,
    bind_all,
    has,
    has_graph_node,
    is_mapping_prefix,
    needs_mesh,
    other_trees,
    per_argument,
)
from shardax.state.sharing import Pick, picker


@dataclass(frozen=True)
class JitOptions:
    """The arguments of `jit`."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: Any
    static_argnames: Any
    donate_argnums: Any
    donate_argnames: Any
    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    abstracted_axes: Any
    compiler_options: dict[str, Any] | None
    donate: str | None
    graph: bool | None
    graph_updates: bool | None

    @property
    def needs_mesh(self) -> bool:
        """Do the shardings depend on the mesh in force?"""
        return needs_mesh(self.in_shardings) or needs_mesh(self.out_shardings)


def mesh_key() -> Any:
    """The mesh in force, or that there is none, as part of the key of what was lifted."""
    return (current_mesh(),)


def build(lift: Lift, lifted: Lifted, gathered: Gathered, options: JitOptions) -> Callable[..., Any]:
    """The compiled callable of one structure."""
    assigned = _assign(lift, lifted, gathered, options)
    if assigned is not None:
        lifted.pins = {n: sharding for n, sharding in enumerate(assigned[: lifted.cells]) if sharding is not None}
    lifted.out_shardings = options.out_shardings
    if has(options.out_shardings, is_mapping_prefix) or has_graph_node(options.out_shardings):
        lifted.needs_recipe = True  # never back to False: a trace may have learnt it
    donated = _donated_cells(lift, lifted)
    if options.donate == "state":
        donated |= _donated_state(lifted, gathered)
    lifted.set_donation(donated)
    return Keeper(lifted, options, assigned) if lifted.cells else _jit(lifted, options, assigned)


def _assign(lift: Lift, lifted: Lifted, gathered: Gathered, options: JitOptions) -> list[Any] | None:
    """The sharding that `in_shardings` gives every input, or None where it gives none."""
    if options.in_shardings is None:
        return None
    form = lifted.form
    prefixes = per_argument(options.in_shardings, form, "in_shardings")
    plain = zip(form.plain, gathered.plain, strict=True)
    arguments = argument_names(lifted.function, form.count)
    others = other_trees((arguments[place], prefixes[place], tree) for place, tree in plain)
    if others:
        raise StateShardingError("in_shardings do not match the arguments", others, OTHER_TREES)
    by_number: list[Any] = [None] * len(lifted.graph.specs)
    for place, number in enumerate(lifted.own):
        by_number[number] = gathered.cells[place]
    for number, place in lifted.pinned.items():
        by_number[number] = lifted.environment.cells[place]
    assignment = Assignment(lifted.graph.records, lambda ref: by_number[ref[1]], "in_shardings")
    names = lift.root_names(form)
    for place, ref, name in zip(form.stateful, lifted.graph.roots, names, strict=False):
        assignment.root(ref, prefixes[place], name)
    assignment.check()
    lifted.in_prefixes = [prefixes[place] for place in form.stateful] + [None] * len(form.stateful_names)
    cells = [assignment.of(("c", number)) for number in lifted.own] + [None] * len(lifted.environment.cells)
    for number, place in lifted.pinned.items():
        cells[len(lifted.own) + place] = assignment.of(("c", number))
    return cells + [assignment.of(("l", number)) for number in range(lifted.graph.leaves)]


def _donated_cells(lift: Lift, lifted: Lifted) -> frozenset[int]:
    """The cells below arguments that `donate_argnums` or `donate_argnames` name."""
    donate, form = lift.options.donate, lifted.form
    positions = donate.at(form.count) if donate else frozenset[int]()
    given = [place in positions for place in form.stateful] + [name in donate.names for name in form.stateful_names]
    if not any(given):
        return frozenset()
    assignment = Assignment(lifted.graph.records, lambda ref: None, "donate")
    for ref, donated in zip(lifted.graph.roots, given, strict=True):
        if donated:
            assignment.root(ref, None, "")
    return frozenset(place for place, number in enumerate(lifted.own) if ("c", number) in assignment.found)


def _donated_state(lifted: Lifted, gathered: Gathered) -> frozenset[int]:
    """The cells that the function writes, apart from those whose buffer the new value cannot take; they are named."""
    _, result = jax.eval_shape(lifted.run, *gathered.operands())
    reused: list[int] = []
    kept: list[str] = []
    for place, value in zip(result.effects.written, result.values, strict=False):
        before, after = _buffers(gathered.values[place]), _buffers(value)
        if before == after:
            reused.append(place)
        else:
            kept.append(f"{lifted.input_names()[place]} ({_shown(before)} → {_shown(after)})")
    if kept:
        reason = "the new value does not fit the old buffer"
        warnings.warn(f'donate="state" keeps {len(kept)} cells, {reason}: {", ".join(kept)}', stacklevel=2)
    return frozenset(reused)


def _buffers(tree: Any) -> list[Any]:
    return [(aval.shape, aval.dtype) for aval in map(jax.typeof, jax.tree.leaves(tree))]


def _is_gone(array: Any) -> bool:
    return isinstance(array, Tracer) or array.is_deleted()


def _shown(buffers: list[Any]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in buffers)


def _jit(lifted: Lifted, options: JitOptions, assigned: list[Any] | None, run: Any = None) -> Any:
    form, run = lifted.form, run or weakly(lifted.run)
    arguments: dict[str, Any] = {"keep_unused": options.keep_unused, "inline": options.inline}
    arguments["donate_argnums"] = (0, 4) if form.donated or form.donated_names else (0,) if lifted.donate else ()
    if options.compiler_options is not None:
        arguments["compiler_options"] = options.compiler_options
    if assigned is not None:
        prefixes = per_argument(options.in_shardings, form, "in_shardings")
        bound = {place: bind_all(prefix, None, "in_shardings") for place, prefix in prefixes.items()}
        donated, kept = lifted.part(assigned)
        shardings: tuple[Any, ...] = (tuple(donated), list(kept), tuple(bound[place] for place in form.plain), None)
        if form.donated or form.donated_names:
            shardings += ((tuple(bound[place] for place in form.donated), None),)
        arguments["in_shardings"] = shardings
    if options.out_shardings is not None and not lifted.needs_recipe:
        arguments["out_shardings"] = (bind_all(options.out_shardings, None, "out_shardings"), None)
    if options.device is None and options.backend is None:
        return jax.jit(run, **arguments)
    with warnings.catch_warnings():  # deprecated in jax, documented here: they keep working
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(run, device=options.device, backend=options.backend, **arguments)


class Keeper:
    """Calls a jitted function and sees to it that cells come back with the sharding they went in with.

    Cells that `in_shardings` speaks of are placed before the call. For the others XLA chooses the sharding of what is
    written: whenever a call compiled something new, it is compared with what went in, and where one differs a variant
    that holds the result to it is compiled and used for these input shardings from then on.
    """

    def __init__(self, lifted: Lifted, options: JitOptions, assigned: list[Any] | None) -> None:
        self.lifted, self.options, self.assigned = lifted, options, assigned
        self.jitted = _jit(lifted, options, assigned)
        self.compilations = compilations_of(self.jitted)
        self.variants: dict[Any, Any] = {}
        self.last: tuple[list[Any], Any] = ([], self.jitted)  # shardings, and the variant for them
        self.where = {place: number for number, place in enumerate(lifted.order)}
        self.placed = sorted(lifted.pins)
        self.pick = picker([self.where[place] for place in self.placed], lifted.size)
        self.wanted = [lifted.pins[place] for place in self.placed]
        self.careful = bool(self.placed)
        self.seen = self.wanted  # the objects that equalled them last: compared by identity, at C speed

    def __call__(self, *operands: Any) -> tuple[Any, Result]:
        return self.call(*operands)

    def call(self, donated: Any, kept: Any, plain: Any, named: Any, *given: Any) -> tuple[Any, Result]:
        """One call: it says what it takes, and is no `__call__`, because both save time."""
        if self.careful or given:
            return self._call_with_care((donated, kept, plain, named, *given))
        before = self.compilations()
        outcome = self.jitted(donated, kept, plain, named)
        if self.compilations() != before:
            return outcome[0], self._look((donated, kept), outcome[1])
        return outcome

    def _call_with_care(self, operands: Any) -> tuple[Any, Result]:
        moved: dict[int, Any] = {}
        if self.pick is not None:
            operands, moved = self._place(operands, self.pick)
        jitted = self._variant(operands) if self.variants else self.jitted
        compilations = compilations_of(jitted)
        before = compilations()
        out, result = jitted(*operands)
        if compilations() != before:
            result = self._look(operands, result)
        return out, with_moved(result, moved) if moved else result

    def _variant(self, operands: Any) -> Any:
        now = [getattr(value, "sharding", None) for value in (*operands[0], *operands[1])]
        shardings, jitted = self.last
        if now != shardings:
            jitted = self.variants.get(tuple(self._shardings(operands).items()), self.jitted)
            self.last = (now, jitted)
        return jitted

    def _shardings(self, operands: Any) -> dict[int, Any]:
        """The shardings of cells that are spread over a mesh; donated arrays still know theirs."""
        inputs = (*operands[0], *operands[1])
        found: dict[int, Any] = {}
        for place in range(self.lifted.cells):
            sharding = getattr(inputs[self.where[place]], "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.num_devices > 1:
                found[place] = sharding
        return found

    def _place(self, operands: Any, pick: Pick) -> tuple[Any, dict[int, Any]]:
        """Put the cells that `in_shardings` speaks of where it says; those that moved are to be stored."""
        donated, kept = operands[0], operands[1]
        values = pick((*donated, *kept) if donated else kept)
        try:
            now = [value.sharding for value in values]
        except AttributeError:  # a number or a NumPy array, which has none
            now = [getattr(value, "sharding", None) for value in values]
        if now == self.seen:
            return operands, {}
        if any(isinstance(value, (Tracer, jax.ShapeDtypeStruct)) for value in values):
            return operands, {}
        moved = [
            number
            for number, (have, want) in enumerate(zip(now, self.wanted, strict=True))
            if have is None or have != want
        ]
        if not moved:
            self.seen = now
            return operands, {}
        try:
            arrays = jax.device_put([values[number] for number in moved], [self.wanted[number] for number in moved])
        except ValueError as error:
            self._refuse_misfits(values, error)
            raise
        new = dict(zip([self.placed[number] for number in moved], arrays, strict=True))
        inputs = [*donated, *kept]
        for place, array in new.items():
            inputs[self.where[place]] = array
        return (type(donated)(inputs[: len(donated)]), type(kept)(inputs[len(donated) :]), *operands[2:]), new

    def _refuse_misfits(self, values: Sequence[Any], cause: Exception) -> None:
        """Say which cells their shardings do not cut evenly."""
        names = self.lifted.input_names()
        found = [
            (fit_cached(want.spec, tuple(leaf.shape), mesh_shape(want.mesh), 1, True), names[place])
            for place, want, value in zip(self.placed, self.wanted, values, strict=True)
            for leaf in jax.tree.leaves(value)
            if isinstance(want, NamedSharding) and hasattr(leaf, "shape")
        ]
        misfits = [(fitted, name, None) for fitted, name in found if fitted.corrections]
        if misfits:
            raise misfit_error("in_shardings do not cut these cells evenly", misfits) from cause

    def _look(self, operands: Any, result: Result) -> Result:
        """After a compilation: what became of the arguments, and of what was to come back?"""
        there = self._keep(self._shardings(operands), result)
        if there is result:  # else the next call is another program
            self._warn_of_donated(operands)
        return there

    def _warn_of_donated(self, operands: Any) -> None:
        donated = [(self.lifted.order[number], value) for number, value in enumerate(operands[0])]
        kept = [
            f"{self.lifted.input_names()[place]} ({_shown(_buffers(value))})"
            for place, value in donated
            if any(isinstance(leaf, jax.Array) and not _is_gone(leaf) for leaf in jax.tree.leaves(value))
        ]
        if kept:
            reason = "no result is of their shape and type"
            warnings.warn(f"{len(kept)} cells were donated in vain, {reason}: {', '.join(kept)}", stacklevel=2)

    def _keep(self, inputs: dict[int, Any], result: Result) -> Result:
        """Hold what came back elsewhere to where it came from."""
        values = list(result.values)
        strayed: dict[int, Any] = {}
        for number, place in enumerate(result.effects.written):
            want, value = inputs.get(place), values[number]
            if want is None or not isinstance(value, jax.Array) or isinstance(value, Tracer):
                continue
            if len(want.spec) <= value.ndim and not value.sharding.is_equivalent_to(want, value.ndim):
                strayed[place] = want
                values[number] = jax.device_put(value, want)
        if not strayed:
            return result
        run = weakly(self.lifted.run_pinned, {**self.lifted.pins, **strayed})
        self.variants[tuple(inputs.items())] = _jit(self.lifted, self.options, self.assigned, run)
        self.last, self.careful = ([], self.jitted), True
        return Result(result.effects, values)
