"""A step traced: every array argument with its path and spec, from a plain `jax.jit` or a stateful `shardax.jit`."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from shardax._compat import argument_shardings, traced_shardings
from shardax.errors import Offence, ProofError, ShardaxError
from shardax.names.spec import axes_in, axes_of
from shardax.proving.placing import OPEN, Spec, given_specs, specs_by_path
from shardax.proving.sources import Source, is_prover, own_frames
from shardax.proving.step import Step, is_array


@dataclass(frozen=True)
class Leaf:
    """One array argument of a traced step."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    donated: bool
    spec: Spec
    source: str


@dataclass(frozen=True)
class Call:
    """A traced step: JAX's own traced stage, its arguments, and of a stateful one its results: names, and the specs
    with which state that was written goes back."""

    traced: Any
    leaves: tuple[Leaf, ...]
    result_paths: tuple[str, ...] = ()
    result_specs: tuple[PartitionSpec | None, ...] = ()


CONCRETE = "name the argument in static=…, or use jax.lax.cond, jnp.where and jnp instead of Python's if and NumPy"
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
BOUND = "should match the mesh passed to shard_map"  # jax's words
_REMEDIES = {
    BOUND: "leave mesh= out of shard_map: it then takes the mesh in force",
    "require devices to be present": "a callback into Python needs devices: leave it out of what is proved",
}


