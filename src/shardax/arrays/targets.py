"""Which sharding each leaf of a tree is to get: read from a `Layout`, a tree (or prefix) of shardings, or a single one.

Everything that is wrong with any leaf is listed before the first byte moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from shardax.arrays.host import DELETED
from shardax.errors import LayoutError, LeafError, Offence, PlacementError, SpecError, plural
from shardax.names.decision import itemsize_of
from shardax.names.layout import Layout
from shardax.names.mesh import AnyMesh, current_mesh, describe_briefly, required_mesh, same_mesh
from shardax.names.paths import flatten
from shardax.names.spec import FREE, axes_of, fit_cached


def read_target(tree: Any, target: Any) -> tuple[list[str], list[Any], list[Sharding]]:
    """The paths and leaves of a tree, and the sharding that `target` has for each of them.

    A sharding stands for everything below its path, so one sharding or a prefix of the tree is enough.

    >>> mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    >>> paths, _, shardings = read_target({"a": np.ones(2), "b": [np.ones(3)]}, NamedSharding(mesh, PartitionSpec()))
    >>> [(path, sharding.spec) for path, sharding in zip(paths, shardings)]
    [('a', P()), ('b/0', P())]
    """
    paths, leaves = flatten(tree)
    if not leaves:
        raise LeafError("the tree has no leaves", remedy="give a tree of arrays")
    check_leaves(paths, leaves)
    if isinstance(target, Layout):
        shardings = _of_layout(paths, leaves, target)
    else:
        shardings = _of_tree(paths, leaves, target)
    return paths, leaves, shardings


def mesh_of_devices(mesh: AnyMesh) -> Mesh:
    """The mesh itself, or the mesh in force where this one is its abstract twin; arrays need devices."""
    if isinstance(mesh, Mesh):
        return mesh
    found = current_mesh()
    if isinstance(found, Mesh) and same_mesh(found, mesh):
        return found
    raise PlacementError(
        f"the mesh {describe_briefly(mesh)} has no devices to put arrays on",
        remedy="enter `with jax.set_mesh(sx.make_mesh(…)):` of this shape, or use layout.on(sx.make_mesh(…))",
    )


# ---- leaves ---------------------------------------------------------------------------------------------------------


def check_leaves(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Every leaf is an array, an abstract one or a number; what is none of them is listed."""
    problems = [
        Offence(path, f"is {_kind_of(leaf)}")
        for path, leaf in zip(paths, leaves, strict=True)
        if not (_is_numeric(leaf) or isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)))
    ]
    if problems:
        raise LeafError(
            f"{plural(len(problems), 'leaf is', 'leaves are')} not an array", problems, "take it out of the tree"
        )


def _kind_of(leaf: Any) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return f"an array of {leaf.dtype}, not of numbers"
    return f"{type(leaf).__name__}, not an array"


