"""One function under one structure: the pure function that JAX traces, and what was learnt while it did."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from shardax._compat import is_live
from shardax.arrays.constrain import constrain
from shardax.state.cells import OWN, Busy, Family, Scope, in_place, scope_of
from shardax.state.effects import Effects, Emission, Recipe, Result, after, is_ref
from shardax.state.environment import Outside, Surrounding, entered, names_of
from shardax.state.faults import refuse_leaked, refuse_non_arrays
from shardax.state.forms import Form, argument_names, root_names
from shardax.state.graph import Builder, Graph, Ref, paths_of
from shardax.state.kinds import discoverers, holds_cells
from shardax.state.prefixes import Assignment


class NewlyMet(Exception):
    """Raised out of a trace that read or wrote a cell it had not been given; `cells` become inputs of the next one."""

    def __init__(self, cells: list[Any]) -> None:
        super().__init__(cells)
        self.cells = cells


class Recompile(Exception):
    """Raised out of a trace that learnt that it has to be compiled otherwise."""


class Misplaced(Exception):
    """Raised out of a trace that found state in an argument which, when the call was split, held none."""


class Environment:
    """The closed-over cells of a lifted function, pinned by identity; `families` pairs each run of one family."""

    __slots__ = ("cells", "families", "identities", "names")

    def __init__(self, cells: Sequence[Any], family_of: Callable[[Any], Family]) -> None:
        self.cells = tuple(sorted(cells, key=lambda cell: family_of(cell).name))  # stable: one run per family
        self.families: list[tuple[Family, slice]] = []
        start = 0
        for place, cell in enumerate(self.cells):
            if place + 1 == len(self.cells) or family_of(self.cells[place + 1]) is not family_of(cell):
                self.families.append((family_of(cell), slice(start, place + 1)))
                start = place + 1
        self.identities = {id(cell): place for place, cell in enumerate(self.cells)}


class Lifted:
    """A function over objects made a function over arrays: `run(donated, kept, plain, named)`.

    The inputs are, in this order, the argument cells, the closed-over cells and the arrays inside stateful arguments;
    `donate` says which of them come in the first list; `given` are plain arguments to donate. `compiled` is what the
    transform made of `run`.
    """

    def __init__(
        self,
        function: Any,
        form: Form,
        graph: Graph,
        environment: Environment,
        pinned: dict[int, int],
        surroundings: Sequence[Surrounding] = (),
    ) -> None:
        self.function, self.form, self.graph, self.environment = function, form, graph, environment
        self.pinned = pinned  # argument cell -> the closed-over cell that it is
        self.surroundings = tuple(surroundings)  # nodes that are closed over: numbered after those of the graph
        self.own = tuple(place for place in range(len(graph.specs)) if place not in pinned)
        self.cells = len(self.own) + len(environment.cells)
        self.size = self.cells + graph.leaves
        self.donate: frozenset[int] = frozenset()
        self.pins: dict[int, Any] = {}  # cell -> the sharding it must come back with
        self.out_shardings: Any = None  # for a result that goes out as a recipe; see `needs_recipe`
        self.needs_recipe = False
        self.in_prefixes: Sequence[Any] | None = None  # one per root, for what is born below it
        self.updates = True  # are changes of structure carried out? (flax's `graph_updates`)
        self.on_recipe: Callable[[Recipe], None] | None = None  # refuses what a transform does not allow
        self.lock = threading.RLock()  # held while it is compiled
        self.compiled = None
        self.on_trace: Callable[[Lifted, Sequence[Any], Any], None] | None = None
        self.traces = 0
        self.idle: frozenset[int] = frozenset()  # closed-over cells that the last trace did not touch
        self.last: Effects | None = None
        self.set_donation(frozenset())

    @property
    def compiled(self) -> Callable[..., Any] | None:
        """What the transform made of `run`, once it has."""
        return self._compiled

    @compiled.setter
    def compiled(self, compiled: Callable[..., Any] | None) -> None:
        self._compiled = compiled
        self.call: Callable[..., Any] | None = getattr(compiled, "call", compiled)  # bound: Python calls it faster

    def set_donation(self, donate: frozenset[int]) -> None:
        """Decide which inputs are donated; to be followed by compiling anew."""
        self.donate = donate
        given, kept = sorted(donate), [place for place in range(self.size) if place not in donate]
        self.order = [*given, *kept]
        self.split = None if not donate else (_take(given), _take(kept))

    def part(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Inputs as the two lists that `run` takes."""
        if self.split is None:
            return _NOTHING, inputs
        return self.split[0](inputs), self.split[1](inputs)

    def input_names(self) -> list[str]:
        """What the inputs are called: the paths of cells and arrays below arguments, the names of closed-over cells."""
        cells, leaves, _ = paths_of(self.graph, root_names(self.function, self.form))
        closed = [f"closed-over {name}" for name in names_of(self.function, self.environment.cells)]
        return [cells[n] for n in self.own] + closed + [leaves[n] for n in range(self.graph.leaves)]

    def nodes(self, argument_node: Callable[[int], Any], closed: Sequence[Any] = ()) -> Callable[[int], Any]:
        """Nodes by their number: those of the arguments, then those that are closed over, or what stands for them."""
        first, closed = len(self.graph.records), closed or [surrounding.node for surrounding in self.surroundings]
        return lambda number: argument_node(number) if number < first else closed[number - first]

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def run(self, donated: Any, kept: Any, plain: Any, named: Any, given: Any = ((), {})) -> tuple[Any, Result]:
        """What JAX traces. Stand-ins are built from the structure, so no argument is kept alive by it."""
        return self.run_pinned(self.pins, donated, kept, plain, named, given)

    def run_pinned(
        self,
        pins: dict[int, Any],
        donated: Sequence[Any],
        kept: Sequence[Any],
        plain: Any,
        named: Any,
        given: tuple[Any, Any] = ((), {}),
    ) -> tuple[Any, Result]:
        """`run`, with the given cells held to shardings."""
        plain, named = (*plain, *given[0]), {**named, **given[1]}
        inputs: list[Any] = [None] * self.size
        for place, value in zip(self.order, (*donated, *kept), strict=True):
            inputs[place] = value
        self.traces += 1
        if self.on_trace is not None:
            self.on_trace(self, inputs, (plain, named))
        if holds_cells((plain, named), kinds=True):
            raise Misplaced
        raws, leaves = inputs[: self.cells], inputs[self.cells :]
        with scope_of() as scope:
            before = [_contents(raw) for raw in raws]
            lasts: list[Any] = []
            with self._redirected(scope, raws[len(self.own) :], lasts), entered(self.surroundings):
                families = [self.graph.specs[number] for number in self.own]
                stand_ins = [family.make(spec, raw) for (family, spec), raw in zip(families, raws, strict=False)]
                builder, args, kwargs = self._arguments(stand_ins, leaves, plain, named)
                out = self.function(*args, **kwargs)
                emission, out = self._emit(builder, stand_ins, leaves, (plain, named), out)
                specs = [family.spec(cell) for (family, _), cell in zip(families, stand_ins, strict=True)]
                after = [family.get(cell) for (family, _), cell in zip(families, stand_ins, strict=True)]
            after += lasts
            self.idle = frozenset(
                place
                for place, cell in enumerate(self.environment.cells)
                if (slot := scope.slots.get(id(cell))) is not None and not (slot.read or slot.written)
            )
        for place, spec in enumerate(specs if self.updates else ()):
            if spec != self.graph.specs[self.own[place]][1]:
                emission.recipe.respecs.append((place, spec))
        written = tuple(
            place for place in range(self.cells) if place in self.donate or not _unchanged(before[place], after[place])
        )
        if any(not isinstance(after[place], Tracer) for place in written):
            names = self.input_names()
            refuse_non_arrays((names[place], after[place]) for place in written)
        if any(
            isinstance(leaf, Tracer) and not is_live(leaf)
            for place in written
            for leaf in jax.tree.leaves(after[place])
        ):
            names = self.input_names()
            refuse_leaked((names[place], after[place]) for place in written)
        values = [hold(after[place], pins.get(place)) for place in written]
        self.last = Effects(written, emission.recipe or None)
        return out, Result(self.last, [*values, *emission.values])

    @contextmanager
    def _redirected(self, scope: Scope, closed: Sequence[Any], lasts: list[Any]) -> Generator[None]:
        """While it is open, the closed-over cells hold `closed`; what they held last comes into `lasts`."""
        tokens: list[tuple[Family, Any]] = []
        failure = None
        exclusive = bool(discoverers or self.surroundings) or any(
            family is not OWN for family, _ in self.environment.families
        )
        if exclusive and not in_place.acquire(blocking=False):
            raise Busy  # to wait here, inside a trace that others may want the result of, could be to wait for ever
        try:
            for family, run in self.environment.families:
                tokens.append((family, family.enter(scope, self.environment.cells[run], closed[run])))
            for family in discoverers:
                if all(family is not entered for entered, _ in tokens):
                    tokens.append((family, family.enter(scope, (), ())))
            yield
        except Exception as error:  # noqa: BLE001  raised again, unless it came of cells that had not been given
            failure = error
        finally:
            for family, token in tokens:
                lasts += family.leave(scope, token)
            if exclusive:
                in_place.release()
        if scope.found:
            raise NewlyMet(scope.found) from failure
        if failure is not None:
            raise failure

    def _arguments(
        self, stand_ins: Sequence[Any], leaves: Sequence[Any], plain: Any, named: Any
    ) -> tuple[Builder, list[Any], dict[str, Any]]:
        place_of = {number: place for place, number in enumerate(self.own)}

        def resolve(ref: Ref) -> Any:
            tag, number = ref
            if tag == "l":
                return leaves[number]
            if number in self.pinned:
                return self.environment.cells[self.pinned[number]]
            return stand_ins[place_of[number]]

        builder = Builder(self.graph.records, resolve)
        roots = [builder.ref(ref) for ref in self.graph.roots]
        form = self.form
        args: list[Any] = [None] * form.count
        kwargs: dict[str, Any] = dict.fromkeys(form.names)
        for place, root in zip(form.stateful, roots, strict=False):
            args[place] = root
        for name, root in zip(form.stateful_names, roots[len(form.stateful) :], strict=True):
            kwargs[name] = root
        for place, value in form.static:
            args[place] = value.value
        for name, value in form.static_names:
            kwargs[name] = value.value
        for place, value in zip((*form.plain, *form.donated), plain, strict=True):
            args[place] = value
        kwargs.update(named)
        return builder, args, kwargs

    def _emit(
        self, builder: Builder, stand_ins: Sequence[Any], leaves: Sequence[Any], given: Any, out: Any
    ) -> tuple[Emission, Any]:
        cells = {id(cell): place for place, cell in enumerate(stand_ins)}
        cells.update({id(cell): len(self.own) + place for place, cell in enumerate(self.environment.cells)})
        mutable = {n: node for n, node in builder.nodes.items() if self.graph.records[n].kind.mutable}
        records, contents = [*self.graph.records], {**builder.contents}
        for number, surrounding in enumerate(self.surroundings, len(records)):
            mutable[number], contents[number] = surrounding.node, list(surrounding.opened.values)
            records.append(surrounding.record())
        kept = {id(leaf): n for n, leaf in enumerate(leaves) if is_ref(leaf) or (len(self.own) + n) not in self.donate}
        refs = [leaf for leaf in jax.tree.leaves(given) if is_ref(leaf)]
        kept.update({id(leaf): len(leaves) + place for place, leaf in enumerate(refs)})
        static = [value.value for _, value in (*self.form.static, *self.form.static_names)]
        numbers = {id(node): number for number, node in mutable.items()}
        emission = Emission(cells, numbers, kept, self.graph.boxes, Outside(self.function, *static))
        if self.updates:
            emission.changes(mutable, contents, records)
            self._warn_of_arrays(emission.recipe)
            self._shard_born(emission)
        boxes = {id(leaves[number]) for number in self.graph.boxes}
        if (
            self.needs_recipe
            or holds_cells(out)
            or any(is_ref(leaf) or id(leaf) in boxes for leaf in jax.tree.leaves(out))
        ):
            emission.recipe.out = emission.ref(out, "data", False)
            self._shard(emission)
            out = None
        if self.on_recipe is not None:
            self.on_recipe(emission.recipe)
        return emission, out

    def _warn_of_arrays(self, recipe: Recipe) -> None:
        """A plain array and a new cell in a closed-over node are new structure: each that is put is another trace."""
        first = len(self.graph.records)
        nodes = [surrounding.node for surrounding in self.surroundings]
        for number, record in recipe.changed:
            before = () if number < first else self.surroundings[number - first].opened.keys
            refs = zip(record.keys, record.refs, strict=True)
            keys = [key for key, (tag, _) in refs if tag == "v" or (tag == "b" and key in before)]
            if number >= first and keys:
                name = names_of(self.function, nodes)[number - first]
                warnings.warn(
                    f"closed-over {', '.join(name + record.kind.step(key) for key in keys)} is put there anew by the "
                    "call, and so every call is traced again: write to a cell, or pass the object as an argument",
                    stacklevel=2,
                )

    def _shard(self, emission: Emission) -> None:
        """Hold what a recipe makes to `out_shardings`."""
        if self.out_shardings is None:
            return
        if not self.needs_recipe:
            self.needs_recipe = True
            raise Recompile  # jax.jit was given shardings for a result that does not go out as it is
        assert emission.recipe.out is not None
        assignment = Assignment(emission.recipe.records, lambda ref: emission.born[ref[1]], "out_shardings")
        assignment.root(emission.recipe.out, self.out_shardings, "result")
        assignment.check()
        _hold_all(emission, assignment)

    def _shard_born(self, emission: Emission) -> None:
        """Hold what was born below an argument to the sharding of the argument, as what was there before."""
        if self.in_prefixes is None or not emission.recipe.changed:
            return
        records = after(self.graph.records, emission.recipe)
        assignment = Assignment(records, lambda ref: emission.born[ref[1]], "in_shardings")
        names = root_names(self.function, self.form)
        for ref, prefix, name in zip(self.graph.roots, self.in_prefixes, names, strict=True):
            assignment.root(ref if ref[0] == "n" else ("s", None), prefix, name)
        assignment.check()
        _hold_all(emission, assignment)


