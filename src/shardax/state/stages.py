"""Ahead of time: a call traced, lowered and compiled, one class each whatever framework its cells are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardax.errors import CompiledCallError, Offence
from shardax.state.cells import Busy
from shardax.state.effects import Result, carry_out
from shardax.state.faults import explain, is_array, refuse_non_arrays
from shardax.state.forms import argument_names
from shardax.state.graph import Builder, paths_of
from shardax.state.kinds import role_of
from shardax.state.lift import Gathered, Lift, wait
from shardax.state.lifted import Lifted, NewlyMet, Recompile, flat_arguments
from shardax.state.retrace import differences


def stage(lift: Lift, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Gathered]:
    """Trace a call with JAX; returns its traced stage and the call."""
    while True:
        gathered = lift.prepare(args, kwargs)
        try:
            compiled: Any = lift.compiled(gathered)
            return getattr(compiled, "jitted", compiled).trace(*gathered.operands()), gathered
        except NewlyMet as met:
            lift.meet(met.cells)
        except Busy:
            wait()
        except Recompile:
            gathered.lifted.compiled = None
        except (TypeError, ValueError, RuntimeError) as error:
            lift.explain(error, gathered)
            raise


def out_info(traced: Any, gathered: Gathered) -> Any:
    """The result of a traced call as shapes, in the caller's structure."""
    out, result = traced.out_info
    result = Result(result.effects, [_shape(value) for value in result.values])
    return _arranged(gathered.lifted, out, result, [_shape(value) for value in gathered.values])


def _arranged(lifted: Lifted, out: Any, result: Result, inputs: Sequence[Any]) -> Any:
    """The result of a call in the caller's structure, of new cells that hold what stands for their values."""
    recipe = result.effects.recipe
    if recipe is None or recipe.out is None:
        return out
    written = dict(zip(result.effects.written, result.values, strict=False))
    closed = [(role_of(type(cell)), role_of(type(cell)).spec(cell)) for cell in lifted.environment.cells]
    families = [*(lifted.graph.specs[number] for number in lifted.own), *closed]
    cells = [family.make(spec, written.get(n, inputs[n])) for n, (family, spec) in enumerate(families)]
    places = {number: place for place, number in enumerate(lifted.own)}
    places |= {number: len(lifted.own) + place for number, place in lifted.pinned.items()}
    leaves = inputs[lifted.cells :]
    builder = Builder(lifted.graph.records, lambda ref: leaves[ref[1]] if ref[0] == "l" else cells[places[ref[1]]])
    nodes = lifted.nodes(builder.node, _copies(lifted, cells))
    return carry_out(recipe, result.values[len(written) :], cells, nodes, leaves)


def _copies(lifted: Lifted, cells: Sequence[Any]) -> list[Any]:
    """The nodes that are closed over, holding other cells."""
    closed = lifted.surroundings
    copies = {id(one.node): one.kind.create(type(one.node), one.opened.extra) for one in closed}
    held = dict(zip(map(id, lifted.environment.cells), cells[len(lifted.own) :], strict=True))
    for one, copy in zip(closed, copies.values(), strict=True):
        values = [copies.get(id(value), held.get(id(value), value)) for value in one.opened.values]
        one.kind.fill(copy, one.opened.keys, values, one.opened.extra)
    return list(copies.values())


def _shape(value: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), jax.tree.map(jax.typeof, value))


def _no_nodes(number: int) -> Any:
    raise LookupError(number)


