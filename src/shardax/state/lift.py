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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from shardax._compat import trace_state_clean
from shardax.errors import ShardaxError
from shardax.state.cells import Busy, in_place, innermost_scope
from shardax.state.effects import Result, carry_out, is_ref
from shardax.state.environment import Watch, closed_over
from shardax.state.faults import explain
from shardax.state.forms import NONE_CHOSEN, Chosen, Form, form_of, root_names
from shardax.state.graph import Graph, survey
from shardax.state.kinds import holds_cells, role_of
from shardax.state.lifted import Environment, Lifted, Misplaced, NewlyMet, Recompile, flat_arguments
from shardax.state.plan import Gathered, Plan, split

_TELLING = (NewlyMet, Misplaced, Recompile, Busy, TypeError, ValueError, RuntimeError)
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


def wait() -> None:
    """Wait until no other thread traces over closed-over cells."""
    with in_place:
        pass


def types_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The types of all arguments: what plans are kept under."""
    types = tuple(map(type, args))
    return (types, tuple(kwargs), tuple(map(type, kwargs.values()))) if kwargs else types


class Lift:
    """A function and everything that was lifted of it, one `Lifted` per structure."""

    def __init__(self, function: Callable[..., Any], options: Options, compile: Callable[..., Callable[..., Any]]):
        self.function, self.options, self.compile = function, options, compile
        self.context = options.context
        self.lifted: dict[Any, Lifted] = {}
        self.plans: dict[Any, tuple[Plan, ...]] = {}
        self.met: list[Any] = []  # closed-over cells that only tracing found
        self.skipped: set[int] = set()  # closed-over cells that tracing never touched
        self.on_lift: Callable[[Lifted, Lift], None] | None = None

    # ---- calling ----------------------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not trace_state_clean():
            return self._inside(args, kwargs)
        plans = self.plans.get(types_of(args, kwargs) if kwargs else tuple(map(type, args)))
        if not plans or (self.context is not None and plans[0].context != self.context()):
            return self._call(args, kwargs)
        plan = plans[0]  # the one that did last, in as few steps as can be
        lifted, found = plan.lifted, plan.gather(args, kwargs)
        call = lifted.call
        if found is None or call is None or not plan.plain:
            return self._call(args, kwargs)
        values, cells, _, _ = found
        donated, kept = lifted.part(values) if lifted.split is not None else ((), values)
        try:
            out, result = call(donated, kept, args if plan.take is None else plan.take(args), kwargs)
        except _TELLING as error:
            self._learn(error, plan.split(found, args, kwargs), args, kwargs)
            return self._call(args, kwargs, self.prepare(args, kwargs))
        effects = result.effects
        if effects.recipe is not None:
            return self.finish(plan.split(found, args, kwargs), out, result)
        effects.store(cells, result.values)
        return out

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], gathered: Gathered | None = None) -> Any:
        """A call from the beginning, for everything but a plain one that is like the last."""
        gathered = gathered or self.find(args, kwargs) or self.prepare(args, kwargs)
        while True:
            try:
                out, result = self.compiled(gathered)(*gathered.operands())
                break
            except _TELLING as error:
                self._learn(error, gathered, args, kwargs)
            gathered = self.prepare(args, kwargs)
        return self.finish(gathered, out, result)

    def _learn(self, error: Exception, gathered: Gathered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of what a trace found out, so that the next one goes well; any other error is raised, explained."""
        if isinstance(error, NewlyMet):
            self.meet(error.cells)
        elif isinstance(error, Busy):
            wait()
        elif isinstance(error, Misplaced):
            self.plans.pop(types_of(args, kwargs), None)
        elif isinstance(error, Recompile):
            gathered.lifted.compiled = None
        elif isinstance(error, (ValueError, RuntimeError)) or not holds_cells((gathered.plain, gathered.named)):
            self.explain(error, gathered)
            raise error

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
        """The call by a plan made earlier, if one still fits; the one that did last is tried first."""
        plans = self.plans.get(types_of(args, kwargs))
        if plans is None:
            return None
        context = None if self.context is None else self.context()
        for plan in plans:
            if context is not None and plan.context != context:
                continue
            gathered = plan.match(args, kwargs)
            if gathered is not None:
                if plan is not plans[0]:
                    self.plans[types_of(args, kwargs)] = (plan, *[other for other in plans if other is not plan])
                return gathered
        return None

    def dispatch(self, gathered: Gathered) -> tuple[Any, Result]:
        """Run the compiled function; compile it first where this is its first call."""
        try:
            return self.compiled(gathered)(*gathered.operands())
        except (TypeError, ValueError, RuntimeError) as error:
            self.explain(error, gathered)
            raise

    @staticmethod
    def explain(error: Exception, gathered: Gathered) -> None:
        """Raise a better error if what went into a call explains this one."""
        if isinstance(error, ShardaxError):
            return
        given = flat_arguments(gathered.lifted, gathered.plain, gathered.named, gathered.given)
        explain(error, zip(gathered.lifted.input_names(), gathered.values, strict=True), given)

    def compiled(self, gathered: Gathered) -> Callable[..., Any]:
        """What the transform made of the lifted function of a call."""
        lifted = gathered.lifted
        compiled = lifted.compiled
        if compiled is None:
            with lifted.lock:
                compiled = lifted.compiled = lifted.compiled or self.compile(lifted, gathered)
        return compiled

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call under another trace: the same, by the frameworks' own rules for reading and writing there."""
        while True:
            gathered = self.prepare(args, kwargs, keep=False)
            try:
                out, result = self.dispatch(gathered)
                break
            except NewlyMet as met:
                self.meet(met.cells)
            except Busy:
                if innermost_scope() is not None:
                    raise  # the call that opened it waits
                wait()
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
        context = None if self.context is None else self.context()
        lifted = self._lifted(form, found.graph, environment, pinned, context, watch)
        environment = lifted.environment
        cells = [found.cells[place] for place in lifted.own] + list(environment.cells)
        plan = Plan(lifted, found, watch, cells, context)
        if keep:
            self._keep(types_of(args, kwargs), plan)
        values = [role_of(type(cell)).get(cell) for cell in cells] + found.leaves
        nodes = found.nodes.__getitem__
        return Gathered(lifted, values, cells, nodes, found.leaves, *split(form, plan.take, args, kwargs))

    def _environment(self, reached: list[Any]) -> Environment:
        known = set(map(id, reached))
        cells = [*reached, *[cell for cell in self.met if id(cell) not in known]]
        return Environment([cell for cell in cells if id(cell) not in self.skipped], lambda cell: role_of(type(cell)))

    def _keep(self, key: Any, plan: Plan) -> None:
        self.plans[key] = (plan, *self.plans.get(key, ())[: _KEPT_PLANS - 1])

    def _lifted(
        self, form: Form, graph: Graph, environment: Environment, pinned: dict[int, int], context: Any, watch: Watch
    ) -> Lifted:
        specs = tuple(role_of(type(cell)).spec(cell) for cell in environment.cells)
        cells = tuple(map(id, environment.cells))
        key = (form, graph, cells, specs, tuple(pinned.items()), context, watch.structure)
        lifted = self.lifted.get(key)
        if lifted is None:
            lifted = Lifted(self.function, form, graph, environment, pinned, watch.surroundings)
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
        effects.store(cells, values)
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
        made = carry_out(recipe, values, gathered.cells, gathered.lifted.nodes(gathered.nodes), leaves)
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
