"""From a step to a program lowered for a mesh that is not here; no device is touched, nothing is allocated.

Shardings follow their axis *names*: whatever mesh an argument, a `jax.jit` or a constraint was made for, the proof
puts it on the target's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from shardax._compat import (
    abstract_mesh_of_this_process,
    equation_frames,
    lowered_program,
    mesh_to_prove,
    only_abstract_mesh,
    rebind_traced,
    subjaxprs,
    traced_shardings,
)
from shardax.errors import Offence, ProofError, did_you_mean
from shardax.names.decision import itemsize_of
from shardax.names.mesh import MeshSpec
from shardax.names.spec import axes_in, fit_cached
from shardax.proving.identity import identity_of
from shardax.proving.placing import Placed, check_placed, no_layout
from shardax.proving.sources import Source, recognisable
from shardax.proving.step import Step
from shardax.proving.target import Target
from shardax.proving.tracing import BOUND, Call, Leaf, own_words, trace_plain, trace_stateful
from shardax.state.jit import BoundJit, JitWrapped

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
    kind = target.chip.device_kind if target.chip else target.platform
    call, abstract = traced_on(step, mesh, (target.platform, kind), in_specs, layout)
    inputs = placed_leaves(call.leaves)
    check_placed(inputs, mesh)
    results, results_asked = results_of(call, out_specs, mesh)
    strange: list[Offence] = []
    rebind_traced(
        call.traced,
        [leaf.path for leaf in inputs],
        [NamedSharding(abstract, leaf.spec) for leaf in inputs],
        [None if spec is None else NamedSharding(abstract, spec) for spec in results_asked],
        _rebinder(abstract, strange),
    )
    if strange:
        raise ProofError(f"{step.name} cannot be put on the mesh {mesh}", strange)
    with own_words(step.name), only_abstract_mesh(abstract):
        lowered = call.traced.lower(lowering_platforms=(PLATFORM_NAMES.get(target.platform, target.platform),))
    data: dict[str, Any] = {**lowered_program(lowered), "identity": identity_of(lowered.as_text(debug_info=True))}
    kept = {at: number for number, at in enumerate(data["kept"])}
    inputs = tuple(replace(leaf, number=kept.get(at)) for at, leaf in enumerate(inputs))
    return Program(step.name, mesh, data, inputs, results, tuple(unmet_constraints(call.traced.jaxpr, mesh)))


def traced_on(
    step: Step, mesh: MeshSpec, devices: tuple[str, str], in_specs: Any, layout: Any
) -> tuple[Call, AbstractMesh]:
    """The step traced with a mesh in force, and that mesh: free of devices, unless a `shard_map(mesh=…)` in it is bound
    to the devices of this process and has the same axes."""
    abstract = mesh.abstract()
    try:
        return trace_on(step, abstract, devices, in_specs, layout), abstract
    except ProofError as error:
        here = abstract_mesh_of_this_process(mesh.sizes, mesh.names, mesh.axis_types)
        if here is None or BOUND not in str(error):
            raise
    return trace_on(step, here, devices, in_specs, layout), here


def trace_on(step: Step, mesh: AbstractMesh, devices: tuple[str, str], in_specs: Any, layout: Any) -> Call:
    """The step traced with this mesh in force, of devices of a platform and a kind."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        with own_words(step.name), mesh_to_prove(mesh, *devices):
            return step.jitted.trace(*args, **kwargs)

    stateful = isinstance(step.jitted, (JitWrapped, BoundJit))
    return (trace_stateful if stateful else trace_plain)(step, trace, mesh, in_specs, layout)


def placed_leaves(leaves: Sequence[Leaf]) -> tuple[Placed, ...]:
    """Every argument as it lies; one error for all that nobody has placed."""
    unplaced = [
        (leaf.path, leaf)
        for leaf in leaves
        if not isinstance(leaf.spec, PartitionSpec)
        and leaf.shape
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    if unplaced:
        raise no_layout(unplaced)
    return tuple(
        Placed(
            leaf.path,
            leaf.shape,
            str(leaf.dtype),
            itemsize_of(leaf.dtype),
            leaf.spec if isinstance(leaf.spec, PartitionSpec) and leaf.shape else PartitionSpec(),
            leaf.source if isinstance(leaf.spec, PartitionSpec) else "default",
            leaf.donated,
        )
        for leaf in leaves
    )


def results_of(call: Call, out_specs: Any, mesh: MeshSpec) -> tuple[tuple[Result, ...], list[PartitionSpec | None]]:
    """The outputs with what was asked of them, and what the jit itself is to ask (a constraint asks in its own way)."""
    flat, tree = tree_flatten_with_path(call.traced.out_info)
    _, asked = traced_shardings(call.traced)
    given: list[Any] = [sharding.spec if isinstance(sharding, NamedSharding) else None for sharding in asked]
    if call.result_specs:
        given = [old if old is not None else new for old, new in zip(given, call.result_specs, strict=True)]
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
                "out_specs do not follow the structure of the result",
                [Offence("result", " ".join(str(error).split())[:400])],
            ) from error
        given = [new if new is not None else old for new, old in zip(wanted, given, strict=True)]
    constrained = _constrained_results(call.traced.jaxpr)
    paths = call.result_paths or tuple("result" + keystr(keys) for keys, _ in flat)
    results = tuple(
        Result(
            path,
            tuple(info.shape),
            str(info.dtype),
            itemsize_of(info.dtype),
            spec if spec is not None else constrained.get(at),
        )
        for at, (path, (_, info), spec) in enumerate(zip(paths, flat, given, strict=True))
    )
    asked_for = [
        Placed(result.path, result.shape, result.dtype, result.itemsize, spec, "asked")
        for result, spec in zip(results, given, strict=True)
        if spec is not None
    ]
    check_placed(asked_for, mesh, "results")
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
    frames = [Source(*frame) for frame in equation_frames(equation)]
    if not frames:
        return str(equation.primitive)
    shown = recognisable(frames)
    return f"{shown.file.rsplit('/', 1)[-1]}:{shown.line} ({shown.function.rpartition('<locals>.')[2]})"


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
