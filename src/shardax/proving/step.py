"""`Step`: a function and its arguments, ready to be traced, with a name and a path for everything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from shardax.errors import Offence, ProofError, did_you_mean
from shardax.state.jit import BoundJit, JitWrapped
from shardax.state.jit import jit as stateful_jit
from shardax.state.kinds import holds_cells

Names = int | str | Sequence[int | str] | None


@dataclass(frozen=True)
class Step:
    """A jitted function (anything with `.trace`) and the arguments to trace it with."""

    jitted: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str

    @property
    def parameters(self) -> list[str]:
        """The name of every positional argument."""
        return parameter_names(self.jitted, len(self.args))

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        """Every argument with its name, in the order in which jax flattens them."""
        named = [(name, self.kwargs[name]) for name in sorted(self.kwargs)]
        return [*zip(self.parameters, self.args, strict=True), *named]

    @classmethod
    def of(cls, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], donate: Names, static: Names) -> Step:
        """Jit a plain function; take a jitted one as it is, unless `donate` or `static` ask for more."""
        if not callable(fn):
            raise ProofError(
                f"not a function: {repr(fn)[:80]} ({type(fn).__name__})", remedy="pass the step, then its arguments"
            )
        name = getattr(fn, "__name__", type(fn).__name__)
        _check_keywords(fn, kwargs, name)
        staged = isinstance(fn, _STAGED)
        if not staged and hasattr(fn, "trace") and hasattr(fn, "lower"):
            raise _jitted_elsewhere(name)
        if staged and donate is None and static is None:
            return cls(fn, args, kwargs, name)
        if not staged and any(holds_cells(value) for value in (*args, *kwargs.values())):
            return cls(_stateful(fn, args, kwargs, donate, static), args, kwargs, name)
        positions, names = _placed(fn, args, kwargs, static, "static")
        given, given_names = _placed(fn, args, kwargs, donate, "donate")
        inner = fn
        if not staged:
            inner, args, kwargs = _without_objects(fn, args, kwargs, positions, names)
        jitted = jax.jit(
            inner,
            static_argnums=positions,
            static_argnames=names,
            donate_argnums=given,
            donate_argnames=given_names,
        )
        return cls(jitted, args, kwargs, name)

    def leaf_paths(self) -> list[str]:
        """The path of every leaf as jax prints it: "state['w']"."""
        return [name + keystr(keys) for name, tree in self.arguments for keys, _ in tree_flatten_with_path(tree)[0]]

    def leaves(self) -> list[Any]:
        """Every leaf of every argument."""
        return [leaf for _, tree in self.arguments for leaf in jax.tree.leaves(tree)]

    def dynamic(self, args_info: Any) -> list[bool]:
        """For every leaf: is it traced? (A jitted function keeps to itself which arguments are static.)"""
        args, kwargs = args_info
        waiting = list(args)
        flags: list[bool] = []
        for at, tree in enumerate(self.args):
            skippable = len(self.args) - at > len(waiting) and not any(map(is_array, jax.tree.leaves(tree)))
            traced = bool(waiting) and _alike(tree, waiting[0]) and not skippable
            if traced:
                waiting.pop(0)
            flags += [traced] * len(jax.tree.leaves(tree))
        for name in sorted(self.kwargs):
            flags += [name in kwargs] * len(jax.tree.leaves(self.kwargs[name]))
        return flags


def _stateful(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], donate: Names, static: Names) -> Any:
    if donate == "state" and donate not in parameter_names(fn, len(args)):
        return stateful_jit(fn, donate="state")
    positions, names = _placed(fn, args, kwargs, static, "static")
    given, given_names = _placed(fn, args, kwargs, donate, "donate")
    return stateful_jit(
        fn, static_argnums=positions, static_argnames=names, donate_argnums=given, donate_argnames=given_names
    )


def _alike(tree: Any, info: Any) -> bool:
    return len(jax.tree.leaves(tree)) == len(jax.tree.leaves(info))


def is_array(leaf: Any) -> bool:
    """Has it a shape and a dtype?"""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_numeric(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def parameter_names(fn: Any, count: int) -> list[str]:
    """The names of the first `count` positional parameters, as a reader of the function knows them.

    >>> parameter_names(lambda state, *batch: None, 3)
    ['state', 'batch[0]', 'batch[1]']
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{at}]" for at in range(count - len(names))]
        elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
    return [*names, *(f"args[{at}]" for at in range(len(names), count))][:count]


