"""Constraints: one implementation for every mesh context, axis type, eager or traced, array or tree.

*parse* (spec, axes or NamedSharding → asked spec) → *fit* (pure, recorded) → *apply* (per axis type: a constraint on
Auto axes, a reshard on Explicit ones, nothing on Manual ones; a plain transfer where no trace is active).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from shardax._compat import auto_constraint, context_manager_mesh, current_trace, is_staged, trace_state_clean
from shardax.errors import LayoutError, MeshConflictError, MeshError, NoMeshError, Offence, SpecError
from shardax.names.asking import ResolvesAxes, resolver
from shardax.names.decision import Decision, is_noticed, place_outside, record, warn_outside
from shardax.names.layout import Layout
from shardax.names.mesh import AnyMesh, MeshLike, as_mesh, current_mesh, describe_briefly, same_mesh
from shardax.names.spec import (
    FREE,
    Fit,
    OnMisfit,
    as_spec,
    axes_in,
    axes_of,
    check_misfit_policy,
    entries_of,
    entry_of,
    fit_cached,
    misfit_error,
)
from shardax.names.tokens import MODE_TRAIN


def with_sharding_constraint(arr: Any, sharding: Any) -> Any:
    """Constrain an array or tree; whatever does not fit is corrected to None, recorded, never raised.

    `sharding` is one spec or NamedSharding for all leaves, or a prefix tree of them. Leaves that are no arrays pass
    through. Without a mesh it warns and returns its argument.

    >>> import jax.numpy as jnp, shardax as sx
    >>> with jax.set_mesh(sx.make_mesh("dp=2,tp=4")):
    ...     with_sharding_constraint(jnp.ones((8, 6)), jax.P(("dp", "sp"), "tp")).sharding.spec
    P('dp',)
    """
    return _constrain_tree(arr, sharding, _STORED)


def constrain(
    x: Any,
    spec_or_axes: Any,
    *,
    mesh: MeshLike | None = None,
    on_misfit: OnMisfit = "error",
    axes: ResolvesAxes | None = None,
    mode: str = MODE_TRAIN,
) -> Any:
    """Constrain an activation (array or tree) to a spec, a NamedSharding, a list of semantic axes, or a Layout.

    A misfit is an error unless `on_misfit` says "warn" or "adapt"; what an adapted dimension loses is left free.

    >>> import jax.numpy as jnp, shardax as sx
    >>> mesh = sx.make_mesh("fsdp=2,tp=4")
    >>> constrain(jnp.ones((4, 8)), [sx.BATCH, sx.HEAD], mesh=mesh, on_misfit="adapt").sharding.spec
    P('fsdp', 'tp')
    """
    if axes is not None and not hasattr(axes, "resolve_spec"):
        resolver(axes, mode)  # says what would
    policy = _activations(on_misfit, axes, mode)
    if isinstance(spec_or_axes, Layout):
        spec_or_axes = spec_or_axes.like(x).shardings
    elif isinstance(spec_or_axes, (list, tuple)) and not spec_or_axes and hasattr(x, "shape"):
        spec_or_axes = PartitionSpec()  # the axes of a scalar
    return _constrain_tree(x, spec_or_axes, policy if mesh is None else policy.on(mesh))


def get_corrected_named_sharding(
    shape: Sequence[int], partition_spec: PartitionSpec, raise_mesh_error: bool = True
) -> NamedSharding:
    """The NamedSharding that `with_sharding_constraint` would use for this shape in the mesh in force.

    >>> import shardax as sx
    >>> with jax.set_mesh(sx.make_mesh("dp=2,tp=4")):
    ...     get_corrected_named_sharding((8, 6), jax.P("dp", "tp")).spec
    P('dp',)
    """
    mesh = current_mesh()
    if mesh is None:
        if raise_mesh_error:
            raise NoMeshError(
                "get_corrected_named_sharding needs a mesh and none is in force",
                remedy="enter `with jax.set_mesh(mesh):` (or `with mesh:`)",
            )
        warn_outside("no mesh is in force: the sharding is replicated on an empty mesh")
        return NamedSharding(Mesh(np.empty((), dtype=object), ()), PartitionSpec())
    found = fit_cached(as_spec(partition_spec), tuple(shape), mesh.shape_tuple, 4, True)
    if found.corrections:
        record(_decision(found, shape, np.float32))
    return NamedSharding(mesh, found.spec)


# ---- trees ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Policy:
    """What a front door decided for every leaf of one call: how misfits and a missing mesh are met."""

    on_misfit: OnMisfit
    stored: bool
    without_mesh: Literal["warn", "error"]
    resolve: Callable[[Any], PartitionSpec] | None = None
    mesh: AnyMesh | None = None

    def on(self, mesh: MeshLike) -> _Policy:
        """The same, on a mesh that was given."""
        return replace(self, mesh=as_mesh(mesh))


_SPACES = {"device": jax.memory.Space.Device, "pinned_host": jax.memory.Space.Host}
"""What a program calls the kinds of memory."""

_STORED = _Policy("adapt", stored=True, without_mesh="warn")


@lru_cache(maxsize=256)
def _activations(on_misfit: OnMisfit, axes: ResolvesAxes | None, mode: str) -> _Policy:
    check_misfit_policy(on_misfit)
    return _Policy(on_misfit, stored=False, without_mesh="error", resolve=resolver(axes, mode))


def _constrain_tree(tree: Any, sharding: Any, policy: _Policy) -> Any:
    asked = _as_target(sharding, policy)
    if asked is not None:
        if isinstance(tree, (jax.Array, np.ndarray)):  # the common case, without tree machinery
            return _constrain_leaf(tree, asked, policy)
        return jax.tree.map(lambda leaf: _constrain_leaf(leaf, asked, policy), tree)
    try:
        return jax.tree.map(
            lambda target, part: part if target is None else _constrain_tree(part, target, policy),
            sharding,
            tree,
            is_leaf=lambda node: node is None or _as_target(node, policy) is not None,
        )
    except ValueError as error:
        if isinstance(error, (SpecError, LayoutError, MeshError)) or "prefix" not in str(error).lower():
            raise
        raise LayoutError(f"the shardings are not a prefix of the tree: {error}") from None


def _as_target(sharding: Any, policy: _Policy) -> PartitionSpec | NamedSharding | None:
    """The spec or sharding that this is, or None for a tree of them."""
    if isinstance(sharding, (PartitionSpec, NamedSharding)):
        return sharding
    if policy.resolve is not None and isinstance(sharding, (list, tuple)) and _is_axes(sharding):
        return policy.resolve(sharding)
    if isinstance(sharding, jax.sharding.Sharding) or (
        sharding is not None and jax.tree.leaves(sharding) == [sharding]
    ):
        raise SpecError(
            f"not a sharding constraint: {sharding!r} ({type(sharding).__name__})",
            remedy="give a PartitionSpec, a NamedSharding, or a tree of them",
        )
    return None


def _is_axes(value: Sequence[Any]) -> bool:
    return len(value) > 0 and all(
        entry is None or isinstance(entry, str) or (isinstance(entry, (list, tuple)) and _is_axes(entry))
        for entry in value
    )


# ---- one leaf -------------------------------------------------------------------------------------------------------


def _constrain_leaf(x: Any, target: PartitionSpec | NamedSharding, policy: _Policy) -> Any:
    """Hundreds of these stand in a program, and JAX walks the stack at each: few frames, everything else cached."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x
    traced = not trace_state_clean()
    itemsize = getattr(x.dtype, "itemsize", 8)
    if traced:
        in_force = get_abstract_mesh(), context_manager_mesh()
        plan = _plan_in(target, x.shape, itemsize, policy.mesh, *in_force, policy.stored)
    else:
        plan = _plan_of(target, x.shape, itemsize, policy.mesh, None, policy.stored)
    if plan is None:
        return _without_mesh(x, target, policy)
    if plan.fit.corrections and (policy.on_misfit != "adapt" or is_noticed(plan.fit)):
        _report(plan.fit, x, policy)
    if not traced:
        return plan.put(x)
    return plan.trace(x) if is_staged(current_trace()) else plan.in_transform(x)


