"""Meshes of real devices: `make_mesh`, the eformer spellings over it, and what a mesh crosses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh

from shardax.errors import MeshError, Offence, plural
from shardax.names.mesh import AnyMesh, AxisTypes, MeshLike, MeshSpec, as_mesh, read_axis_types
from shardax.tables import Table

DEFAULT_DIMS = (1, -1, 1, 1, 1)
DEFAULT_NAMES = ("dp", "fsdp", "ep", "tp", "sp")


def make_mesh(
    spec: MeshLike,
    *,
    axis_types: AxisTypes = "auto",
    devices: Sequence[Any] | None = None,
    dcn: str | Mapping[str, int] | Sequence[int] | None = None,
    allow_split_physical_axes: bool = True,
) -> Mesh:
    """A `jax.sharding.Mesh` whose device order follows the hardware.

    `dcn` gives, per axis, how many slices (or hosts) it spans; left out, the leading axes take them.

    >>> make_mesh("dp=2,tp=-1").shape_tuple
    (('dp', 2), ('tp', 4))
    >>> make_mesh({"tp": 2}).size      # fewer devices than present is fine
    2
    """
    keep_types = isinstance(spec, (MeshSpec, Mesh, AbstractMesh)) and axis_types == "auto"
    wanted = MeshSpec.of(spec, None if keep_types else axis_types)
    present = list(jax.devices() if devices is None else np.asarray(devices, dtype=object).flat)
    if len(set(present)) < len(present):
        raise MeshError(f"{plural(len(present) - len(set(present)), 'device')} listed more than once")
    resolved = wanted.resolve(len(present))
    granules = _granules(present[: resolved.size], explicit=dcn is not None)
    return _lay_over(resolved, [granules[key] for key in sorted(granules)], dcn, allow_split_physical_axes)


def _lay_over(spec: MeshSpec, granules: list[list[Any]], dcn: Any, allow_split: bool) -> Mesh:
    across = _read_dcn(dcn, spec) if dcn is not None else _lead_with(granules, spec.sizes)
    if across is None or math.prod(across) == 1:
        order = _within(spec.sizes, [device for granule in granules for device in granule], allow_split)
    else:
        order = _across(spec, across, granules, allow_split)
    return Mesh(order, spec.names, axis_types=spec.axis_types)


def _granules(devices: list[Any], *, explicit: bool) -> dict[int, list[Any]]:
    """Groups of devices joined by the fast network: slices where there are several, else processes.

    One TPU slice spans hosts at full speed, so its hosts are no border unless `dcn` asks for one.
    """
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        key = "slice_index"
    elif explicit or devices[0].platform != "tpu":
        key = "process_index"
    else:
        return {0: devices}
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, key), []).append(device)
    return groups


def _read_dcn(dcn: str | Mapping[str, int] | Sequence[int], spec: MeshSpec) -> tuple[int, ...]:
    if isinstance(dcn, (str, Mapping)):
        asked = MeshSpec(dcn).shape if dcn else {}
        strange = [Offence(name, f"is not an axis of {spec}") for name in asked if name not in spec.names]
        if strange:
            raise MeshError("dcn names axes that are not there", strange)
        return tuple(asked.get(name, 1) for name in spec.names)
    if not isinstance(dcn, Sequence):
        raise MeshError(f"dcn is {dcn!r}", remedy='write "dp=2", {"dp": 2} or one size per axis')
    if len(dcn) != len(spec.names):
        raise MeshError(f"dcn {tuple(dcn)} has {len(dcn)} sizes for the {len(spec.names)} axes of {spec}")
    return MeshSpec(spec.names, dcn).sizes


def _lead_with(granules: list[list[Any]], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Leading axes take the granules; None when they do not fit that way (the plain order is used then)."""
    rest = len(granules)
    if len({len(granule) for granule in granules}) > 1:
        return None
    across: list[int] = []
    for size in sizes:
        part = math.gcd(size, rest)
        across.append(part)
        rest //= part
    return tuple(across) if rest == 1 else None


def _within(sizes: tuple[int, ...], devices: list[Any], allow_split: bool) -> np.ndarray:
    if devices[0].platform != "tpu":
        return np.asarray(devices, dtype=object).reshape(sizes)
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=False)
    except (NotImplementedError, ValueError):
        if not allow_split:
            raise
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):  # a part of a torus: no physical order to follow
        return np.asarray(devices, dtype=object).reshape(sizes)


def _across(spec: MeshSpec, across: tuple[int, ...], granules: list[list[Any]], allow_split: bool) -> np.ndarray:
    problems = [
        Offence(name, f"size {size} does not divide over {part} slices or hosts")
        for name, size, part in zip(spec.names, spec.sizes, across, strict=True)
        if part < 1 or size % part
    ]
    if math.prod(across) != len(granules):
        problems.append(
            Offence("", f"dcn {across} asks for {math.prod(across)} slices or hosts, there are {len(granules)}")
        )
    if len({len(granule) for granule in granules}) > 1:
        problems.append(Offence("", f"slices or hosts of unequal sizes {[len(granule) for granule in granules]}"))
    if problems:
        raise MeshError(f"mesh {spec} cannot be laid over slices or hosts as dcn={across}", problems)
    inside = tuple(size // part for size, part in zip(spec.sizes, across, strict=True))
    order = np.empty(spec.sizes, dtype=object)
    for granule, place in zip(granules, np.ndindex(*across), strict=True):
        corner = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, inside, strict=True))
        order[corner] = _within(inside, granule, allow_split)
    return order