_STAGED = (type(jax.jit(lambda: None)), JitWrapped, BoundJit)


def _jitted_elsewhere(name: str) -> ProofError:
    """Its donations and shardings are nowhere to be read, and would be lost."""
    return ProofError(
        f"{name} is jitted by another library (nnx.jit, brainstate's jit), which does not say what it donates",
        remedy=f"prove the function itself, sx.prove({name}.__wrapped__, …, donate=…), or jit it with sx.jit",
    )


_OWN = ("mesh", "target", "layout", "in_specs", "out_specs", "donate", "static", "replicated_over")


def _check_keywords(fn: Any, kwargs: Mapping[str, Any], name: str) -> None:
    """A mistyped option of `prove` would be handed on to the function."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    strange = [
        Offence(key, f"is no parameter{did_you_mean(key, [*parameters, *_OWN])}")
        for key in kwargs
        if key not in parameters
    ]
    if strange:
        raise ProofError(f"{name} does not take these keyword arguments", strange)


def _placed(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Names, word: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """`donate=` and `static=` take positions and names, one or several; all that are not there in one error."""
    listed: list[int | str] = [] if given is None else [given] if isinstance(given, (int, str)) else list(given)
    known = parameter_names(fn, len(args))
    positions: list[int] = []
    names: list[str] = []
    problems: list[Offence] = []
    for item in listed:
        if isinstance(item, bool):  # True would mean the second argument
            problems.append(Offence(f"{word}={item}", f"says no argument; name it: one or several of {known}"))
        elif isinstance(item, str) and item in kwargs:
            names.append(item)
        elif isinstance(item, str) and item in known:
            positions.append(known.index(item))
        elif isinstance(item, int) and -len(args) <= item < len(args):
            positions.append(item % len(args))
        else:
            hint = did_you_mean(item, [*known, *kwargs]) if isinstance(item, str) else f"; there are {len(args)}"
            problems.append(Offence(f"{word}={item!r}", f"is no argument of {known}{hint}"))
    if problems:
        raise ProofError(f"{word} names arguments that are not there", problems)
    return tuple(positions), tuple(names)


def _without_objects(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    static: tuple[int, ...],
    static_names: tuple[str, ...],
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Close over leaves that are no arrays (an activation function in a module); jit could not take them."""
    whole: dict[int | str, Any] = {
        key: tree
        for key, tree in (*enumerate(args), *kwargs.items())
        if key not in static and key not in static_names and not all(map(_is_numeric, jax.tree.leaves(tree)))
    }
    if not whole:
        return fn, args, kwargs

    def strip(key: int | str, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf if _is_numeric(leaf) else None, tree) if key in whole else tree

    def restore(key: int | str, tree: Any) -> Any:
        if key not in whole:
            return tree
        given = iter(jax.tree.leaves(tree))
        return jax.tree.map(lambda leaf: next(given) if _is_numeric(leaf) else leaf, whole[key])

    def step(*given: Any, **named: Any) -> Any:
        trees = [restore(at, tree) for at, tree in enumerate(given)]
        return fn(*trees, **{name: restore(name, tree) for name, tree in named.items()})

    step.__name__ = getattr(fn, "__name__", "step")
    step.__signature__ = inspect.signature(fn)  # pyright: ignore[reportFunctionMemberAccess] (paths keep their names)
    light = tuple(strip(at, tree) for at, tree in enumerate(args))
    return step, light, {name: strip(name, tree) for name, tree in kwargs.items()}
