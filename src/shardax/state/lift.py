"""The one place where state is threaded: functions over objects that hold cells, run as functions over flat arrays.

How a call goes
    1. `Plan.match` verifies in C-speed loops that the arguments have the structure of an earlier call, that the
       function still closes over the same cells, and gathers their values. Any doubt: `Lift.prepare` walks again.
    2. The compiled function takes one flat list of arrays and returns `(out, Result)`: only what was written returns.
    3. The written cells are set, and what changed in the structure is carried out on the caller's own objects.
Nothing is written before the compiled call has returned, so an exception leaves every cell as it was.

How a transform plugs in
    `Lift(function, options, compile)`: `compile(lifted, gathered)` receives a `Lifted` (one function under one
    structure) and its first call, and returns a callable `(donated, kept, plain, named[, given]) -> (out, Result)`,
    usually `jax.jit(lifted.run)`. `jit.py` and `shard_map.py` differ only there.

How a framework plugs in (`frameworks/`)
    A `Family` (cells.py) says how its cells are read, written and made; a `Kind` (kinds.py) how its nodes are opened
    and built; `kinds.register(find)` tells which class is which. Cells reached through arguments become fresh stand-ins
    inside the trace; cells that are closed over are pinned by identity and redirected by `Family.enter`/`leave`.
    A family whose framework can say which cells are touched reports unknown ones in `scope.found`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax

from shardax._compat import trace_state_clean
from shardax.state.cells import Family
from shardax.state.effects import Result, carry_out, is_ref
from shardax.state.environment import Watch, closed_over
from shardax.state.faults import explain
from shardax.state.forms import NONE_CHOSEN, Chosen, Form, form_of, root_names
from shardax.state.graph import Graph, Survey, survey
from shardax.state.kinds import holds_cells, role_of
from shardax.state.lifted import Environment, Lifted, Misplaced, NewlyMet, Recompile, flat_arguments
from shardax.state.program import Match, Program

_KEPT = 512  # structures
_KEPT_CLOSURES = 4  # sets of closed-over cells, which are kept alive
_KEPT_PLANS = 32  # per tuple of argument types; each is small, but its static values live as long as it does


@dataclass(frozen=True)
class Options:
    """What of a transform's arguments concerns the lift."""

    title: str
    static: Chosen = NONE_CHOSEN
    donate: Chosen = NONE_CHOSEN
    graph: tuple[bool | None, bool | None] = (None, None)  # flax's `graph` and `graph_updates`
    context: Callable[[], Any] | None = None  # what else the lifted function depends on, as a hashable value


@dataclass
class Gathered:
    """One call, split: the values that go in and the objects that results go to."""

    lifted: Lifted
    values: Sequence[Any]  # the inputs, in the order of `Lifted`
    cells: Sequence[Any]
    nodes: Callable[[int], Any]
    leaves: Sequence[Any]
    plain: Sequence[Any]
    named: dict[str, Any]
    given: tuple[Any, Any] | None

    def operands(self) -> tuple[Any, ...]:
        """The arguments of the compiled function."""
        donated, kept = self.lifted.part(self.values)
        if self.given is None:
            return donated, kept, self.plain, self.named
        return donated, kept, self.plain, self.named, self.given


