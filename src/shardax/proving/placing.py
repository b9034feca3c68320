"""Which spec each argument leaf of a step gets, and from where: `in_specs`, `layout`, the jit, or the array itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardax.errors import MeshConflictError, Offence, ProofError, did_you_mean, plural
from shardax.names.decision import itemsize_of
from shardax.names.layout import Layout
from shardax.names.mesh import (
    AnyMesh,
    MeshLike,
    MeshSpec,
    current_mesh,
    describe_briefly,
    required_mesh,
    same_mesh,
)
from shardax.names.paths import flatten, rebuild
from shardax.names.spec import as_spec, axes_in, fit_cached, shard_count
from shardax.proving.moves import stored_width
from shardax.proving.step import Step, is_array
from shardax.tables import show_bytes

MOST_SHOWN = 12
UNKNOWN = "unknown"  # the source of a spec that nobody has said: it stands for nothing


class Open:
    """Nobody has said where this leaf lies."""


OPEN = Open()
Spec = PartitionSpec | Open


@dataclass(frozen=True)
class Placed:
    """One array on the mesh: its path, what it is, how it lies, and who said so."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    spec: PartitionSpec
    source: str
    donated: bool = False
    number: int | None = None  # of the compiled program's parameter; None: the program does not use it

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.ceil(math.prod(self.shape) * stored_width(self.dtype, self.itemsize))

    def bytes_on(self, mesh: MeshSpec) -> int:
        """Bytes of one device's block."""
        return self.bytes // shard_count(self.spec, mesh)

    @property
    def group(self) -> str:
        """The part of the step it belongs to: the argument and its first key."""
        end = next((at for at, sign in enumerate(self.path) if sign in "[."), len(self.path))
        close = self.path.find("]", end) if self.path[end : end + 1] == "[" else -1
        dot = next((at for at in range(end + 1, len(self.path)) if self.path[at] in "[."), len(self.path))
        return self.path[: close + 1 if close > 0 else dot]


def chosen_mesh(mesh: MeshLike | None, *layouts: Any, need: str) -> MeshLike:
    """The mesh to prove for: the one that is given, whatever is in force; else the one in force, or of the layouts."""
    if mesh is not None:
        return mesh
    return current_mesh() or mesh_of_layouts(*layouts) or required_mesh(need=need)


def mesh_of_layouts(*given: Any) -> AnyMesh | None:
    """The mesh that the layouts among the values were made for: who has a layout has said its mesh already."""
    meshes = [
        each.mesh
        for each in jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, Layout))
        if isinstance(each, Layout)
    ]
    if any(not same_mesh(meshes[0], other) for other in meshes[1:]):
        raise MeshConflictError(
            "the layouts were made for different meshes",
            [Offence(f"layout {at}", describe_briefly(mesh)) for at, mesh in enumerate(meshes)],
            "pass mesh=… to say which one is meant",
        )
    return meshes[0] if meshes else None


def given_specs(step: Step, in_specs: Any, layout: Any) -> list[tuple[Spec, str]]:
    """For every leaf of the arguments the spec it was given, and by what; later sources win over earlier ones."""
    found: list[tuple[Spec, str]] = [(_own_spec(leaf), "array") for leaf in step.leaves()]
    for word, specs in (("layout", _layout_specs(step, layout)), ("in_specs", _in_specs(step, in_specs))):
        found = [(new, word) if new is not OPEN else old for old, new in zip(found, specs, strict=True)]
    scalar = (PartitionSpec(), "scalar")
    return [scalar if getattr(leaf, "ndim", 0) == 0 else pair for leaf, pair in zip(step.leaves(), found, strict=True)]


def _own_spec(leaf: Any) -> Spec:
    sharding = getattr(leaf, "sharding", None) if is_array(leaf) else None
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return sharding if isinstance(sharding, PartitionSpec) else OPEN


def _open(tree: Any) -> list[Spec]:
    return [OPEN] * len(jax.tree.leaves(tree))


