"""The form of a call: which arguments are static, which hold state, which are donated, and what each is called."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardax.errors import ArgumentError, Offence, did_you_mean
from shardax.state.kinds import Frozen, holds_cells, same

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Chosen:
    """Arguments picked by position and by name ("static" or "donate"), made consistent with the signature."""

    positions: tuple[int, ...]
    names: frozenset[str]

    def at(self, count: int) -> frozenset[int]:
        """The positions among `count` positional arguments, negative ones counted from the end."""
        return frozenset(place % count if place < 0 else place for place in self.positions if -count <= place < count)

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)


NONE_CHOSEN = Chosen((), frozenset())


def chosen(function: Callable[..., Any], what: str, argnums: Any, argnames: Any) -> Chosen:
    """Resolve `static_argnums`/`static_argnames` (or `donate_…`): one given infers the other, as `jax.jit` does."""
    signature = signature_of(function)
    names = _names(what, argnames)
    numbers = _numbers(what, argnums)
    if signature is None:
        return Chosen(numbers or (), frozenset(names or ()))
    parameters = list(signature.parameters.values())
    _check(signature, what, numbers or (), names or ())
    if numbers is None and names is not None:
        numbers = tuple(
            place
            for place, parameter in enumerate(parameters)
            if parameter.kind in _POSITIONAL and parameter.name in names
        )
    elif names is None and numbers is not None:
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        reached = {place % len(positional) if place < 0 and positional else place for place in numbers}
        names = tuple(name for place, name in enumerate(positional) if place in reached)
    return Chosen(numbers or (), frozenset(names or ()))


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function, if it has one."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _numbers(what: str, argnums: Any) -> tuple[int, ...] | None:
    if argnums is None:
        return None
    try:
        return (operator.index(argnums),)
    except TypeError:
        pass
    try:
        return tuple(map(operator.index, argnums))
    except TypeError:
        raise ArgumentError(f"{what}_argnums={argnums!r} is not an int or a sequence of ints") from None


def _names(what: str, argnames: Any) -> tuple[str, ...] | None:
    if argnames is None:
        return None
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{what}_argnames={argnames!r} is not a str or a sequence of strs")
    return names


def _check(signature: inspect.Signature, what: str, numbers: Iterable[int], names: Iterable[str]) -> None:
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    count = sum(parameter.kind in _POSITIONAL for parameter in parameters)
    offences: list[Offence] = []
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        offences += [
            Offence(f"{what}_argnums", f"{number} is out of range: the function takes {count} positional arguments")
            for number in numbers
            if not -count <= number < count
        ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        known = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
        offences += [
            Offence(f"{what}_argnames", f"the function has no argument {name!r}{did_you_mean(name, known)}")
            for name in names
            if name not in known
        ]
    if offences:
        raise ArgumentError(f"the function has no such argument to make {what}", offences)


@dataclass(frozen=True)
class Form:
    """How the arguments of one call are split. Part of the key of a compiled function."""

    count: int
    stateful: tuple[int, ...]
    static: tuple[tuple[int, Frozen], ...]
    donated: tuple[int, ...]  # plain positional arguments to donate
    names: tuple[str, ...]  # keywords, in the order of the call
    stateful_names: tuple[str, ...]
    static_names: tuple[tuple[str, Frozen], ...]
    donated_names: tuple[str, ...]

    @property
    def plain(self) -> tuple[int, ...]:
        """The positions that go to JAX as they are, donated ones apart."""
        taken = {*self.stateful, *self.donated, *(place for place, _ in self.static)}
        return tuple(place for place in range(self.count) if place not in taken)

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The keywords that go to JAX as they are."""
        taken = {*self.stateful_names, *self.donated_names, *(name for name, _ in self.static_names)}
        return tuple(name for name in self.names if name not in taken)

    def static_alike(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Do the static arguments of a call have the values of this form?"""
        return all(same(args[place], value.value) for place, value in self.static) and all(
            same(kwargs[name], value.value) for name, value in self.static_names
        )


def form_of(args: Sequence[Any], kwargs: dict[str, Any], static: Chosen, donate: Chosen, title: str) -> Form:
    """Split the arguments of a call."""
    fixed = static.at(len(args)) if static else frozenset[int]()
    given = donate.at(len(args)) if donate else frozenset[int]()
    stateful = tuple(place for place, arg in enumerate(args) if place not in fixed and holds_cells(arg))
    stateful_names = tuple(name for name, arg in kwargs.items() if name not in static.names and holds_cells(arg))
    form = Form(
        count=len(args),
        stateful=stateful,
        static=tuple((place, Frozen(args[place])) for place in sorted(fixed)),
        donated=tuple(place for place in sorted(given) if place not in fixed and place not in stateful),
        names=tuple(kwargs),
        stateful_names=stateful_names,
        static_names=tuple((name, Frozen(kwargs[name])) for name in kwargs if name in static.names),
        donated_names=tuple(
            name for name in kwargs if name in donate.names and name not in static.names and name not in stateful_names
        ),
    )
    _refuse_unhashable(form, title)
    return form


def _refuse_unhashable(form: Form, title: str) -> None:
    offences: list[Offence] = []
    for where, value in (*form.static, *form.static_names):
        try:
            hash(value.value)
        except TypeError:
            offences.append(Offence(f"argument {where!r}", f"{type(value.value).__name__} does not hash"))
    if offences:
        headline = f"Non-hashable static arguments are used in {title}"
        raise ArgumentError(headline, offences, "pass a tuple or another hashable value, or make it not static")


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """What the first `count` positional arguments are called."""
    signature = signature_of(function)
    parameters = list(signature.parameters.values()) if signature is not None else []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in _POSITIONAL:
            names.append(parameter.name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{place}]" for place in range(count - len(names))]
    return (names + [f"args[{place}]" for place in range(len(names), count)])[:count]


def root_names(function: Callable[..., Any], form: Form) -> list[str]:
    """What the stateful arguments of a call are called."""
    names = argument_names(function, form.count)
    return [names[place] for place in form.stateful] + list(form.stateful_names)