class Plan:
    """The verified way from the arguments of one structure to the inputs of one compiled function."""

    __slots__ = ("context", "families", "form", "lifted", "own", "pinned", "plain", "program", "roots", "watch")

    def __init__(self, lifted: Lifted, found: Survey, watch: Watch, cells: Sequence[Any], context: Any) -> None:
        form = lifted.form
        self.context = context
        self.lifted, self.form, self.watch = lifted, form, watch
        self.program = Program(found) if found.levels else None
        self.own = None if len(lifted.own) == len(found.cells) else lifted.own
        self.pinned = [(place, lifted.environment.cells[number]) for place, number in lifted.pinned.items()]
        self.families = _families(cells)
        self.plain = None if len(form.plain) == form.count else _taker(form.plain)
        self.roots = _taker(form.stateful)

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
        """Everything the call needs, or None where the arguments are not what they were."""
        form, lifted = self.form, self.lifted
        if not self.watch.holds() or not form.static_alike(args, kwargs):
            return None
        cells: Sequence[Any] = ()
        match = _NO_MATCH
        if self.program is not None:
            roots = self.roots(args)
            if form.stateful_names:
                roots = [*roots, *[kwargs[name] for name in form.stateful_names]]
            match = self.program.match(roots)
            if match is None:
                return None
            cells = match.cells
            if lifted.pinned or lifted.environment.cells:
                joined = self._with_environment(cells)
                if joined is None:
                    return None
                cells = joined
        else:
            cells = lifted.environment.cells
        values: Sequence[Any] = []  # a list always: to jax a tuple would be another structure
        for family, run, snapshot in self.families:
            read = family.read_all(cells if run is None else cells[run], snapshot)
            if read is None:
                return None
            values = read if run is None else [*values, *read]
        if match.leaves:
            values = [*values, *match.leaves]
        return Gathered(
            lifted, values, cells, _Numbered(match.nodes), match.leaves, *_plain(form, self.plain, args, kwargs)
        )

    def _with_environment(self, cells: Sequence[Any]) -> Sequence[Any] | None:
        environment = self.lifted.environment
        for place, cell in self.pinned:
            if cells[place] is not cell:
                return None
        if self.own is not None:
            cells = [cells[place] for place in self.own]
        if environment.cells and not environment.identities.keys().isdisjoint(map(id, cells)):
            return None
        return [*cells, *environment.cells]


class _Numbered:
    """Finds a node of a match by its number."""

    __slots__ = ("groups",)

    def __init__(self, groups: list[Sequence[Any]]) -> None:
        self.groups = groups

    def __call__(self, number: int) -> Any:
        for group in self.groups:
            if number < len(group):
                return group[number]
            number -= len(group)
        raise IndexError(number)


_NO_MATCH = Match((), (), [])