def _in_specs(step: Step, in_specs: Any) -> list[Spec]:
    return [
        spec
        for (name, tree), specs in zip(step.arguments, _per_argument(step, in_specs, "in_specs"), strict=True)
        for spec in _broadcast(name, specs, tree)
    ]


def _layout_specs(step: Step, layout: Any) -> list[Spec]:
    given = _per_argument(step, layout, "layout")
    strange = [each for each in given if each is not None and not isinstance(each, Layout)]
    if strange:
        raise ProofError(
            f"layout is a Layout, or one per argument, not {type(strange[0]).__name__}",
            remedy="make one with sx.layout(tree, rules, mesh); specs go into in_specs=",
        )
    return [
        spec
        for (_, tree), each in zip(step.arguments, given, strict=True)
        for spec in (_open(tree) if each is None else _from_layout(tree, each))
    ]


def _per_argument(step: Step, given: Any, word: str) -> list[Any]:
    """One entry per argument from one for all, a tuple over the positional ones, or a mapping by argument name."""
    names = [name for name, _ in step.arguments]
    if given is None or isinstance(given, (PartitionSpec, NamedSharding, Layout)):
        return [given] * len(names)
    if isinstance(given, Mapping) and set(cast("Mapping[str, Any]", given)) <= set(names):
        return [cast("Mapping[str, Any]", given).get(name) for name in names]
    if isinstance(given, Mapping) and not (len(step.args) == 1 and isinstance(step.args[0], Mapping)):
        strange = [key for key in cast("Mapping[str, Any]", given) if key not in names]
        raise ProofError(
            f"{word} names arguments that are not there",
            [Offence(str(key), f"is no argument of {names}{did_you_mean(key, names)}") for key in strange],
        )
    if not isinstance(given, (tuple, list)):
        listed: list[Any] = [given]
    else:
        listed = list(cast("Sequence[Any]", given))
    if len(listed) != len(step.args):
        raise ProofError(
            f"{word} has {plural(len(listed), 'entry', 'entries')} for {plural(len(step.args), 'positional argument')}"
            f" ({', '.join(step.parameters)})",
            remedy="give one entry per positional argument (None: leave it as it is), or a mapping by argument name",
        )
    return [*listed, *([None] * len(step.kwargs))]


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (PartitionSpec, NamedSharding))


def _spec_of(entry: Any) -> Spec:
    return OPEN if entry is None else entry.spec if isinstance(entry, NamedSharding) else as_spec(entry)


def _broadcast(name: str, specs: Any, tree: Any) -> list[Spec]:
    """One spec per leaf of `tree` from a prefix tree of specs."""
    flat: list[Spec] = []

    def fill(spec: Any, part: Any) -> None:
        flat.extend([_spec_of(spec)] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(fill, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError, KeyError) as error:
        raise ProofError(
            f"the specs for {name!r} do not follow its structure",
            [Offence(name, " ".join(str(error).split())[:400])],
            "give a tree of specs shaped like the argument, or a prefix of it",
        ) from error
    return flat


def _from_layout(tree: Any, layout: Layout) -> list[Spec]:
    """A leaf takes the decision of its path; an optimiser's copy ("mu/mlp/kernel") that of the path it ends with."""
    paths, leaves = flatten(tree)
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    specs = [_decided(layout, path.split("/"), shape) for path, shape in zip(paths, shapes, strict=True)]
    return jax.tree.leaves(rebuild(tree, specs), is_leaf=lambda leaf: isinstance(leaf, (Open, PartitionSpec)))


# ---- arrays known by their paths only ------------------------------------------------------------------------------


def specs_by_path(
    step: Step, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], in_specs: Any, layout: Any
) -> list[Spec]:
    """Specs for the arrays inside stateful arguments: by layouts, and by one spec per argument."""
    specs = dict(zip([name for name, _ in step.arguments], _per_argument(step, in_specs, "in_specs"), strict=True))
    layouts = dict(zip([name for name, _ in step.arguments], _per_argument(step, layout, "layout"), strict=True))
    if isinstance(layout, Layout):
        layouts["closed over"] = layout
    return [
        _by_path(path, shape, _of_argument(path, specs), _of_argument(path, layouts))
        for path, shape in zip(paths, shapes, strict=True)
    ]