def _line_of(error: Exception) -> str:
    """ "step.py:12 (loss)": the innermost line of the step itself, else of a library that it calls."""
    frames = [Source(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    frames = [each for each in reversed(frames) if "<" not in each.file]
    libraries = (each for each in frames if "/jax/" not in each.file and not is_prover(each.file))
    shown = next(iter(own_frames(frames)), None) or next((s for s in libraries if "contextlib" not in s.file), None)
    return f"{shown.file.rsplit('/', 1)[-1]}:{shown.line} ({shown.function})" if shown else ""


@contextmanager
def own_words(name: str) -> Generator[None]:
    """A function that does not trace or lower is an error of one screen, with the user's line."""
    try:
        yield
    except ShardaxError:
        raise
    except Exception as error:
        line = _line_of(error) or name
        text = " ".join(str(error).split("\n\n")[0].split())
        concrete = isinstance(error, _CONCRETE) or "sequences of concrete values" in text
        remedy = CONCRETE if concrete else next((words for sign, words in _REMEDIES.items() if sign in text), "")
        raise ProofError(
            f"{name} {'needs concrete values' if concrete else 'does not trace'}",
            [Offence(line, f"{type(error).__name__}: {text[:600]}")],
            remedy,
        ) from error


# ---- jax.jit --------------------------------------------------------------------------------------------------------


def trace_plain(step: Step, trace: Callable[..., Any], mesh: AbstractMesh, in_specs: Any, layout: Any) -> Call:
    """Trace with abstract arguments that carry their specs; what `jax.jit(in_shardings=)` asks is found on the way."""
    specs = given_specs(step, in_specs, layout)
    args, kwargs = _abstract(step, specs, mesh)
    traced = trace(*args, **kwargs)
    asked, _ = traced_shardings(traced)
    flags = step.dynamic(traced.args_info)
    if any(sharding is not None for sharding in asked):
        specs = _with_jit(specs, flags, asked)
        args, kwargs = _abstract(step, specs, mesh)
        traced = trace(*args, **kwargs)
    infos = iter(jax.tree.leaves(traced.args_info))
    leaves = [
        _leaf(path, leaf, next(infos), *pair)
        for path, leaf, pair, dynamic in zip(step.leaf_paths(), step.leaves(), specs, flags, strict=True)
        if dynamic
    ]
    return Call(traced, tuple(leaves))


def _leaf(path: str, leaf: Any, info: Any, spec: Spec, source: str) -> Leaf:
    """The dtype is that of the trace: without x64 a NumPy f64 is an f32 there."""
    return Leaf(path, tuple(getattr(leaf, "shape", ())), info.dtype, bool(info.donated), spec, source)


def _abstract(step: Step, specs: Sequence[tuple[Spec, str]], mesh: AbstractMesh) -> tuple[list[Any], dict[str, Any]]:
    given = iter(specs)

    def abstract(leaf: Any) -> Any:
        spec, _ = next(given)
        if not is_array(leaf):
            return leaf
        sharding = None  # what does not fit is reported together, with the paths
        if isinstance(spec, PartitionSpec) and _fits(spec, leaf.shape, mesh):
            sharding = NamedSharding(mesh, spec)
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    args = [jax.tree.map(abstract, tree) for tree in step.args]
    return args, {name: jax.tree.map(abstract, step.kwargs[name]) for name in sorted(step.kwargs)}


def _fits(spec: PartitionSpec, shape: Sequence[int], mesh: AbstractMesh) -> bool:
    sizes = mesh.shape
    return (
        len(spec) <= len(shape)
        and set(axes_in(spec)) <= set(sizes)
        and all(
            size % math.prod(sizes[axis] for axis in axes_of(entry)) == 0
            for size, entry in zip(shape, spec, strict=False)
        )
    )


def _with_jit(specs: Sequence[tuple[Spec, str]], flags: Sequence[bool], asked: Sequence[Any]) -> list[tuple[Spec, str]]:
    """What `jax.jit(in_shardings=)` says stands between the array's own sharding and what the proof was given."""
    waiting = iter(asked)
    merged: list[tuple[Spec, str]] = []
    for (spec, source), traced in zip(specs, flags, strict=True):
        sharding = next(waiting) if traced else None
        own = source not in ("in_specs", "layout")
        merged.append((sharding.spec, "jit") if own and isinstance(sharding, NamedSharding) else (spec, source))
    return merged


# ---- shardax.jit ----------------------------------------------------------------------------------------------------


def trace_stateful(step: Step, trace: Callable[..., Any], mesh: AbstractMesh, in_specs: Any, layout: Any) -> Call:
    """Trace a function over cells: its arrays are those of its modules and closures, by their paths in them."""
    del mesh
    staged = trace(*step.args, **step.kwargs)
    traced, paths = _inside(staged, step)
    asked, _ = traced_shardings(traced)
    infos = jax.tree.leaves(traced.args_info)
    own = [sharding.spec if isinstance(sharding, NamedSharding) else OPEN for sharding in argument_shardings(traced)]
    shapes = [tuple(info.shape) for info in infos]
    given = specs_by_path(step, paths, shapes, in_specs, layout)
    leaves: list[Leaf] = []
    for at, (path, info) in enumerate(zip(paths, infos, strict=True)):
        jitted = asked[at].spec if isinstance(asked[at], NamedSharding) else OPEN
        choices = ((given[at], "given"), (jitted, "jit"), (own[at], "array"))
        spec, source = next((pair for pair in choices if isinstance(pair[0], PartitionSpec)), (OPEN, ""))
        leaves.append(Leaf(path, shapes[at], info.dtype, bool(info.donated), spec, source))
    return Call(traced, tuple(leaves), *_stateful_results(staged, traced, leaves))


def _inside(staged: Any, step: Step) -> tuple[Any, list[str]]:
    """JAX's traced stage inside ours, and the path of each of its flat arguments in the caller's arguments."""
    traced: Any = getattr(staged, "_inner")  # noqa: B009 (the state room's own stage; rooms above it may look inside)
    count = len(jax.tree.leaves(traced.args_info))
    numbered = jax.tree.unflatten(jax.tree.structure(traced.args_info[0]), range(count))
    args, kwargs = getattr(staged, "_view")(numbered)  # noqa: B009
    paths = [""] * count
    for name, tree in (*zip(step.parameters, args, strict=False), *kwargs.items()):
        for keys, number in tree_flatten_with_path(tree)[0]:
            paths[number] = name + "".join(_key_text(key) for key in keys)
    return traced, paths


def _key_text(key: Any) -> str:
    """A cell's path inside its module is itself a key: model['mlp.kernel'] reads model.mlp.kernel."""
    text = getattr(key, "key", None)
    return f".{text}" if isinstance(text, str) else keystr((key,))


def _stateful_results(
    staged: Any, traced: Any, leaves: Sequence[Leaf]
) -> tuple[tuple[str, ...], tuple[PartitionSpec | None, ...]]:
    """Written state comes back with the sharding it went in with; other results are as the compiler likes."""
    out, result = traced.out_info
    lifted: Any = getattr(staged, "_lifted")  # noqa: B009
    by_place = dict(zip(lifted.order, leaves, strict=False))
    names = ["result" + keystr(keys) for keys, _ in tree_flatten_with_path(out)[0]]
    specs: list[PartitionSpec | None] = [None] * len(names)
    written = result.effects.written
    for at, value in enumerate(result.values):
        leaf = by_place.get(written[at]) if at < len(written) else None
        for info in jax.tree.leaves(value):
            kept = leaf is not None and isinstance(leaf.spec, PartitionSpec) and leaf.shape == tuple(info.shape)
            names.append(f"{leaf.path} (new)" if leaf is not None else f"result ({len(names)})")
            specs.append(leaf.spec if kept and leaf is not None and isinstance(leaf.spec, PartitionSpec) else None)
    return tuple(names), tuple(specs)
