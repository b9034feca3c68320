"""From a step to a program lowered for a mesh that is not here; no device is touched, nothing is allocated.

Shardings follow their axis *names*: whatever mesh an argument, a `jax.jit` or a constraint was made for, the proof
puts it on the target's mesh.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from shardax._compat import (
    equation_place,
    lowered_program,
    mesh_to_prove,
    only_abstract_mesh,
    rebind_traced,
    subjaxprs,
    traced_shardings,
)
from shardax.errors import Offence, ProofError, ShardaxError, did_you_mean
from shardax.names.decision import itemsize_of
from shardax.names.mesh import MeshSpec
from shardax.names.spec import axes_in, fit_cached
from shardax.proving.placing import Placed, Spec, check_placed, given_specs, no_layout
from shardax.proving.step import Step, is_array
from shardax.proving.target import Target

PLATFORM_NAMES = {"gpu": "cuda"}


@dataclass(frozen=True)
class Unmet:
    """A sharding asked for inside the program that cannot be given: in a jit, XLA pads or replicates without a word."""

    where: str
    shape: tuple[int, ...]
    asked: PartitionSpec
    got: PartitionSpec
    bytes_per_device: int


@dataclass(frozen=True)
class Result:
    """One output of the step, and the sharding asked for it (None: left to the compiler)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    asked: PartitionSpec | None


@dataclass(frozen=True)
class Program:
    """A step lowered for a mesh: plain data for the compiler's process, and what is known without it."""

    name: str
    mesh: MeshSpec
    data: Mapping[str, Any]
    inputs: tuple[Placed, ...]
    results: tuple[Result, ...]
    unmet: tuple[Unmet, ...]


def lower(step: Step, mesh: MeshSpec, target: Target, in_specs: Any, out_specs: Any, layout: Any) -> Program:
    """Trace the step with the target's mesh in force, put every sharding on that mesh, lower for its platform."""
    specs = given_specs(step, in_specs, layout)
    abstract = mesh.abstract()
    kind = target.chip.device_kind if target.chip else target.platform
    traced = _trace(step, specs, abstract, target.platform, kind)
    asked, results_asked = traced_shardings(traced)
    flags = step.dynamic(traced.args_info)
    if any(sharding is not None for sharding in asked):
        specs = _with_jit(specs, flags, asked)
        traced = _trace(step, specs, abstract, target.platform, kind)
    inputs = _placed(step, specs, flags, traced.args_info)
    check_placed(inputs, mesh)
    results, results_asked = _results(traced, results_asked, out_specs)
    strange: list[Offence] = []
    rebind_traced(
        traced,
        [NamedSharding(abstract, leaf.spec) for leaf in inputs],
        [None if spec is None else NamedSharding(abstract, spec) for spec in results_asked],
        _rebinder(abstract, strange),
    )
    if strange:
        raise ProofError(f"{step.name} cannot be put on the mesh {mesh}", strange)
    with _own_words(step.name), only_abstract_mesh(abstract):
        lowered = traced.lower(lowering_platforms=(PLATFORM_NAMES.get(target.platform, target.platform),))
    data = lowered_program(lowered)
    kept = {at: number for number, at in enumerate(data["kept"])}
    inputs = tuple(replace(leaf, number=kept.get(at)) for at, leaf in enumerate(inputs))
    return Program(step.name, mesh, data, inputs, results, tuple(unmet_constraints(traced.jaxpr, mesh)))


def _trace(step: Step, specs: Sequence[tuple[Spec, str]], mesh: AbstractMesh, platform: str, kind: str) -> Any:
    given = iter(specs)

    def abstract(leaf: Any) -> Any:
        spec, _ = next(given)
        if not is_array(leaf):
            return leaf
        sharding = NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) and _known(spec, mesh) else None
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    args = [jax.tree.map(abstract, tree) for tree in step.args]
    kwargs = {name: jax.tree.map(abstract, step.kwargs[name]) for name in sorted(step.kwargs)}
    with _own_words(step.name), mesh_to_prove(mesh, platform, kind):
        return step.jitted.trace(*args, **kwargs)


def _known(spec: PartitionSpec, mesh: AbstractMesh) -> bool:
    return set(axes_in(spec)) <= set(mesh.axis_names)  # unknown ones are reported together, with their paths


@contextmanager
def _own_words(name: str) -> Generator[None]:
    """A function that does not trace or lower is an error of one screen, with the user's line."""
    try:
        yield
    except ShardaxError:
        raise
    except Exception as error:
        line = next(
            (
                f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.name})"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if "/jax/" not in frame.filename
                and "/shardax/proving/" not in frame.filename
                and "contextlib" not in frame.filename
                and "<" not in frame.filename
            ),
            name,
        )
        concrete = isinstance(error, (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError))
        text = " ".join(str(error).split("\n\n")[0].split())
        raise ProofError(
            f"{name} {'needs concrete values' if concrete else 'does not trace'}",
            [Offence(line, f"{type(error).__name__}: {text[:600]}")],
            "name the argument in static=…, or use jax.lax.cond / jnp.where instead of Python's if" if concrete else "",
        ) from error


def _with_jit(specs: Sequence[tuple[Spec, str]], flags: Sequence[bool], asked: Sequence[Any]) -> list[tuple[Spec, str]]:
    """What `jax.jit(in_shardings=)` says stands between the array's own sharding and what the proof was given."""
    waiting = iter(asked)
    merged: list[tuple[Spec, str]] = []
    for (spec, source), traced in zip(specs, flags, strict=True):
        sharding = next(waiting) if traced else None
        own = source not in ("in_specs", "layout")
        merged.append((sharding.spec, "jit") if own and isinstance(sharding, NamedSharding) else (spec, source))
    return merged


