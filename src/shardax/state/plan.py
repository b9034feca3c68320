"""The verified way from the arguments of a call to the inputs of a function that was lifted before.

This is what every call but the first goes through, so it is written for speed: what can be known when the plan is made
is known then, and what is left is a handful of C-speed loops and as few Python frames as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from shardax.state.cells import Family
from shardax.state.environment import Watch
from shardax.state.forms import Form
from shardax.state.graph import Survey
from shardax.state.kinds import role_of
from shardax.state.lifted import Lifted
from shardax.state.program import Match, Program

NO_MATCH = Match((), (), (), ())


class Gathered:
    """One call, split: the values that go in and the objects that results go to."""

    __slots__ = ("cells", "given", "leaves", "lifted", "named", "nodes", "plain", "values")

    def __init__(
        self,
        lifted: Lifted,
        values: Sequence[Any],  # the inputs, in the order of `Lifted`; a list always, as JAX would trace a tuple anew
        cells: Sequence[Any],
        nodes: Callable[[int], Any],
        leaves: Sequence[Any],
        plain: Sequence[Any],
        named: dict[str, Any],
        given: tuple[Any, Any] | None,
    ) -> None:
        self.lifted, self.values, self.cells, self.nodes, self.leaves = lifted, values, cells, nodes, leaves
        self.plain, self.named, self.given = plain, named, given

    def operands(self) -> tuple[Any, ...]:
        """The arguments of the compiled function."""
        donated, kept = self.lifted.part(self.values)
        if self.given is None:
            return donated, kept, self.plain, self.named
        return donated, kept, self.plain, self.named, self.given


class Plan:
    """How to gather a call whose arguments have one structure, and how to tell that they have it."""

    __slots__ = (
        "cells",
        "context",
        "form",
        "holds",
        "joins",
        "lifted",
        "own",
        "pinned",
        "plain",
        "program",
        "read",
        "roots",
        "snapshot",
        "static",
        "take",
    )

    def __init__(self, lifted: Lifted, found: Survey, watch: Watch, cells: Sequence[Any], context: Any) -> None:
        form, environment = lifted.form, lifted.environment
        self.context, self.lifted, self.form = context, lifted, form
        self.holds = watch.holds if watch.watches else None
        self.static = bool(form.static or form.static_names)
        self.program = Program(found) if found.levels else None
        self.roots = taker(form.stateful)
        self.cells: Sequence[Any] = environment.cells
        self.joins = bool(lifted.pinned or environment.cells)
        self.own = None if len(lifted.own) == len(found.cells) else lifted.own
        self.pinned = [(place, environment.cells[number]) for place, number in lifted.pinned.items()]
        self.read, self.snapshot = reader_of(cells)
        self.take = None if len(form.plain) == form.count else taker(form.plain)
        self.plain = not (form.donated or form.donated_names or form.stateful_names or form.static_names)

    def gather(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs, the cells and the rest of what was found, or None where the arguments are not what they were."""
        if self.holds is not None and not self.holds():
            return None
        if self.static and not self.form.static_alike(args, kwargs):
            return None
        if self.program is None:
            values = self.read(self.cells, self.snapshot)
            return None if values is None else (values, self.cells, NO_MATCH)
        roots = self.roots(args)
        if self.form.stateful_names:
            roots = [*roots, *[kwargs[name] for name in self.form.stateful_names]]
        match = self.program.match(roots)
        if match is None:
            return None
        cells = self._with_environment(match.cells) if self.joins else match.cells
        values = None if cells is None else self.read(cells, self.snapshot)
        if values is None:
            return None
        return ([*values, *match.leaves] if match.leaves else values), cells, match

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
        """A call whose arguments are what they were, split."""
        found = self.gather(args, kwargs)
        return None if found is None else self.split(found, args, kwargs)

    def split(self, found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered:
        """What was gathered, with the rest of the call."""
        values, cells, match = found
        given = split(self.form, self.take, args, kwargs)
        return Gathered(self.lifted, values, cells, match.node, match.leaves, *given)

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


def taker(places: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes the arguments in these places."""
    if not places:
        return lambda _: ()
    if len(places) == 1:
        return lambda args, place=places[0]: (args[place],)
    return itemgetter(*places)


def split(form: Form, take: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """What of a call goes to JAX as it is: positional, named, and both of those to donate."""
    plain = args if take is None else take(args)
    if not (form.stateful_names or form.static_names or form.donated_names):
        named = kwargs
    else:
        named = {name: kwargs[name] for name in form.plain_names}
    given = None
    if form.donated or form.donated_names:
        given = (tuple(args[place] for place in form.donated), {name: kwargs[name] for name in form.donated_names})
    return plain, named, given


def reader_of(cells: Sequence[Any]) -> tuple[Callable[[Sequence[Any], Any], Any], Any]:
    """How the values of cells like these are read, and the snapshot that it takes."""
    runs: list[tuple[Family, slice, Any]] = []
    start = 0
    for _, members in groupby(cells, lambda cell: id(role_of(type(cell)))):
        run = list(members)
        family = role_of(type(run[0]))
        runs.append((family, slice(start, start + len(run)), family.snapshot(run)))
        start += len(run)
    if len(runs) == 1:
        return runs[0][0].read_all, runs[0][2]
    return _read_runs, runs


def _read_runs(cells: Sequence[Any], runs: list[tuple[Family, slice, Any]]) -> list[Any] | None:
    values: list[Any] = []  # a list always: to jax a tuple would be another structure
    for family, run, snapshot in runs:
        read = family.read_all(cells[run], snapshot)
        if read is None:
            return None
        values += read
    return values
