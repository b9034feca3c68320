"""Why a function was traced again, in the words of the caller's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardax.errors import MeshConflictError
from shardax.names.mesh import current_mesh
from shardax.state.environment import names_of
from shardax.state.forms import argument_names, root_names
from shardax.state.graph import Graph, Ref
from shardax.state.lift import Lift
from shardax.state.lifted import Lifted


@dataclass(frozen=True)
class Traced:
    """One trace: the lifted function and the types of its inputs."""

    lifted: Lifted
    inputs: tuple[Any, ...]
    given: tuple[Any, Any]
    context: dict[str, str]


_SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_default_prng_impl")


def _context() -> dict[str, str]:
    """What a program depends on besides its arguments, as far as jax lets one ask."""
    found = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    try:
        mesh = str(current_mesh())
    except MeshConflictError as error:  # for whoever asks for a mesh to report
        mesh = error.headline
    return found | {"mesh": mesh}


class Retraces:
    """Remembers the last two traces and explains the last one; the text is made when it is asked for."""

    def __init__(self, lift: Lift) -> None:
        self.lift = lift
        self.before: Traced | None = None
        self.now: Traced | None = None

    def record(self, lifted: Lifted, inputs: Sequence[Any], given: Any) -> None:
        """Take note of a trace."""
        traced = Traced(lifted, tuple(map(_type, inputs)), jax.tree.map(_type, given), _context())
        if self.now is not None and self.now.lifted is lifted and _alike(self.now, traced):
            return  # the same once more: a probe before the real one
        self.before, self.now = self.now, traced

    @property
    def last(self) -> str:
        """The reasons for the last trace, one per line."""
        if self.now is None:
            return ""
        if self.before is None:
            return "the first call"
        lines = self._differences(self.before, self.now)
        return "\n".join(lines) if lines else "the context: a setting of jax"

    def _differences(self, old: Traced, new: Traced) -> list[str]:
        lines = differences(old.lifted, new.lifted) + _diff(self._types(old), self._types(new))
        return lines + [f"the context: {line}" for line in _diff(old.context, new.context)]

    def _types(self, traced: Traced) -> dict[str, str]:
        lifted = traced.lifted
        found = dict(zip(self.lift.cell_paths(lifted), map(str, traced.inputs), strict=False))
        names = argument_names(self.lift.function, lifted.form.count)
        plain, named = traced.given
        for place, tree in zip((*lifted.form.plain, *lifted.form.donated), plain, strict=True):
            found |= _leaves(names[place], tree)
        for name, tree in named.items():
            found |= _leaves(name, tree)
        return found


def differences(old: Lifted, new: Lifted) -> list[str]:
    """What is not the same in the structure of two calls, one per line."""
    lines = _diff(_static(old), _static(new))
    if old is new:
        return lines
    lines += _diff(_structure(old), _structure(new))
    lines += _diff(_surroundings(old), _surroundings(new))
    if set(old.environment.identities) != set(new.environment.identities):
        lines.append("the cells that the function closes over")
    return lines


def _static(lifted: Lifted) -> dict[str, str]:
    names = argument_names(lifted.function, lifted.form.count)
    found = {names[place]: repr(value) for place, value in lifted.form.static}
    return found | {name: repr(value) for name, value in lifted.form.static_names}


def _structure(lifted: Lifted) -> dict[str, str]:
    return describe(lifted.graph, root_names(lifted.function, lifted.form))


def _surroundings(lifted: Lifted) -> dict[str, str]:
    names = names_of(lifted.function, [surrounding.node for surrounding in lifted.surroundings])
    return {
        f"closed-over {name}{step}": text
        for name, surrounding in zip(names, lifted.surroundings, strict=True)
        for step, text in surrounding.statics()
    }


def _alike(a: Traced, b: Traced) -> bool:
    return a.inputs == b.inputs and a.given == b.given and a.context == b.context


def _type(value: Any) -> str:
    def one(leaf: Any) -> str:
        aval = jax.typeof(leaf)
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        return f"{dtype}[{','.join(map(str, shape))}]" if shape is not None and dtype is not None else str(aval)

    if jax.tree_util.all_leaves([value]):  # a brainunit quantity has a dtype, and is a tree
        return one(value)
    return str(jax.tree.map(one, value))


def _leaves(name: str, tree: Any) -> dict[str, str]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name + jax.tree_util.keystr(path): str(leaf) for path, leaf in pairs}


def _diff(old: dict[str, str], new: dict[str, str]) -> list[str]:
    lines = [f"{path}: {old[path]} → {text}" for path, text in new.items() if path in old and old[path] != text]
    lines += [f"{path}: {text} is new" for path, text in new.items() if path not in old]
    return lines + [f"{path}: {text} is gone" for path, text in old.items() if path not in new]


def describe(graph: Graph, names: Sequence[str]) -> dict[str, str]:
    """Every path of a graph and what stands there."""
    found: dict[str, str] = {}
    first: dict[Ref, str] = {}

    def walk(ref: Ref, path: str) -> None:
        tag, number = ref
        if tag == "s":
            found[path] = repr(number)
        elif tag == "l":
            found[path] = "an array"
        elif ref in first:
            found[path] = f"the same as {first[ref]}"
        elif tag == "c":
            first[ref] = path
            found[path] = repr(graph.specs[number][1])
        else:
            record = graph.records[number]
            if record.kind.mutable:
                first[ref] = path
            found[path] = record.cls.__name__
            for key, child in zip(record.keys, record.refs, strict=True):
                walk(child, path + record.kind.step(key))

    for ref, name in zip(graph.roots, names, strict=True):
        walk(ref, name)
    return found
