"""Which devices take part in a collective, and which mesh axes that is.

HLO writes the same groups in three ways, sometimes in one module: `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and
`mesh['dp'=2,'tp'=4] {'tp'}` (with sub-axes `'tp':(1)2` and `device_ids=`). All become lists of positions in
`mesh.devices.flat`, and these are matched against the user's mesh, whatever names the compiler kept.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardax.errors import HloParseError, Offence

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)")
_MESH = re.compile(r"@?mesh\[([^\]]*)\](?:, ?device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,{} ]*)\))? ?\{([^}]*)\}")
_LIST = re.compile(r"\{((?:\{[\d, ]*\},? ?)*)\}")
_AXIS = re.compile(r"['\"]?([\w.\-]+)['\"]?=(\d+)")
_REFERENCE = re.compile(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?")
_AXES = re.compile(rf"(?:{_AXIS.pattern},? ?)+")
_REFERENCES = re.compile(rf"(?:{_REFERENCE.pattern},? ?)*")
_PAIR = re.compile(r"\{(\d+),\s*(\d+)\}")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupAxes:
    """The mesh axes a collective runs over, and what is unusual about its groups (empty when nothing is)."""

    axes: tuple[str, ...]
    size: int
    subset: str = ""


def groups_text(attributes: str) -> str | None:
    """The value of `replica_groups=` with everything that belongs to it."""
    start = attributes.find("replica_groups=")
    if start < 0:
        return None
    rest = attributes[start + len("replica_groups=") :]
    for pattern in (_MESH, _IOTA, _LIST):
        match = pattern.match(rest)
        if match:
            return match[0]
    raise HloParseError("HLO text that cannot be read", [Offence(rest[:60], "not a notation of replica groups")])


@lru_cache(maxsize=1024)
def parse_groups(text: str | None, devices: int) -> Groups:
    """Expand any notation; `None` or `{}` is one group of all devices.

    >>> parse_groups("{{0,1},{2,3}}", 4) == parse_groups("[2,2]<=[4]", 4)
    True
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    """
    if text is None or re.fullmatch(r"\{[{} ]*\}", text):
        return (tuple(range(devices)),)
    try:
        groups = _expand(text)
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise HloParseError("HLO text that cannot be read", [Offence(text[:80], f"groups: {error}")]) from None
    members = [device for group in groups for device in group]
    if len(set(members)) != len(members) or any(device >= devices for device in members):
        problem = f"not groups of {devices} devices: a device twice, or one that is not there"
        raise HloParseError("HLO text that cannot be read", [Offence(text[:80], problem)])
    if not text.startswith("{") and len(members) != devices:
        problem = f"{len(members)} devices in the groups of a program for {devices}"
        raise HloParseError("HLO text that cannot be read", [Offence(text[:80], problem)])
    return groups


def _expand(text: str) -> Groups:
    if match := _MESH.match(text):
        return _rows(_mesh_groups(match[1], match[2], match[3]))
    if match := _IOTA.match(text):
        count, size = _ints(match[1])
        return _rows(_iota(match[2], match[3]).reshape(count, size))
    return tuple(_ints(group) for group in re.findall(r"\{([\d, ]+)\}", text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in array)


def _iota(dims: str, order: str | None) -> np.ndarray:
    sizes = _ints(dims)
    grid = np.arange(math.prod(sizes)).reshape(sizes)
    return grid.transpose(_ints(order)) if order else grid


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    ids = _iota(match[1], match[2]).reshape(-1) if match else np.array(_ints(re.sub(r"[{}]", "", text)))
    if ids.size != count:
        raise ValueError(f"{ids.size} device_ids for a mesh of {count}")
    return ids


def _mesh_groups(axes_text: str, ids_text: str | None, chosen: str) -> np.ndarray:
    """Split every axis at the bounds of the sub-axes that are named, then gather the named parts last."""
    if not _AXES.fullmatch(axes_text) or not _REFERENCES.fullmatch(chosen):
        raise ValueError("not mesh axes by name")
    axes = [(name, int(size)) for name, size in _AXIS.findall(axes_text)]
    references = [(name, int(pre or 1), int(size) if size else 0) for name, pre, size in _REFERENCE.findall(chosen)]
    parts: list[tuple[str, int, int]] = []
    for name, size in axes:
        cuts = {1, size}
        for named, pre, part in references:
            if named == name and part:
                cuts |= {pre, pre * part}
        bounds = sorted(cuts)
        parts += [(name, low, high // low) for low, high in itertools.pairwise(bounds)]
    taken = [place for reference in references for place in _places(parts, dict(axes), reference)]
    ids = _device_ids(ids_text, math.prod(size for _, size in axes))
    grid = ids.reshape([size for _, _, size in parts])
    kept = [place for place in range(len(parts)) if place not in taken]
    return grid.transpose([*kept, *taken]).reshape(-1, math.prod(parts[place][2] for place in taken))


def _places(
    parts: Sequence[tuple[str, int, int]], sizes: Mapping[str, int], reference: tuple[str, int, int]
) -> list[int]:
    name, pre, size = reference
    high = pre * (size or sizes[name])
    if sizes[name] % high:
        raise ValueError(f"sub-axis {name}:({pre}){size} of an axis of {sizes[name]}")
    return [place for place, (part, low, _) in enumerate(parts) if part == name and pre <= low < high]


@lru_cache(maxsize=1024)
def parse_pairs(attributes: str, devices: int) -> tuple[tuple[int, int], ...]:
    """`source_target_pairs={{0,1},{1,2}}`, without those that stay where they are.

    >>> parse_pairs("source_target_pairs={{0,1},{1,0},{2,2}}", 4)
    ((0, 1), (1, 0))
    """
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)*)\}", attributes)
    if not match:
        raise HloParseError("HLO text that cannot be read", [Offence(attributes[:80], "no source_target_pairs")])
    pairs = [(int(source), int(target)) for source, target in _PAIR.findall(match[1])]
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    if len(sources) != len(pairs) or len(targets) != len(pairs) or max(sources | targets, default=0) >= devices:
        problem = f"not pairs among {devices} devices: one sends or receives twice, or is not there"
        raise HloParseError("HLO text that cannot be read", [Offence(match[0][:80], problem)])
    return tuple((source, target) for source, target in pairs if source != target)


@dataclass(frozen=True)
class DeviceGrid:
    """The user's mesh, by which positions get names.

    `positions` are those the program runs on: all, or one slice's.
    """

    axes: tuple[tuple[str, int], ...]
    positions: tuple[int, ...]

    @classmethod
    def of(cls, mesh_axes: Mapping[str, int], slice_of: Sequence[int] | None = None, place: int = 0) -> DeviceGrid:
        """The grid of a mesh, or of the positions whose slice is `place`."""
        count = math.prod(mesh_axes.values())
        chosen = range(count) if slice_of is None else (p for p in range(count) if slice_of[p] == place)
        return cls(tuple(mesh_axes.items()), tuple(chosen))

    def coordinates(self, devices: Sequence[Sequence[int]]) -> np.ndarray:
        """Mesh coordinates of program devices: [group, member, axis]."""
        flat = np.asarray(self.positions)[np.asarray(devices, dtype=int)]
        sizes = [size for _, size in self.axes] or [1]
        return np.stack(np.unravel_index(flat, sizes), -1)

    def of_groups(self, groups: Groups) -> GroupAxes:
        """The axes of replica groups; groups that are not whole axes are named as what they are.

        >>> DeviceGrid.of({"dp": 2, "tp": 4}).of_groups(((0, 1, 2, 3), (4, 5, 6, 7)))
        GroupAxes(axes=('tp',), size=4, subset='')
        >>> DeviceGrid.of({"dp": 2, "tp": 4}).of_groups(((0, 1), (2, 3), (4, 5), (6, 7)))
        GroupAxes(axes=('tp',), size=2, subset='2 of 4')
        """
        sizes = {len(group) for group in groups}
        largest = max(sizes, default=1)
        if len(sizes) > 1:
            varying = sorted({a for group in groups for a in self._varying(self.coordinates([group]))})
            return GroupAxes(self._names(varying), largest, "groups of unequal size")
        where = self.coordinates(groups)
        varying = self._varying(where)
        full = math.prod(len(np.unique(self._all()[:, axis])) for axis in varying)
        covered = sum(map(len, groups))
        subset = "" if full == largest else f"{largest} of {full}"
        if covered != len(self.positions):
            subset = f"{subset + ', ' if subset else ''}{covered} of {len(self.positions)} devices"
        return GroupAxes(self._names(varying), largest, subset)

    def of_pairs(self, pairs: Sequence[tuple[int, int]]) -> GroupAxes:
        """The axes along which a permute moves."""
        if not pairs:
            return GroupAxes((), 1)
        varying = self._varying(self.coordinates(pairs))
        return GroupAxes(self._names(varying), math.prod(self.axes[axis][1] for axis in varying))

    def _all(self) -> np.ndarray:
        return self.coordinates([range(len(self.positions))])[0]

    def _varying(self, where: np.ndarray) -> list[int]:
        return [axis for axis in range(where.shape[2]) if (where[:, :, axis] != where[:, :1, axis]).any()]

    def _names(self, axes: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.axes[axis][0] for axis in axes)