def _placed(step: Step, specs: Sequence[tuple[Spec, str]], flags: Sequence[bool], args_info: Any) -> tuple[Placed, ...]:
    infos = iter(jax.tree.leaves(args_info))
    found: list[Placed] = []
    unplaced: list[tuple[str, Any]] = []
    for path, leaf, (spec, source), traced in zip(step.leaf_paths(), step.leaves(), specs, flags, strict=True):
        if not traced:
            continue
        info = next(infos)
        shape = tuple(getattr(leaf, "shape", ()))
        dtype = leaf.dtype if is_array(leaf) else np.result_type(leaf)
        if not isinstance(spec, PartitionSpec) and not jnp.issubdtype(dtype, jax.dtypes.prng_key):
            unplaced.append((path, leaf))
        given = (spec, source) if isinstance(spec, PartitionSpec) else (PartitionSpec(), "default")
        found.append(Placed(path, shape, str(dtype), itemsize_of(dtype), *given, bool(info.donated)))
    if unplaced:
        raise no_layout(unplaced)
    return tuple(found)


def _results(
    traced: Any, asked: Sequence[Any], out_specs: Any
) -> tuple[tuple[Result, ...], list[PartitionSpec | None]]:
    """The outputs with what was asked of them, and what the jit itself is to ask (a constraint asks in its own way)."""
    flat, tree = tree_flatten_with_path(traced.out_info)
    given: list[Any] = [sharding.spec if isinstance(sharding, NamedSharding) else None for sharding in asked]
    if out_specs is not None:
        skeleton = jax.tree.unflatten(tree, list(range(len(flat))))
        wanted: list[Any] = []

        def fill(spec: Any, part: Any) -> None:
            wanted.extend([spec.spec if isinstance(spec, NamedSharding) else spec] * len(jax.tree.leaves(part)))

        try:
            jax.tree.map(
                fill, out_specs, skeleton, is_leaf=lambda n: n is None or isinstance(n, (PartitionSpec, NamedSharding))
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ProofError(
                "out_specs do not follow the structure of the result", [Offence("result", str(error).splitlines()[0])]
            ) from error
        given = [new if new is not None else old for new, old in zip(wanted, given, strict=True)]
    constrained = _constrained_results(traced.jaxpr)
    results = tuple(
        Result(
            "result" + keystr(keys),
            tuple(info.shape),
            str(info.dtype),
            itemsize_of(info.dtype),
            spec if spec is not None else constrained.get(at),
        )
        for at, ((keys, info), spec) in enumerate(zip(flat, given, strict=True))
    )
    return results, given


def _constrained_results(jaxpr: Any) -> dict[int, PartitionSpec]:
    """Results that are, as they are, the outcome of a sharding constraint."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    asked = {
        id(equation.outvars[0]): equation.params["sharding"].spec
        for equation in inner.eqns
        if equation.primitive.name == "sharding_constraint"
        and isinstance(equation.params.get("sharding"), NamedSharding)
    }
    return {at: asked[id(var)] for at, var in enumerate(inner.outvars) if id(var) in asked}


# ---- shardings inside the program -----------------------------------------------------------------------------------


def place_of(equation: Any) -> str:
    """ "step.py:12 (loss)", or the primitive where no line is known."""
    file, line, function = equation_place(equation)
    return f"{file.rsplit('/', 1)[-1]}:{line} ({function})" if file else str(equation.primitive)


def _rebinder(mesh: AbstractMesh, strange: list[Offence]) -> Callable[[Any, Any], Any]:
    def rebind(value: Any, equation: Any) -> Any:
        if isinstance(value, NamedSharding):
            if isinstance(value.mesh, AbstractMesh):
                return value
            unknown = [axis for axis in axes_in(value.spec) if axis not in mesh.axis_names]
            strange.extend(
                Offence(
                    place_of(equation), f"names axis {axis!r}{did_you_mean(axis, mesh.axis_names)}", spec=value.spec
                )
                for axis in unknown
            )
            return value if unknown else NamedSharding(mesh, value.spec)
        if value.empty:
            return value
        if dict(value.shape) == dict(mesh.shape) and value.axis_names == mesh.axis_names:
            return value.abstract_mesh if isinstance(value, Mesh) else value
        strange.append(
            Offence(
                place_of(equation),
                f"{equation.primitive} is bound to the mesh {MeshSpec.of(value)}",
                remedy="leave mesh= out of shard_map: it then takes the mesh in force",
            )
        )
        return value

    return rebind


def unmet_constraints(jaxpr: Any, mesh: MeshSpec) -> Iterator[Unmet]:
    """Constraints that do not divide: inside a jit they are padded or dropped without a word (jax#26946)."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "shard_map":
            continue  # shapes inside are local
        sharding = equation.params.get("sharding")
        if equation.primitive.name == "sharding_constraint" and isinstance(sharding, NamedSharding):
            aval = equation.outvars[0].aval
            found = fit_cached(sharding.spec, aval.shape, tuple(mesh.shape.items()), itemsize_of(aval.dtype), True)
            if found.corrections:
                yield Unmet(place_of(equation), aval.shape, sharding.spec, found.spec, found.bytes_per_device)
        for inner in subjaxprs(equation):
            yield from unmet_constraints(inner, mesh)