def check_values(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Every leaf holds values that can be moved: it is not abstract, not given up, and not too large to be an array."""
    integers = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    problems: list[Offence] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if type(leaf) is np.ndarray:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            problems.append(Offence(path, "is abstract: it has a shape, and no values", remedy="sx.init makes them"))
        elif isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            problems.append(Offence(path, DELETED, leaf.shape))
        elif type(leaf) is int and not integers.min <= leaf <= integers.max:
            problems.append(Offence(path, f"{leaf} does not fit {integers.dtype}", remedy="jax_enable_x64, or a float"))
    if problems:
        raise LeafError(f"{plural(len(problems), 'leaf has', 'leaves have')} no values to move", problems)


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in "biufc" or (leaf.dtype.kind == "V" and leaf.dtype.fields is None)
    return isinstance(leaf, (bool, int, float, complex))


def dtype_text(dtype: Any, known: dict[str, str]) -> str:
    """A dtype as JAX will hold it, from `known` if it is there: a NumPy float64 is a float32 unless x64 is enabled."""
    text = str(dtype)
    found = known.get(text)
    if found is None:
        try:
            found = str(jax.dtypes.canonicalize_dtype(np.dtype(text)))
        except TypeError:  # an extended dtype, such as a PRNG key's
            found = text
        known[text] = found
    return found


# ---- a layout -------------------------------------------------------------------------------------------------------


def _of_layout(paths: list[str], leaves: list[Any], target: Layout) -> list[Sharding]:
    decisions = target.decisions
    if [decision.path for decision in decisions] != paths:
        by_path = target.by_path
        _same_leaves(paths, list(by_path), "the layout")
        decisions = tuple(by_path[path] for path in paths)
    known: dict[str, str] = {}
    fine: set[Any] = set()  # thousands of leaves come in a few kinds
    problems: list[Offence] = []
    for decision, leaf in zip(decisions, leaves, strict=True):
        shape = leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
        kind = shape, dtype, decision.shape, decision.dtype
        if kind in fine:
            continue
        if shape == decision.shape and dtype_text(dtype, known) == dtype_text(decision.dtype, known):
            fine.add(kind)
        else:
            problem = f"is {dtype}{list(shape)}, the layout was made for {decision.dtype}{list(decision.shape)}"
            problems.append(Offence(decision.path, problem))
    if problems:
        raise LayoutError(
            f"{plural(len(problems), 'leaf is', 'leaves are')} not what the layout was made for",
            problems,
            "make the layout from this tree: sx.layout(tree, rules, mesh)",
        )
    mesh = mesh_of_devices(target.mesh)
    made: dict[PartitionSpec, Sharding] = {}
    shardings = [made.setdefault(d.spec, NamedSharding(mesh, d.spec)) for d in decisions]
    return _fitted(paths, leaves, shardings)


def _same_leaves(paths: Sequence[str], others: Sequence[str], what: str) -> None:
    here, there = set(paths), set(others)
    missing = [Offence(path, f"is in the tree, not in {what}") for path in paths if path not in there]
    extra = [Offence(path, f"is in {what}, not in the tree") for path in others if path not in here]
    if missing or extra:
        raise LayoutError(f"{what} and the tree have different leaves", [*missing, *extra])


# ---- a tree of shardings --------------------------------------------------------------------------------------------


def _of_tree(paths: list[str], leaves: list[Any], target: Any) -> list[Sharding]:
    targets = dict(zip(*flatten(target), strict=True))
    strange = [
        Offence(path, f"is {type(value).__name__} {value!r}, not a sharding")
        for path, value in targets.items()
        if not isinstance(value, (Sharding, PartitionSpec))
    ]
    if strange:
        raise LayoutError(
            "there is no sharding where one is needed", strange, "give a Layout, NamedShardings or PartitionSpecs"
        )
    found = [next((place for place in _up(path) if place in targets), None) for path in paths]
    if None in found or len(targets) > len(set(found)):
        used = set(found)
        missing = [Offence(path, "has no sharding") for path, place in zip(paths, found, strict=True) if place is None]
        extra = [Offence(path, "is a sharding for no leaf") for path in targets if path not in used]
        raise LayoutError("the shardings are not those of the tree, nor a prefix of them", [*missing, *extra])
    bound = bind(list(targets), list(targets.values()))
    by_place = dict(zip(targets, bound, strict=True))
    return _fitted(paths, leaves, [by_place[place] for place in found if place is not None])


def _up(path: str) -> Iterator[str]:
    """The path itself, then every place above it, up to the root."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def bind(paths: Sequence[str], targets: Sequence[Any], mesh: Mesh | None = None) -> list[Any]:
    """Specs and shardings with the devices of the mesh given, else in force; every axis that it lacks is listed."""
    if any(isinstance(target, PartitionSpec) for target in targets):
        needed = next(target for target in targets if isinstance(target, PartitionSpec))
        mesh = mesh or mesh_of_devices(required_mesh(None, f"the spec {needed}"))
        check_axes_of_specs(paths, targets, mesh)
    return [_with_devices(target, mesh) for target in targets]


def check_axes_of_specs(paths: Sequence[str], targets: Sequence[Any], mesh: AnyMesh) -> None:
    """Every axis of every spec is there, and used once."""
    offences = [
        replace(offence, shape=None)
        for path, target in zip(paths, targets, strict=True)
        if isinstance(target, PartitionSpec)
        for offence in fit_cached(target, (0,) * len(target), mesh.shape_tuple, 1, True).offences(path or "(root)")
    ]  # 0 divides by everything
    if offences:
        raise SpecError(f"the specs do not belong on the mesh {describe_briefly(mesh)}", offences)


def _with_devices(target: Any, mesh: Mesh | None) -> Any:
    if isinstance(target, PartitionSpec) and mesh is not None:
        return NamedSharding(mesh, target)
    if isinstance(target, NamedSharding) and isinstance(target.mesh, AbstractMesh):
        return NamedSharding(mesh_of_devices(target.mesh), target.spec, memory_kind=target.memory_kind)
    return target


# ---- do they fit ----------------------------------------------------------------------------------------------------


def _fitted(paths: list[str], leaves: list[Any], shardings: list[Sharding]) -> list[Sharding]:
    """The shardings, without surplus entries; one error for every leaf that cannot have its own."""
    problems: list[Offence] = []
    fitted: list[Sharding] = []
    known: dict[Any, Sharding] = {}  # thousands of leaves come in a few kinds
    for path, leaf, sharding in zip(paths, leaves, shardings, strict=True):
        shape = leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
        item = itemsize_of(leaf.dtype) if hasattr(leaf, "dtype") else 4
        kind = shape, item, sharding
        if kind not in known:
            wrong = list(_problems(path, shape, item, sharding))
            if wrong:
                problems += wrong
                fitted.append(sharding)
                continue
            known[kind] = _without_surplus(shape, sharding)
        fitted.append(known[kind])
    if problems:
        bad = plural(len({problem.where for problem in problems}), "leaf", "leaves")
        raise PlacementError(f"{bad} of {len(paths)} cannot be placed", problems)
    return fitted


def _problems(path: str, shape: tuple[int, ...], item: int, sharding: Sharding) -> Iterator[Offence]:
    if not isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            yield Offence(path, str(error), shape=shape)
        return
    spec = _trimmed(sharding.spec, shape)
    yield from fit_cached(spec, shape, sharding.mesh.shape_tuple, item, True).offences(path or "(root)")
    if any(entry is FREE for entry in spec):
        free = "leaves a dimension free, and an array that is put must have a place for every one"
        yield Offence(path, free, shape=shape, spec=spec, remedy="name it, or None")


def _without_surplus(shape: tuple[int, ...], sharding: Sharding) -> Sharding:
    """The sharding without entries for dimensions that the array does not have, where those name no axis."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= len(shape):
        return sharding
    return NamedSharding(sharding.mesh, _trimmed(sharding.spec, shape), memory_kind=sharding.memory_kind)


def _trimmed(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    if any(axes_of(entry) for entry in spec[len(shape) :]):
        return spec
    return PartitionSpec(*spec[: len(shape)])
