"""From what `jax.export` wrote back to a function and its arguments: a step whose source is not at hand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardax._compat import exported_arguments
from shardax.errors import Offence, ProofError, plural
from shardax.names.mesh import MeshLike, MeshSpec
from shardax.proving.rebind import PLATFORM_NAMES
from shardax.proving.target import Target


@dataclass(frozen=True)
class Artefact:
    """An exported step, ready to be proved: what it calls, with which arguments, on which mesh, and what it donates."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: MeshSpec
    donated: list[int | str] | None

    @classmethod
    def of(
        cls,
        exported: export.Exported,
        goal: Target,
        mesh: MeshLike | None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Artefact:
        """Its arguments are those it was exported with; the ones that are given say how they lie."""
        _check_platform(exported, goal)
        known, shardings = exported_arguments(exported)
        spec = _mesh_of(exported, shardings) if mesh is None else goal.mesh(mesh)
        _check_devices(exported, goal, spec)
        if args or kwargs:
            shardings = _given_shardings(exported, args, kwargs or {}, shardings)
        step = _Signed.of(exported, known)
        own_args, own_kwargs = _arguments(exported, known, shardings, spec.abstract())
        return cls(step.function(exported), own_args, own_kwargs, spec, step.donated or None)


def read_exported(artefact: export.Exported | bytes | str | Path) -> export.Exported:
    """The exported function: itself, from its bytes, or from the file that holds them."""
    if isinstance(artefact, export.Exported):
        return artefact
    where, data = "the bytes", artefact
    if isinstance(data, (str, Path)):
        where = str(data)
        try:
            data = Path(data).read_bytes()
        except OSError as error:
            raise ProofError(f"there is no exported function in {where}", [Offence(where, str(error))]) from error
    if not isinstance(data, (bytes, bytearray)):
        raise ProofError(
            f"not an exported function: {type(data).__name__}",
            remedy="pass jax.export.export(jit)(…), its serialize(), or the file that holds them",
        )
    try:
        return export.deserialize(bytearray(data))
    except ImportError as error:
        raise ProofError(
            "reading an exported function needs flatbuffers", remedy='pip install "shardax[export]"'
        ) from error
    except Exception as error:  # bytes that are something else fail anywhere inside the reader
        words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no words'}"
        raise ProofError(
            f"{where} {'are' if where == 'the bytes' else 'is'} no exported function", [Offence(where, words)],
            "write it with jax.export.export(jit)(…).serialize()",
        ) from error  # fmt: skip


def _given_shardings(
    exported: export.Exported, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Sequence[Any]
) -> list[Any]:
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    shapes = [aval.shape for aval in exported.in_avals]
    if tree != exported.in_tree or [getattr(leaf, "shape", ()) for leaf in leaves] != shapes:
        raise ProofError(
            f"{exported.fun_name} was exported for other arguments",
            [Offence("exported", str(exported.in_avals)), Offence("given", str([jax.typeof(leaf) for leaf in leaves]))],
            "leave the arguments out: the artefact knows its own",
        )
    given = [getattr(leaf, "sharding", None) for leaf in leaves]
    return [new if isinstance(new, NamedSharding) else old for new, old in zip(given, own, strict=True)]


def _check_platform(exported: export.Exported, target: Target) -> None:
    platform = PLATFORM_NAMES.get(target.platform, target.platform)
    if platform not in exported.platforms:
        raise ProofError(
            f"{exported.fun_name} was exported for {', '.join(exported.platforms)}, not for {platform}",
            remedy=f"jax.export.export(jit, platforms={[*exported.platforms, platform]})(…)",
        )


def _check_devices(exported: export.Exported, target: Target, mesh: MeshSpec) -> None:
    if exported.nr_devices not in (1, target.devices) or mesh.size != target.devices:
        raise ProofError(
            f"{exported.fun_name} was exported for {plural(exported.nr_devices, 'device')} (mesh {mesh}),"
            f" and {target} has {target.devices:,}",
            remedy="prove it on a target of that size, or export it for this one",
        )


def _mesh_of(exported: export.Exported, shardings: Sequence[Any]) -> MeshSpec:
    found = [each.mesh for each in shardings if isinstance(each, NamedSharding) and not each.mesh.empty]
    if not found:
        raise ProofError(
            f"{exported.fun_name} was exported without shardings by name",
            remedy="pass mesh= and in_specs=, or export it with arguments that carry a NamedSharding",
        )
    return MeshSpec.of(found[0])


@dataclass(frozen=True)
class _Signed:
    """The names of the arguments, as the program knows them, and which of them are donated."""

    names: tuple[str, ...]
    donated: list[int | str]
    used: tuple[bool, ...]  # of every leaf; one that is not used is dropped here as jax drops it

    @classmethod
    def of(cls, exported: export.Exported, known: Sequence[tuple[str, bool] | None]) -> _Signed:
        args, kwargs = jax.tree.unflatten(exported.in_tree, range(len(known)))
        names: list[str] = []
        donated: list[int | str] = []
        for at, (word, tree) in enumerate([*((None, tree) for tree in args), *kwargs.items()]):
            used = [known[number] for number in jax.tree.leaves(tree)]
            live = [each for each in used if each is not None]
            if word is None:
                head = re.match(r"[^\W\d]\w*", live[0][0]) if live else None
                names.append(head[0] if head and head[0] not in (*names, *kwargs) else f"argument{at}")
            if live and all(given for _, given in live):
                donated.append(at if word is None else word)
        return cls(tuple(names), donated, tuple(each is not None for each in known))

    def function(self, exported: export.Exported) -> Any:
        """A function that calls it, under the exported one's name and parameters."""

        def step(*args: Any, **kwargs: Any) -> Any:
            given = zip(jax.tree.leaves((args, kwargs)), self.used, strict=True)
            leaves = [leaf if used else jnp.zeros(leaf.shape, leaf.dtype) for leaf, used in given]
            args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
            return exported.call(*args, **kwargs)

        kind = inspect.Parameter
        parameters = [kind(name, kind.POSITIONAL_ONLY) for name in self.names]
        step.__name__ = exported.fun_name
        step.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess] (paths keep their names)
            [*parameters, kind("kwargs", kind.VAR_KEYWORD)]
        )
        return step


def _arguments(
    exported: export.Exported, known: Sequence[Any], shardings: Sequence[Any], mesh: AbstractMesh
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as shapes with their shardings; what the program does not use lies anywhere."""
    leaves = [
        jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=_sharding(sharding, mesh) if used is not None else _whole(mesh)
        )
        for aval, used, sharding in zip(exported.in_avals, known, shardings, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
    return cast("tuple[Any, ...]", args), kwargs


def _sharding(sharding: Any, mesh: AbstractMesh) -> NamedSharding | None:
    return NamedSharding(mesh, sharding.spec) if isinstance(sharding, NamedSharding) else None


def _whole(mesh: AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