def _of_argument(path: str, given: Mapping[str, Any]) -> Any:
    return next((found for name, found in given.items() if re.match(rf"{re.escape(name)}($|[.\[])", path)), None)


def _by_path(path: str, shape: tuple[int, ...], specs: Any, layout: Any) -> Spec:
    if isinstance(specs, (PartitionSpec, NamedSharding)):
        return _spec_of(specs) if shape else PartitionSpec()
    chosen = specs if isinstance(specs, Layout) else layout
    if specs is not None and not isinstance(specs, Layout):
        raise ProofError(
            f"in_specs for the stateful argument of {path!r} is neither a spec nor a Layout: {type(specs).__name__}",
            remedy="pass layout=sx.layout(module, rules, mesh), or one spec for all of the argument",
        )
    return OPEN if chosen is None else _decided(chosen, re.findall(r"\w+", path), shape)


def _decided(layout: Layout, parts: Sequence[str], shape: tuple[int, ...]) -> Spec:
    """The decision whose path the parts end with, if the shapes agree."""
    decisions = layout.by_path
    tails = ("/".join(parts[at:]) for at in range(len(parts)))
    found = next((decisions[t] for t in tails if t in decisions and decisions[t].shape == shape), None)
    return OPEN if found is None else found.fit.spec


# ---- what is refused ------------------------------------------------------------------------------------------------


def check_placed(placed: Sequence[Placed], mesh: MeshSpec, word: str = "arguments") -> None:
    """One error for every array whose spec does not fit its shape on the mesh."""
    shape = tuple(mesh.shape.items())
    offences = [
        offence
        for leaf in placed
        for offence in fit_cached(leaf.spec, leaf.shape, shape, leaf.itemsize, True).offences(leaf.path)
    ]
    if offences:
        more = f" (the first {MOST_SHOWN} of {len(offences)})" if len(offences) > MOST_SHOWN else ""
        raise ProofError(f"{word} do not fit the mesh {mesh}{more}", offences[:MOST_SHOWN])


def no_layout(unplaced: Sequence[tuple[str, Any]]) -> ProofError:
    """The error for arrays that nobody has placed: nothing is replicated silently."""

    def size(leaf: Any) -> int:
        return math.prod(leaf.shape) * itemsize_of(leaf.dtype)

    largest = sorted(unplaced, key=lambda pair: -size(pair[1]))
    shown = [
        Offence(path, f"{show_bytes(size(leaf))} with no sharding", tuple(leaf.shape))
        for path, leaf in largest[:MOST_SHOWN]
    ]
    more = f" (the largest {MOST_SHOWN} of {len(largest)})" if len(largest) > MOST_SHOWN else ""
    return ProofError(
        f"{plural(len(largest), 'array')} without a layout{more}",
        shown,
        "pass layout=…, in_specs=… (P() replicates), or arguments that carry a NamedSharding",
    )


@dataclass(frozen=True)
class Replicated:
    """An array of which several devices hold the same bytes."""

    path: str
    bytes_per_device: int
    copies: int
    spec: PartitionSpec
    unused_axes: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Does every device hold all of it?"""
        return not axes_in(self.spec)

    @property
    def wasted(self) -> int:
        """Bytes per device that sharding over the unused axes would save."""
        return self.bytes_per_device - self.bytes_per_device // self.copies


def replicated(placed: Sequence[Placed], mesh: MeshSpec, threshold: int) -> tuple[Replicated, ...]:
    """Arrays above a threshold (bytes on every device) that some axes of the mesh do not shard; the worst first."""
    found: list[Replicated] = []
    for leaf in placed:
        used = set(axes_in(leaf.spec))
        unused = tuple(name for name, size in mesh.shape.items() if size > 1 and name not in used)
        here = leaf.bytes_on(mesh)
        if unused and here >= threshold:
            copies = math.prod(mesh.shape[name] for name in unused)
            found.append(Replicated(leaf.path, here, copies, leaf.spec, unused))
    return tuple(sorted(found, key=lambda each: (not each.whole, -each.wasted, each.path)))
