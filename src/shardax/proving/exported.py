"""`prove_exported`: a proof from what `jax.export` wrote, where the source is not at hand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
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
from shardax.proving.proof import Proof
from shardax.proving.prove import prove
from shardax.proving.rebind import PLATFORM_NAMES
from shardax.proving.target import Target


def prove_exported(
    artefact: export.Exported | bytes | str | Path,
    *,
    target: str | Target = "cpu:8",
    mesh: MeshLike | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    **options: Any,
) -> Proof:
    """Prove a function that `jax.export` exported: the value, its bytes, or the file that holds them.

    Paths, donations, shardings and Python lines are those it was exported with. Its number of devices is part of the
    program: the target has as many. Options are those of `sx.prove`.

    >>> import jax, jax.numpy as jnp, shardax as sx
    >>> mesh = sx.MeshSpec.of("dp=8").abstract()
    >>> x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("dp")))
    >>> exported = jax.export.export(jax.jit(lambda x: x.sum()), platforms=["cpu", "tpu"])(x)
    >>> proof = sx.prove_exported(exported, target="cpu:8")
    >>> [(row.op, row.axes) for row in proof.ledger], str(proof.mesh)
    ([('all-reduce', ('dp',))], 'dp=8')
    """
    exported = _read(artefact)
    goal = Target.of(target)
    _check_platform(exported, goal)
    known, shardings = exported_arguments(exported)
    spec = _mesh_of(exported, shardings) if mesh is None else goal.mesh(mesh)
    _check_devices(exported, goal, spec)
    step = _Signed.of(exported, known)
    args, kwargs = _arguments(exported, known, shardings, spec.abstract())
    return prove(
        step.function(exported),
        *args,
        mesh=spec,
        target=goal,
        in_specs=in_specs,
        out_specs=out_specs,
        donate=step.donated or None,
        **options,
        **kwargs,
    )


def _read(artefact: export.Exported | bytes | str | Path) -> export.Exported:
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