class Stage:
    """What the three stages share: the call they were made for, seen through the caller's arguments."""

    _inner: Any

    def __init__(self, inner: Any, lift: Lift, gathered: Gathered, out_info: Any) -> None:
        self._inner, self._lift, self._out_info = inner, lift, out_info
        self._lifted: Lifted = gathered.lifted
        self._gathered = Gathered(gathered.lifted, (), (), _no_nodes, (), (), {}, None)
        self._count = len(gathered.values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._lift.options.title})"

    @property
    def args_info(self) -> Any:
        """What is known of every argument: `(args, kwargs)` with an info per array; state by its path."""
        (operands, _) = self._inner.args_info
        return self._view(operands)

    @property
    def in_tree(self) -> Any:
        """The structure of `args_info`."""
        return jax.tree.structure(self.args_info)

    @property
    def in_avals(self) -> Any:
        """The types of the arguments, arranged as `args_info`."""
        return self._view(self._inner.in_avals[0])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Which leaves of `args_info` are donated."""
        leaves = jax.tree.leaves(self.args_info)
        return tuple(place for place, info in enumerate(leaves) if getattr(info, "donated", False))

    @property
    def out_info(self) -> Any:
        """The result as shapes."""
        return self._out_info

    @property
    def out_tree(self) -> Any:
        """The structure of the result."""
        return jax.tree.structure(self._out_info)

    def _inputs(self, operands: Sequence[Any]) -> list[Any]:
        """Operands of the lifted function in the order of its inputs."""
        inputs: list[Any] = [None] * self._lifted.size
        for place, value in zip(self._lifted.order, (*operands[0], *operands[1]), strict=True):
            inputs[place] = value
        return inputs

    def _view(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands of the lifted function, arranged as the caller's arguments."""
        lifted, form = self._lifted, self._lifted.form
        inputs = self._inputs(operands)
        names = self._lift.root_names(form)
        roots = _by_root(lifted, names, inputs)
        args: list[Any] = [None] * form.count
        for place, root in zip(form.stateful, roots, strict=False):
            args[place] = root
        plain = operands[2] if len(operands) < 5 else (*operands[2], *operands[4][0])
        for place, value in zip((*form.plain, *form.donated), plain, strict=True):
            args[place] = value
        kwargs = dict(operands[3]) if len(operands) < 5 else {**operands[3], **operands[4][1]}
        kwargs |= dict(zip(form.stateful_names, roots[len(form.stateful) :], strict=True))
        closed = inputs[len(lifted.own) : lifted.cells]
        if closed:
            kwargs["closed over"] = tuple(closed)
        static = {place for place, _ in form.static}
        return tuple(value for place, value in enumerate(args) if place not in static), kwargs


def _misfit(value: Any, want: Any, where: Any) -> str | None:
    """Why a compiled function does not take this array."""
    if not is_array(value):
        return f"{value!r} ({type(value).__name__}) is no array"
    have = jax.typeof(value)
    if want is None:
        return f"{have} is given, and was not lowered"
    if (have.shape, have.dtype) != (want.shape, want.dtype):
        return f"{have} is given, {want} was lowered"
    if where is None or not getattr(value, "committed", False) or where.is_equivalent_to(value.sharding, have.ndim):
        return None
    return f"is on {value.sharding}, compiled for {where}"


def _named(lifted: Lifted, donated: Any, kept: Any, plain: Any, named: Any, *given: Any) -> dict[str, Any]:
    """Operands of the lifted function, every array under what it is called."""
    inputs, arguments, form = lifted.input_names(), argument_names(lifted.function, lifted.form.count), lifted.form
    if given:
        plain, named = (*plain, *given[0][0]), {**named, **given[0][1]}
    values = dict(zip([inputs[place] for place in lifted.order], (*donated, *kept), strict=True))
    values |= zip([arguments[place] for place in (*form.plain, *form.donated)], plain, strict=True)
    values |= named
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, value in values.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def _by_root(lifted: Lifted, names: list[str], inputs: Sequence[Any]) -> list[dict[str, Any]]:
    cells, leaves, _ = paths_of(lifted.graph, names)
    places = {number: place for place, number in enumerate(lifted.own)}
    found = [(path, inputs[places[number]]) for number, path in cells.items() if number in places]
    found += [(path, inputs[lifted.cells + number]) for number, path in leaves.items()]
    roots: list[dict[str, Any]] = []
    for name in names:
        inside = [(path[len(name) :], value) for path, value in found if path.startswith(name)]
        roots.append({tail.lstrip("."): value for tail, value in inside if not tail or tail[0] in ".["})
    return roots