def flat_arguments(
    lifted: Lifted, plain: Sequence[Any], named: dict[str, Any], given: tuple[Any, Any] | None
) -> list[tuple[str, Any]]:
    """The plain arguments of a call, `given` being those to donate, with their names."""
    names, form = argument_names(lifted.function, lifted.form.count), lifted.form
    donated, donated_named = given or ((), {})
    places = [names[place] for place in (*form.plain, *form.donated)]
    return [*zip(places, (*plain, *donated), strict=True), *named.items(), *donated_named.items()]


def _hold_all(emission: Emission, assignment: Assignment) -> None:
    for (tag, number), (sharding, _) in assignment.found.items():
        if tag in "bv":
            place = emission.recipe.born[number][2] if tag == "b" else number
            emission.values[place] = hold(emission.values[place], sharding)


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A method for `jax.jit`, with its first arguments: what JAX holds, Python's collector does not see.

    Held by its object, a jitted bound method would keep it, and all that it closes over, alive for ever.
    """
    here = weakref.WeakMethod(method)

    def run(*operands: Any) -> Any:
        alive = here()
        assert alive is not None, "the lifted function is held by whoever calls what was made of it"
        return alive(*first, *operands)

    return run


_NOTHING: tuple[Any, ...] = ()


def hold(value: Any, sharding: Any) -> Any:
    """Hold a traced value to a sharding, as its mesh wants to be told; None leaves it alone."""
    if sharding is None:
        return value
    mesh = getattr(sharding, "mesh", None)
    kinds = set(mesh.axis_types) if mesh is not None else {AxisType.Auto}
    if len(kinds) > 1:
        return constrain(value, sharding, on_misfit="error")
    if AxisType.Explicit in kinds:
        return jax.sharding.reshard(value, sharding)
    return jax.lax.with_sharding_constraint(value, sharding)


def _take(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(places) == 0:
        return lambda _: _NOTHING
    if len(places) == 1:
        return lambda inputs, place=places[0]: (inputs[place],)
    return itemgetter(*places)


def _contents(raw: Any) -> tuple[Any, Any]:
    """A raw value and, if it is a tree that may be changed in place, its leaves and structure."""
    return raw, None if isinstance(raw, Tracer) else jax.tree.flatten(raw)


def _unchanged(before: tuple[Any, Any], after: Any) -> bool:
    raw, flat = before
    if flat is None:
        return after is raw
    leaves, structure = jax.tree.flatten(after)
    return structure == flat[1] and all(a is b for a, b in zip(leaves, flat[0], strict=True))