def _without_mesh(x: Any, target: PartitionSpec | NamedSharding, policy: _Policy) -> Any:
    spec = target.spec if isinstance(target, NamedSharding) else target
    message = f"no mesh is in force: the constraint {spec} on shape {x.shape} does nothing"
    if policy.without_mesh == "error":
        raise NoMeshError(message, remedy="pass mesh=…, or enter `with jax.set_mesh(mesh):` (or `with mesh:`)")
    warn_outside(message)
    return x


def _report(found: Fit, x: Any, policy: _Policy) -> None:
    if policy.on_misfit == "error":
        raise misfit_error("the constraint does not fit", [(found, place_outside(), None)])
    record(_decision(found, x.shape, x.dtype), warn=policy.on_misfit == "warn")


def _decision(found: Fit, shape: Sequence[int], dtype: Any) -> Decision:
    return Decision(place_outside(), tuple(shape), str(dtype), found.spec, f"the constraint {found.asked}", found)


# ---- plans ----------------------------------------------------------------------------------------------------------


class _Plan:
    """A constraint resolved against one shape, mesh and context: what to call, computed once and cached."""

    __slots__ = ("auto", "explicit", "fit", "in_transform", "memory_kind", "mesh", "on_mesh", "spec", "trace")

    def __init__(self, found: Fit, mesh: AnyMesh, memory_kind: str | None, context: AnyMesh | None) -> None:
        self.fit, self.mesh, self.spec, self.memory_kind = found, mesh, found.spec, memory_kind
        inside = context is not None and not context.empty
        self.on_mesh = context if inside and isinstance(context, AbstractMesh) else mesh
        kinds = dict(zip(self.on_mesh.axis_names, self.on_mesh.axis_types, strict=True))
        auto = self._part(kinds, AxisType.Auto)
        self.explicit = self._part(kinds, AxisType.Explicit)
        self.auto = None if auto is None else self._constraint(auto, context)
        self.trace: Callable[[Any], Any] = self._trace
        if self.auto is not None and self.explicit is None:
            self.trace = self.auto
        elif self.auto is not None:
            _check_order(found, kinds)
            # In an eager jax.checkpoint a constraint on Auto axes is a transfer, which would drop the Explicit ones.
            self.trace = jax.jit(self._trace)
        self.trace = self._in_memory(self.trace)
        # Under an eager grad or vmap a constraint is run at once, alone, and wants its array on the mesh already.
        self.in_transform: Callable[[Any], Any] = jax.jit(self.trace)

    def _part(self, kinds: dict[str, AxisType], kind: AxisType) -> PartitionSpec | None:
        """The spec on the axes of one kind, or None where the mesh has no axes of it."""
        if kind not in kinds.values():
            return None
        entries = [
            entry if entry is FREE else entry_of([axis for axis in axes_of(entry) if kinds[axis] == kind])
            for entry in entries_of(self.spec, len(self.fit.shape))
        ]
        return PartitionSpec(*entries)

    def _constraint(self, spec: PartitionSpec, context: AnyMesh | None) -> Callable[[Any], Any]:
        free = frozenset(dim for dim, entry in enumerate(spec) if entry is FREE)
        kind = None if self.memory_kind in _SPACES else self.memory_kind  # the others are moved to, below
        return auto_constraint(_named(self.on_mesh, spec, kind), context, free)

    def _in_memory(self, constrained: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The constraint, and a move where the array is in another memory: a constraint alone would not say so."""
        space = _SPACES.get(self.memory_kind or "")
        if space is None:
            return constrained

        def trace(x: Any) -> Any:
            x = constrained(x)
            return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)

        return trace

    def _trace(self, x: Any) -> Any:
        """Apply inside a trace: reshard over Explicit axes, then constrain over Auto ones; Manual axes are dropped."""
        if self.explicit is not None:
            spec = _without_free(self.explicit, self.on_mesh, x)
            x = _resharder(self.on_mesh, spec, self.auto is None)(x)
        return x if self.auto is None else self.auto(x)

    def put(self, x: Any) -> Any:
        """Apply outside any trace: one transfer, no compilation."""
        if not isinstance(self.mesh, Mesh):
            raise MeshError(
                f"the mesh in force is abstract ({describe_briefly(self.mesh)}): it has no devices to put an array on",
                remedy="enter a mesh of devices, or call this inside jit or jax.eval_shape",
            )
        return jax.device_put(x, _named(self.mesh, _without_free(self.spec, self.mesh, x), self.memory_kind))


@lru_cache(maxsize=16384)
def _resharder(mesh: AnyMesh, spec: PartitionSpec, alone: bool) -> Callable[[Any], Any]:
    """`jax.reshard`; with the devices of the mesh where nothing else in the program may name them.

    Without `jax.set_mesh` only a transfer or a jit with shardings carries devices into a program, and `jax.vmap` of a
    transfer shards the wrong dimension.
    """
    reshard = partial(jax.reshard, out_shardings=_named(mesh, spec, None))
    return jax.jit(reshard, out_shardings=_named(mesh, spec, None)) if alone and isinstance(mesh, Mesh) else reshard


@lru_cache(maxsize=16384)
def _named(mesh: AnyMesh, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def _without_free(spec: PartitionSpec, mesh: AnyMesh, x: Any) -> PartitionSpec:
    """A transfer must name every dimension: a free one keeps what it has, as far as its axes are not used."""
    if not any(entry is FREE for entry in spec):
        return spec
    now = getattr(x if trace_state_clean() else jax.typeof(x), "sharding", None)
    held = now.spec if isinstance(now, NamedSharding) and same_mesh(now.mesh, mesh) else PartitionSpec()
    used = set(axes_in(spec))
    entries = [
        (held_entry if used.isdisjoint(axes_of(held_entry)) else None) if entry is FREE else entry
        for entry, held_entry in zip(spec, entries_of(held, len(spec)), strict=False)
    ]
    return PartitionSpec(*entries)


def _check_order(found: Fit, kinds: dict[str, AxisType]) -> None:
    """JAX lays Auto axes inside Explicit ones: the other order cannot be said on a mixed mesh."""
    problems = [
        Offence(
            f"dim {dim}",
            f"{axes} puts the Auto axis {auto!r} outside the Explicit axis {axes[place + 1]!r}; JAX has no such layout",
            spec=found.spec,
            remedy="name the Explicit axes first",
        )
        for dim, entry in enumerate(found.spec)
        for axes in [axes_of(entry)]
        for place, auto in enumerate(axes[:-1])
        if kinds[auto] == AxisType.Auto and kinds[axes[place + 1]] == AxisType.Explicit
    ]
    if problems:
        raise SpecError("one dimension mixes axis types in the wrong order", problems)


def _plan_of(
    target: PartitionSpec | NamedSharding,
    shape: tuple[int, ...],
    itemsize: int,
    given: AnyMesh | None,
    context: AnyMesh | None,
    stored: bool,
) -> _Plan | None:
    """The plan for the mesh in force now; None where there is none."""
    if isinstance(target, NamedSharding):
        spec, memory_kind, mesh = target.spec, target.memory_kind, current_mesh(target.mesh)
        if given is not None and not same_mesh(given, target.mesh):
            meshes = (("the mesh argument", given), ("the sharding", target.mesh))
            raise MeshConflictError(
                "two meshes are given and they disagree",
                [Offence(place, describe_briefly(one)) for place, one in meshes],
                "give the spec of the sharding, or no mesh",
            )
    else:
        spec, memory_kind, mesh = target, None, current_mesh(given)
    if mesh is None or not mesh.axis_names:
        return None
    return _plan(spec, memory_kind, shape, itemsize, mesh, context, stored)


@lru_cache(maxsize=16384)
def _plan_in(
    target: PartitionSpec | NamedSharding,
    shape: tuple[int, ...],
    itemsize: int,
    given: AnyMesh | None,
    abstract: AbstractMesh,
    entered: Mesh,
    stored: bool,
) -> _Plan | None:
    """`_plan_of` inside a trace, where the meshes in force, all of them arguments, say all there is to know."""
    context = entered if abstract.empty else abstract
    return _plan_of(target, shape, itemsize, given, context, stored)


@lru_cache(maxsize=16384)
def _plan(
    spec: PartitionSpec,
    memory_kind: str | None,
    shape: tuple[int, ...],
    itemsize: int,
    mesh: AnyMesh,
    context: AnyMesh | None,
    stored: bool,
) -> _Plan:
    return _Plan(fit_cached(spec, shape, mesh.shape_tuple, itemsize, stored), mesh, memory_kind, context)