# ---- the eformer spellings ------------------------------------------------------------------------------------------


def create_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS,
    axis_names: Sequence[str] = DEFAULT_NAMES,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: AxisTypes | None = None,
) -> Mesh:
    """eformer's spelling of `make_mesh`; `use_jax=True` leaves the device order to `jax.make_mesh`.

    >>> dict(create_mesh().shape)
    {'dp': 1, 'fsdp': 8, 'ep': 1, 'tp': 1, 'sp': 1}
    """
    devices = jax.devices(backend) if backend else jax.devices()
    spec = MeshSpec.of((axis_dims, axis_names), axis_types or "auto").resolve(len(devices))
    if use_jax and dcn_mesh_dims is None:
        kinds = read_axis_types(axis_types or "auto", spec.names)
        return jax.make_mesh(spec.sizes, spec.names, axis_types=kinds, devices=devices[: spec.size])
    granules = _granules(devices[: spec.size], explicit=dcn_mesh_dims is not None)
    order = sorted(granules) if should_sort_granules_by_key else list(granules)
    return _lay_over(spec, [granules[key] for key in order], dcn_mesh_dims, allow_split_physical_axes)


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """A mesh from `"dp:2,tp:4"` (in that order) or from bare sizes `"2,4"` for `names`.

    >>> parse_mesh_from_string("2,4", ("dp", "tp")).shape_tuple
    (('dp', 2), ('tp', 4))
    """
    if ":" in axis_dims or "=" in axis_dims:
        spec = MeshSpec.of(axis_dims)
        if set(spec.names) != set(names):
            odd = sorted(set(spec.names) ^ set(names))
            raise MeshError(
                f"mesh {axis_dims!r} does not name exactly the axes {tuple(names)}",
                [Offence(name, "is missing in the text" if name in names else "is not expected") for name in odd],
            )
        return make_mesh(spec)
    try:
        sizes = tuple(int(size) for size in axis_dims.split(","))
    except ValueError:
        raise MeshError(f"mesh {axis_dims!r} does not parse", remedy='write "2,4" or "dp:2,tp:4"') from None
    return make_mesh((sizes, tuple(names)))


def create_cpu_mesh(axis_dims: Sequence[int] = DEFAULT_DIMS, axis_names: Sequence[str] = DEFAULT_NAMES) -> Mesh:
    """The same mesh on the host's CPU devices, whatever accelerators there are.

    >>> create_cpu_mesh((2, 4), ("dp", "tp")).devices.flat[0].platform
    'cpu'
    """
    return make_mesh((axis_dims, axis_names), devices=jax.devices("cpu"))


# ---- what a mesh crosses --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisPlace:
    """One axis of a mesh and the slowest border that a step along it crosses."""

    name: str
    size: int
    axis_type: str
    crosses: str  # "devices of one host", "hosts", "slices", or "unknown" on an abstract mesh


@dataclass(frozen=True)
class MeshDescription:
    """What `describe` found: every axis with the border it crosses, and the devices in words."""

    axes: tuple[AxisPlace, ...]
    devices: str

    def table(self) -> Table:
        """The description as a table."""
        rows = tuple((axis.name, str(axis.size), axis.axis_type, axis.crosses) for axis in self.axes)
        return Table("", ("axis", "size", "type", "crosses"), rows, ("size",), (self.devices,))

    def __str__(self) -> str:
        return str(self.table())


def describe(mesh: MeshLike) -> MeshDescription:
    """Which axis stays inside a host, which crosses hosts, which crosses slices.

    >>> print(describe(make_mesh("dp=2,tp=4")))
    axis  size  type  crosses
    ----  ----  ----  -------------------
    dp       2  Auto  devices of one host
    tp       4  Auto  devices of one host
    8 cpu devices on 1 host
    """
    read = as_mesh(mesh)
    places = [
        AxisPlace(str(name), size, kind.name, _crosses(read, index))
        for index, (name, size, kind) in enumerate(zip(read.axis_names, read.axis_sizes, read.axis_types, strict=True))
    ]
    return MeshDescription(tuple(places), _devices_in_words(read))


def _crosses(mesh: AnyMesh, axis: int) -> str:
    if not isinstance(mesh, Mesh):
        return "unknown (abstract mesh)"
    if mesh.axis_sizes[axis] == 1:
        return "nothing (size 1)"
    for attribute, word in (("slice_index", "slices"), ("process_index", "hosts")):
        index = np.vectorize(lambda device, name=attribute: getattr(device, name, 0) or 0)(mesh.devices)
        if (np.diff(index, axis=axis) != 0).any():
            return word
    return "devices of one host"


def _devices_in_words(mesh: AnyMesh) -> str:
    if not isinstance(mesh, Mesh):
        return plural(mesh.size, "abstract device")
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    hosts = len({device.process_index for device in mesh.devices.flat})
    slices = len({getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat})
    text = f"{plural(mesh.size, ', '.join(kinds) + ' device')} on {plural(hosts, 'host')}"
    return f"{text} in {slices} slices" if slices > 1 else text