def _taker(places: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if not places:
        return lambda _: ()
    if len(places) == 1:
        return lambda args, place=places[0]: (args[place],)
    return itemgetter(*places)


def _plain(form: Form, take: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    plain = args if take is None else take(args)
    if not (form.stateful_names or form.static_names or form.donated_names):
        named = kwargs
    else:
        named = {name: kwargs[name] for name in form.plain_names}
    given = None
    if form.donated or form.donated_names:
        given = (tuple(args[place] for place in form.donated), {name: kwargs[name] for name in form.donated_names})
    return plain, named, given


def _families(cells: Sequence[Any]) -> list[tuple[Family, slice | None, Any]]:
    runs: list[tuple[Family, slice | None, Any]] = []
    start = 0
    for place, cell in enumerate(cells):
        family = role_of(type(cell))
        if place + 1 == len(cells) or role_of(type(cells[place + 1])) is not family:
            run = slice(start, place + 1)
            runs.append((family, run, family.snapshot(cells[run])))
            start = place + 1
    if len(runs) == 1:
        return [(runs[0][0], None, runs[0][2])]
    return runs


class Lift:
    """A function and everything that was lifted of it, one `Lifted` per structure."""

    def __init__(self, function: Callable[..., Any], options: Options, compile: Callable[..., Callable[..., Any]]):
        self.function, self.options, self.compile = function, options, compile
        self.lifted: dict[Any, Lifted] = {}
        self.plans: dict[Any, tuple[Plan, ...]] = {}
        self.met: list[Any] = []  # closed-over cells that only tracing found
        self.skipped: set[int] = set()  # closed-over cells that tracing never touched
        self.on_lift: Callable[[Lifted, Lift], None] | None = None

    # ---- calling ----------------------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not trace_state_clean():
            return self._inside(args, kwargs)
        gathered = self.find(args, kwargs) or self.prepare(args, kwargs)
        while True:
            try:
                out, result = self.dispatch(gathered)
                break
            except NewlyMet as met:
                self.meet(met.cells)
            except Misplaced:
                self.plans.pop(self._types(args, kwargs), None)
            except Recompile:
                gathered.lifted.compiled = None
            except TypeError:
                if not self._misplaced(gathered):
                    raise
            gathered = self.prepare(args, kwargs)
        return self.finish(gathered, out, result)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
        """The call by a plan made earlier, if one still fits."""
        key = self._types(args, kwargs)
        context = self.options.context() if self.options.context is not None else None
        for place, plan in enumerate(self.plans.get(key, ())):
            if context is not None and plan.context != context:
                continue
            gathered = plan.match(args, kwargs)
            if gathered is not None:
                if place:
                    plans = self.plans[key]
                    self.plans[key] = (plan, *[other for other in plans if other is not plan])
                return gathered
        return None

    def dispatch(self, gathered: Gathered) -> tuple[Any, Result]:
        """Run the compiled function; compile it first where this is its first call."""
        try:
            return self.compiled(gathered)(*gathered.operands())
        except (TypeError, ValueError) as error:
            given = flat_arguments(gathered.lifted, gathered.plain, gathered.named)
            explain(error, zip(gathered.lifted.input_names(), gathered.values, strict=True), given)
            raise

    def compiled(self, gathered: Gathered) -> Callable[..., Any]:
        """What the transform made of the lifted function of a call."""
        lifted = gathered.lifted
        compiled = lifted.compiled
        if compiled is None:
            with lifted.lock:
                compiled = lifted.compiled = lifted.compiled or self.compile(lifted, gathered)
        return compiled

    @staticmethod
    def _types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs:
            return tuple(map(type, args))
        return tuple(map(type, args)), tuple(kwargs), tuple(map(type, kwargs.values()))

    def _misplaced(self, gathered: Gathered) -> bool:
        """Did a cell stand where the plan expected none, so that JAX refused it?"""
        return holds_cells((gathered.plain, gathered.named))

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call under another trace: the same, by the frameworks' own rules for reading and writing there."""
        while True:
            gathered = self.prepare(args, kwargs, keep=False)
            try:
                out, result = self.dispatch(gathered)
                break
            except NewlyMet as met:
                self.meet(met.cells)
            except Recompile:
                gathered.lifted.compiled = None
        return self.finish(gathered, out, result, inside=True)

    # ---- preparing --------------------------------------------------------------------------------------------------

    def meet(self, cells: list[Any]) -> None:
        known = set(map(id, self.met))
        self.met += [cell for cell in cells if id(cell) not in known]
        self.skipped.clear()

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: bool = True) -> Gathered:
        """Walk the arguments and the closure, and find or make the lifted function for what is there."""
        form = form_of(args, kwargs, self.options.static, self.options.donate, self.options.title)
        roots = [args[place] for place in form.stateful] + [kwargs[name] for name in form.stateful_names]
        found = survey([(root, "data") for root in roots])
        reached, watch = closed_over(self.function)
        environment = self._environment(reached)
        pinned = {
            place: environment.identities[id(cell)]
            for place, cell in enumerate(found.cells)
            if id(cell) in environment.identities
        }
        context = self.options.context() if self.options.context is not None else None
        lifted = self._lifted(form, found.graph, environment, pinned, context)
        environment = lifted.environment
        cells = [found.cells[place] for place in lifted.own] + list(environment.cells)
        plan = Plan(lifted, found, watch, cells, context)
        if keep:
            self._keep(self._types(args, kwargs), plan)
        values = [role_of(type(cell)).get(cell) for cell in cells] + found.leaves
        nodes = found.nodes.__getitem__
        return Gathered(lifted, values, cells, nodes, found.leaves, *_plain(form, plan.plain, args, kwargs))

    def _environment(self, reached: list[Any]) -> Environment:
        known = set(map(id, reached))
        cells = [*reached, *[cell for cell in self.met if id(cell) not in known]]
        return Environment([cell for cell in cells if id(cell) not in self.skipped], lambda cell: role_of(type(cell)))

    def _keep(self, key: Any, plan: Plan) -> None:
        self.plans[key] = (plan, *self.plans.get(key, ())[: _KEPT_PLANS - 1])

    def _lifted(
        self, form: Form, graph: Graph, environment: Environment, pinned: dict[int, int], context: Any
    ) -> Lifted:
        specs = tuple(role_of(type(cell)).spec(cell) for cell in environment.cells)
        key = (form, graph, tuple(map(id, environment.cells)), specs, tuple(pinned.items()), context)
        lifted = self.lifted.get(key)
        if lifted is None:
            lifted = Lifted(self.function, form, graph, environment, pinned)
            lifted.updates = self.options.graph[1] is not False
            if self.on_lift is not None:
                self.on_lift(lifted, self)
            lifted = self.lifted.setdefault(key, lifted)  # it holds the cells of its environment: their ids stay theirs
            self._forget()
        return lifted

    def _forget(self) -> None:
        """Let go of what has not been needed for long: of closures that were given other cells, sooner."""
        entries = list(self.lifted.items())[::-1]
        latest = list(dict.fromkeys(key[2] for key, _ in entries))[:_KEPT_CLOSURES]
        gone = {id(lifted) for place, (key, lifted) in enumerate(entries) if place >= _KEPT or key[2] not in latest}
        if not gone:
            return
        for key, lifted in entries:
            if id(lifted) in gone:
                self.lifted.pop(key, None)
        for key, plans in list(self.plans.items()):
            self.plans[key] = tuple(plan for plan in plans if id(plan.lifted) not in gone)

    # ---- finishing --------------------------------------------------------------------------------------------------

    def finish(self, gathered: Gathered, out: Any, result: Result, inside: bool = False) -> Any:
        """Write what was written, change what was changed, and return what the function returned."""
        effects, values, cells = result.effects, result.values, gathered.cells
        if effects.recipe is not None:
            out = self._carry_out(gathered, out, result)
        if inside:
            for place, value in zip(effects.written, values, strict=False):
                role_of(type(cells[place])).set(cells[place], value)
            return out
        for family, written, part in effects.writes(cells):
            family.write_all(written(cells), values[part])
        return out

    def _carry_out(self, gathered: Gathered, out: Any, result: Result) -> Any:
        recipe = result.effects.recipe
        assert recipe is not None
        values = result.values[len(result.effects.written) :]
        leaves = [*gathered.leaves]
        if recipe.out is not None or recipe.changed:
            given = (
                (gathered.plain, gathered.named)
                if gathered.given is None
                else ((*gathered.plain, *gathered.given[0]), {**gathered.named, **gathered.given[1]})
            )
            leaves += [leaf for leaf in jax.tree.leaves(given) if is_ref(leaf)]
        made = carry_out(recipe, values, gathered.cells, gathered.nodes, leaves)
        for place, spec in recipe.respecs:
            role_of(type(gathered.cells[place])).respec(gathered.cells[place], spec)
        return out if recipe.out is None else made

    def clear(self) -> None:
        """Forget everything."""
        self.plans.clear()
        self.lifted.clear()
        self.met.clear()
        self.skipped.clear()

    # ---- names ------------------------------------------------------------------------------------------------------

    def root_names(self, form: Form) -> list[str]:
        """What the stateful arguments are called."""
        return root_names(self.function, form)

    def cell_paths(self, lifted: Lifted) -> list[str]:
        """The paths of the cells of a lifted function, in their order."""
        return lifted.input_names()[: lifted.cells]
