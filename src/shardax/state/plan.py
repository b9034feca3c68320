"""The verified way from the arguments of a call to the inputs of a function that was lifted before.

This is what every call but the first goes through, so it is written for speed: what can be known when the plan is made
is known then, and what is left is a handful of C-speed loops and as few Python frames as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from shardax.state.environment import Watch
from shardax.state.forms import Form
from shardax.state.graph import Survey
from shardax.state.lifted import Lifted
from shardax.state.program import Found, Program


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

    __slots__ = ("context", "form", "gather", "lifted", "plain", "program", "take")

    def __init__(self, lifted: Lifted, found: Survey, watch: Watch, cells: Sequence[Any], context: Any) -> None:
        form = lifted.form
        self.context, self.lifted, self.form = context, lifted, form
        self.program = Program(found, lifted, watch, cells)
        self.gather = self.program.gather
        self.take = None if len(form.plain) == form.count else taker(form.plain)
        self.plain = not (form.donated or form.donated_names or form.stateful_names or form.static_names)

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
        """A call whose arguments are what they were, split."""
        found = self.gather(args, kwargs)
        return None if found is None else self.split(found, args, kwargs)

    def split(self, found: Found, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered:
        """What was gathered, with the rest of the call."""
        values, cells, leaves, _ = found
        given = split(self.form, self.take, args, kwargs)
        return Gathered(self.lifted, values, cells, partial(self.program.node, found), leaves, *given)


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
