"""`MeshSpec`, the named shape of a mesh, and the one place where the mesh in force is looked up.

A mesh is never looked up twice: `current_mesh` resolves it at the boundary and it is passed down from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh, get_mesh

from shardax._compat import context_manager_mesh, trace_state_clean
from shardax.errors import MeshConflictError, MeshError, NoMeshError, Offence

AnyMesh: TypeAlias = Mesh | AbstractMesh
AxisTypes: TypeAlias = "str | AxisType | Sequence[str | AxisType] | Mapping[str, str | AxisType]"
MeshLike: TypeAlias = "str | MeshSpec | Mesh | AbstractMesh | Mapping[str, int] | tuple[Sequence[int], Sequence[str]]"


@dataclass(frozen=True, init=False, repr=False)
class MeshSpec:
    """Axis names, sizes (one may be -1: "what is left") and axis types of a mesh, without devices.

    Made from names and sizes, or from one thing that says both, such as text.

    >>> spec = MeshSpec("dp=2,fsdp=-1,tp=4")
    >>> str(spec.resolve(32)), spec.resolve(32).size
    ('dp=2,fsdp=4,tp=4', 32)
    >>> MeshSpec(("dp", "tp"), (2, 4), axis_types="explicit")
    MeshSpec('dp=2,tp=4', axis_types='explicit')
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    axis_types: tuple[AxisType, ...]

    def __init__(
        self, names: MeshLike | Sequence[str], sizes: Sequence[int] | None = None, axis_types: AxisTypes | None = None
    ) -> None:
        if sizes is None:
            read_names, read_sizes, read_types = _read_spec(cast("MeshLike", names))
        else:
            read_names, read_sizes, read_types = _listed(names, "names"), _listed(sizes, "sizes"), ()
        types = read_axis_types(axis_types or read_types or "auto", read_names)
        problems = list(_axis_problems(read_names, read_sizes, types))
        if problems:
            raise MeshError("this mesh cannot be", problems, 'write it like "dp=2,fsdp=-1,tp=4": one size may be -1')
        for field, value in (("names", read_names), ("sizes", read_sizes), ("axis_types", types)):
            object.__setattr__(self, field, value)

    @classmethod
    def of(cls, spec: MeshLike, axis_types: AxisTypes | None = None) -> MeshSpec:
        """A MeshSpec from any of its spellings: text, mapping, `(sizes, names)`, a mesh, or a MeshSpec.

        >>> MeshSpec.of({"dp": 2, "tp": 4}) == MeshSpec.of(((2, 4), ("dp", "tp"))) == MeshSpec.of("dp:2, tp:4")
        True
        """
        return spec if isinstance(spec, cls) and axis_types is None else cls(spec, None, axis_types)

    @property
    def shape(self) -> dict[str, int]:
        """Axis name → size, major axis first."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        """The number of devices; an error while a size is still -1."""
        if -1 in self.sizes:
            raise MeshError(f"mesh {self} has no size yet: -1 is inferred by resolve(number of devices)")
        return math.prod(self.sizes)

    def resolve(self, devices: int) -> MeshSpec:
        """The same mesh with its -1 inferred, checked against a number of devices (fewer than given is fine).

        >>> MeshSpec.of("dp=3,tp=-1").resolve(8)
        Traceback (most recent call last):
            ...
        shardax.errors.MeshError: mesh dp=3,tp=-1 does not fit 8 devices
          tp: -1 cannot be inferred: 8 does not divide by 3
        would work: dp=1,tp=8; dp=2,tp=4; dp=4,tp=2; dp=8,tp=1
        """
        known = math.prod(size for size in self.sizes if size != -1)
        if -1 in self.sizes and devices % known == 0 and devices:
            sizes = tuple(devices // known if size == -1 else size for size in self.sizes)
            return MeshSpec(self.names, sizes, self.axis_types)
        if -1 not in self.sizes and known <= devices:
            return self
        if -1 in self.sizes:
            name = self.names[self.sizes.index(-1)]
            problem = Offence(name, f"-1 cannot be inferred: {devices} does not divide by {known}")
        else:
            problem = Offence("", f"it needs {known} devices, there are {devices}")
        raise MeshError(f"mesh {self} does not fit {devices} devices", [problem], self._what_would_work(devices))

    def _what_would_work(self, devices: int) -> str:
        shown = [
            ",".join(f"{name}={size}" for name, size in zip(self.names, sizes, strict=True))
            for sizes in factorizations(devices, self.sizes, most=8)
        ]
        return f"would work: {'; '.join(shown)}" if shown else ""

    def abstract(self) -> AbstractMesh:
        """The device-free `AbstractMesh` of this shape (any number of devices).

        >>> MeshSpec.of("dp=64,tp=64").abstract().size
        4096
        """
        _ = self.size
        return AbstractMesh(self.sizes, self.names, axis_types=self.axis_types)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def __repr__(self) -> str:
        kinds = tuple(kind.name.lower() for kind in self.axis_types)
        said = kinds[0] if len(set(kinds)) == 1 else kinds
        return f"MeshSpec('{self}'{'' if said == 'auto' else f', axis_types={said!r}'})"


def _axis_problems(names: Sequence[Any], sizes: Sequence[Any], types: Sequence[Any]) -> Iterator[Offence]:
    if not len(names) == len(sizes) == len(types):
        yield Offence(
            "", f"{len(names)} names {tuple(names)}, {len(sizes)} sizes {tuple(sizes)}, {len(types)} axis types"
        )
        return
    if not names:
        yield Offence("", "it has no axes")
    for name, size in zip(names, sizes, strict=True):
        if not isinstance(name, str) or not name.strip():
            yield Offence(repr(name), "an axis name is a non-empty string")
        if isinstance(size, bool) or not isinstance(size, int):
            yield Offence(str(name), f"size {size!r} is not an integer")
        elif size == 0 or size < -1:
            yield Offence(str(name), f"size {size} is not positive (only -1 has a meaning: what is left)")
    for name in sorted({name for name in names if names.count(name) > 1}, key=str):
        yield Offence(str(name), f"the axis is named {names.count(name)} times")
    if list(sizes).count(-1) > 1:
        unknown = [name for name, size in zip(names, sizes, strict=True) if size == -1]
        yield Offence(", ".join(map(str, unknown)), "only one size may be -1")


def _read_spec(spec: MeshLike) -> tuple[tuple[str, ...], tuple[int, ...], tuple[AxisType, ...]]:
    if isinstance(spec, MeshSpec):
        return spec.names, spec.sizes, spec.axis_types
    if isinstance(spec, (Mesh, AbstractMesh)):
        return tuple(map(str, spec.axis_names)), tuple(spec.axis_sizes), tuple(spec.axis_types)
    if isinstance(spec, str):
        return *_read_text(spec), ()
    if isinstance(spec, Mapping):
        return tuple(spec), tuple(map(_as_int, spec.values())), ()
    if isinstance(spec, Sequence) and len(spec) == 2 and not any(isinstance(part, str) for part in spec):
        sizes, names = cast("tuple[Sequence[int], Sequence[str]]", tuple(spec))
        return tuple(names), tuple(map(_as_int, sizes)), ()
    raise MeshError(
        f"not a mesh: {spec!r} ({type(spec).__name__})",
        remedy='give text like "dp=2,tp=4", a mapping, (sizes, names), a MeshSpec or a mesh',
    )


def _as_int(size: Any) -> int:
    return int(size) if isinstance(size, np.integer) else size


def _listed(values: Any, what: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise MeshError(f"the {what} of a mesh are a sequence, not {values!r}", remedy='or write "dp=2,tp=4"')
    return tuple(map(_as_int, values))


def _read_text(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names: list[str] = []
    sizes: list[int] = []
    problems: list[Offence] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, found, size = entry.replace(":", "=").partition("=")
        try:
            sizes.append(int(size))
            names.append(name.strip())
        except ValueError:
            problems.append(
                Offence(repr(entry), "has no size" if not found else f"size {size.strip()!r} is not a number")
            )
    if problems:
        raise MeshError(f"mesh {text!r} does not parse", problems, 'write it like "dp=2,fsdp=-1,tp=4"')
    return tuple(names), tuple(sizes)


def read_axis_types(axis_types: AxisTypes, names: Sequence[str]) -> tuple[AxisType, ...]:
    """One AxisType per axis, from one for all, a sequence, or a mapping (axes it leaves out are Auto).

    >>> [kind.name for kind in read_axis_types({"tp": "explicit"}, ("dp", "tp"))]
    ['Auto', 'Explicit']
    """
    if isinstance(axis_types, Mapping):
        strange = [
            Offence(name, f"is not an axis of the mesh {tuple(names)}") for name in axis_types if name not in names
        ]
        if strange:
            raise MeshError("axis_types name axes that are not there", strange)
        return tuple(_axis_type(axis_types.get(name, AxisType.Auto)) for name in names)
    if isinstance(axis_types, (str, AxisType)):
        return (_axis_type(axis_types),) * len(names)
    return tuple(map(_axis_type, axis_types))


def _axis_type(kind: str | AxisType) -> AxisType:
    if isinstance(kind, AxisType):
        return kind
    found = {member.name.lower(): member for member in AxisType}.get(str(kind).lower())
    if found is None:
        raise MeshError(f"unknown axis type {kind!r}", remedy='it is one of "auto", "explicit", "manual"')
    return found


@lru_cache(maxsize=256)
def factorizations(devices: int, pattern: tuple[int, ...], most: int = 8) -> list[tuple[int, ...]]:
    """Sizes that multiply to `devices`, nearest to `pattern` first (as many of its sizes kept as possible).

    >>> factorizations(8, (2, 3))
    [(2, 4), (1, 8), (4, 2), (8, 1)]
    """

    def split(rest: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (rest,)
            return
        for first in range(1, rest + 1):
            if rest % first == 0:
                for tail in split(rest // first, axes - 1):
                    yield (first, *tail)

    if not pattern or devices < 1 or len(pattern) > 6:
        return []

    def changed(sizes: tuple[int, ...]) -> int:
        return sum(size != asked for size, asked in zip(sizes, pattern, strict=True) if asked != -1)

    return sorted(split(devices, len(pattern)), key=lambda sizes: (changed(sizes), sizes))[:most]


# ---- the mesh in force ----------------------------------------------------------------------------------------------


def as_mesh(mesh: MeshLike) -> AnyMesh:
    """A mesh stays itself; every other spelling becomes an abstract mesh."""
    return mesh if isinstance(mesh, (Mesh, AbstractMesh)) else MeshSpec.of(mesh).abstract()


def same_mesh(one: AnyMesh, other: AnyMesh) -> bool:
    """Do two meshes name the same axes, of the same sizes, on the same devices (where both have devices)?

    Axis types do not count: inside `shard_map` the same mesh is partly Manual.
    """
    if one is other:
        return True
    if one.axis_names != other.axis_names or one.axis_sizes != other.axis_sizes:
        return False
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return one == other or bool(np.array_equal(one.devices, other.devices))
    return True


def current_mesh(mesh: MeshLike | None = None) -> AnyMesh | None:
    """The mesh in force: the argument, else `jax.set_mesh` (concrete or abstract), else `with mesh:`, else None.

    Two that disagree are an error; while tracing under `jax.set_mesh` the answer is abstract, because a trace may
    be reused on other devices. An argument without devices that agrees with the mesh in force means that mesh.

    >>> print(current_mesh())
    None
    >>> current_mesh("dp=2,tp=4").shape_tuple
    (('dp', 2), ('tp', 4))
    """
    found: list[tuple[str, AnyMesh]] = []
    if mesh is not None:
        found.append(("the mesh argument", as_mesh(mesh)))
    abstract = get_abstract_mesh()
    if not abstract.empty:
        found.append(("jax.set_mesh", _concrete_if_eager(abstract)))
    entered = context_manager_mesh()
    if not entered.empty:
        found.append(("`with mesh:`", entered))
    if not found:
        return None
    if any(not same_mesh(found[0][1], other) for _, other in found[1:]):
        raise MeshConflictError(
            "two meshes are in force and they disagree",
            [Offence(place, describe_briefly(other)) for place, other in found],
            "leave one of the contexts, or pass the mesh that is in force",
        )
    said = found[0][1]
    return said if isinstance(said, Mesh) or len(found) == 1 else found[1][1]


def required_mesh(mesh: MeshLike | None = None, need: str = "this") -> AnyMesh:
    """The current mesh, or a `NoMeshError` that says who needs it."""
    found = current_mesh(mesh)
    if found is None:
        raise NoMeshError(
            f"{need} needs a mesh and none is in force",
            remedy="pass mesh=…, or enter `with jax.set_mesh(mesh):` (or `with mesh:`)",
        )
    return found


def _concrete_if_eager(abstract: AbstractMesh) -> AnyMesh:
    if trace_state_clean():
        concrete = get_mesh()
        if not concrete.empty:
            return concrete
    return abstract


def describe_briefly(mesh: AnyMesh) -> str:
    """One line: shape, kind, and the devices' platform when there are any."""
    text = str(MeshSpec.of(mesh)) if mesh.axis_names else "empty"
    if isinstance(mesh, AbstractMesh):
        return f"{text} (abstract)"
    first, last = mesh.devices.flat[0], mesh.devices.flat[-1]
    return f"{text} on {mesh.size} {first.platform} devices (ids {first.id}…{last.id})"
