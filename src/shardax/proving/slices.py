"""Transfers between TPU slices: the host runtime does them, and HLO shows them as `send` with a megascale target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from shardax.errors import HloParseError, Offence
from shardax.proving.groups import DeviceGrid, GroupAxes
from shardax.proving.hlo import Instruction

_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{(?:\{[^{}]*\},?)*\}))')
_PRODUCT = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")
_OPS = {"ONE_TO_ONE": "collective-permute"}
_SLICE = 100_000  # device 200003 is the fourth of the second slice


def is_transfer(instruction: Instruction) -> bool:
    return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.tail


def transfer_op(instruction: Instruction) -> str:
    """The collective that a transfer is: "all-reduce", "all-gather", …"""
    match = _KIND.search(instruction.tail)
    kind = match[1] if match else "ONE_TO_ONE"
    return _OPS.get(kind, kind.lower().replace("_", "-"))


def transfer_axes(instruction: Instruction, mesh: Mapping[str, int], slice_of: Sequence[int]) -> GroupAxes:
    """The mesh axes between the slices it joins."""
    match = _TARGET.search(instruction.tail)
    if not match:
        raise HloParseError("HLO text that cannot be read", [Offence(f"%{instruction.name}", "no megascale target")])
    members = _positions(slice_of)
    grid = DeviceGrid.of(mesh)
    if match[2] and "->" in match[2]:
        pairs = [(_place(a, members), _place(b, members)) for a, b in re.findall(r"(\d+)->(\d+)", match[2])]
        return grid.of_pairs(pairs)
    if match[2]:
        groups = [tuple(_place(i, members) for i in g.split(",")) for g in re.findall(r"\{([\d,]+)\}", match[2])]
    else:
        groups = _product(match[1], members)
    return grid.of_groups(tuple(groups))


def _positions(slice_of: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for position, place in enumerate(slice_of):
        found.setdefault(place, []).append(position)
    return found


def _place(device: str, members: Mapping[int, Sequence[int]]) -> int:
    slice_number, core = divmod(int(device), _SLICE)
    try:
        return members[slice_number - 1][core]
    except (KeyError, IndexError):
        raise HloParseError("HLO text that cannot be read", [Offence(device, "not a device of the slices")]) from None


def _product(text: str, members: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    match = _PRODUCT.fullmatch(text)
    if not match:
        raise HloParseError("HLO text that cannot be read", [Offence(text, "not a megascale target")])
    slices = [int(number) for number in match[1].split(",")]
    cores = range(int(match[2]), int(match[3]) + 1)
    return [tuple(_place(str(number * _SLICE + core), members) for number in slices) for core in cores]


def partitions(mesh: Mapping[str, int], slice_of: Sequence[int] | None) -> int:
    """The devices of one compiled program: all of the mesh, or one slice's."""
    count = math.prod(mesh.values())
    return count if slice_of is None else count // max(1, len(set(slice_of)))