class Traced(Stage):
    """A call traced to a jaxpr."""

    @property
    def jaxpr(self) -> Any:
        """The program, over flat arrays."""
        return self._inner.jaxpr

    def lower(self, *, lowering_platforms: tuple[str, ...] | None = None) -> Lowered:
        """Lower for the current platform, or for others that need not be present."""
        lowered = self._inner.lower(lowering_platforms=lowering_platforms)
        return Lowered(lowered, self._lift, self._gathered, self._out_info)


class Lowered(Stage):
    """A call lowered to StableHLO."""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compile for the devices at hand."""
        return Compiled(self._inner.compile(compiler_options), self._lift, self._gathered, self._out_info)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """The program as text ("stablehlo" or "hlo")."""
        return self._inner.as_text(dialect=dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program as an object of the compiler."""
        return self._inner.compiler_ir(dialect=dialect)

    def cost_analysis(self) -> Any:
        """Estimates of the compiler before optimisation."""
        return self._inner.cost_analysis()


class Compiled(Stage):
    """A compiled call: give it arguments of the structure it was lowered for."""

    def __init__(self, inner: Any, lift: Lift, gathered: Gathered, out_info: Any) -> None:
        super().__init__(inner, lift, gathered, out_info)
        self._call: Callable[..., Any] = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gathered = self._lift.find(args, kwargs) or self._lift.prepare(args, kwargs)
        if gathered.lifted is not self._lifted:
            raise CompiledCallError(
                f"{self!r} was lowered for other arguments",
                [Offence("", line) for line in self._differences(gathered)],
                remedy="lower again for these, or call the jitted function, which re-traces where it must",
            )
        try:
            out, result = self._call(*gathered.operands())
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, gathered)
            raise
        return self._lift.finish(gathered, out, result)

    call = __call__

    def _differences(self, gathered: Gathered) -> list[str]:
        old, new = self._lifted, gathered.lifted
        calls = [(form.count, form.names) for form in (old.form, new.form)]
        if calls[0] == calls[1]:
            return differences(old, new)
        shown = [f"{count} positional arguments, and {', '.join(names) or 'nothing'} by name" for count, names in calls]
        return [f"{shown[0]} → {shown[1]}"]

    def _explain(self, error: Exception, gathered: Gathered) -> None:
        """Say of the caller's arguments what JAX says of the flat list: of which other types they are, or where."""
        lifted, inner = self._lifted, self._inner
        cells = list(zip(lifted.input_names(), gathered.values, strict=True))
        refuse_non_arrays(cells, error)
        want, where = _named(lifted, *inner.in_avals[0]), _named(lifted, *inner.input_shardings[0])
        have = _named(lifted, *gathered.operands())
        offences = [Offence(name, "was lowered, and is not given") for name in want if name not in have]
        for name, value in have.items():
            problem = _misfit(value, want.get(name), where.get(name))
            offences += [Offence(name, problem)] if problem else []
        if offences:
            remedy = "lower again for these, or call the jitted function"
            raise CompiledCallError(f"{self!r} was lowered for other arguments", offences, remedy) from error
        explain(error, cells, flat_arguments(lifted, gathered.plain, gathered.named, gathered.given))

    def as_text(self) -> str | None:
        """The optimised program as text."""
        return self._inner.as_text()

    def cost_analysis(self) -> Any:
        """Estimates of the compiler."""
        return self._inner.cost_analysis()

    def memory_analysis(self) -> Any:
        """Bytes for arguments, results and temporaries, per device."""
        return self._inner.memory_analysis()

    def runtime_executable(self) -> Any:
        """The executable of the runtime."""
        return self._inner.runtime_executable()

    @property
    def input_shardings(self) -> Any:
        """The sharding of every argument, arranged as `args_info`."""
        return self._view(self._inner.input_shardings[0])

    @property
    def output_shardings(self) -> Any:
        """The sharding of every array of the result, in the structure of the result."""
        out, result = self._inner.output_shardings
        return _arranged(self._lifted, out, result, self._inputs(self._inner.input_shardings[0]))

    @property
    def input_layouts(self) -> Any:
        """The layout of every argument, arranged as `args_info`."""
        return self._view(self._inner.input_formats[0])
