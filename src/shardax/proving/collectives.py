"""Every collective of a compiled program as a row: over which axes, how often, how many bytes, from which line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shardax.errors import HloParseError, Offence
from shardax.proving import slices
from shardax.proving.groups import DeviceGrid, GroupAxes, groups_text, parse_groups, parse_pairs
from shardax.proving.hlo import HloModule, Instruction
from shardax.proving.integrity import fail
from shardax.proving.provenance import argument_path
from shardax.proving.shapes import ArrayShape, arrays, element, elements, nbytes
from shardax.proving.stacks import Stack
from shardax.proving.walk import Execution, walk

OPS = frozenset(
    {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
     "collective-broadcast"}
)  # fmt: skip
_STARTS = frozenset(f"{op}-start" for op in OPS)
_ASYNC_ROLE = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective site of the compiled program; bytes are those of one device.

    `payload_bytes` is one execution (the full array gathered or reduced), `wire_bytes` what one device sends in all.
    """

    op: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: int
    wire_bytes: int
    dtype: str
    origin: str
    phase: str
    file: str = ""
    line: int = 0
    function: str = ""
    nearest: bool = False
    path: str | None = None
    group_size: int = 1
    subset: str = ""
    rewrite: str = ""
    conditional: bool = False
    link: str = "ici"
    name: str = ""
    op_name: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it comes from, with `~` when that is the nearest line and not the exact one."""
        if not self.file:
            return ""
        function = f" ({self.function.rpartition('<locals>.')[2]})" if self.function else ""
        return f"{'~' if self.nearest else ''}{self.file.rpartition('/')[2]}:{self.line}{function}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about it, in words."""
        conditional = "in a branch: at most this often" if self.conditional else ""
        subset = f"groups of {self.subset}" if self.subset else ""
        ragged = "as if all of it, evenly: how much is data" if self.op == "ragged-all-to-all" else ""
        return tuple(note for note in (self.rewrite, subset, ragged, conditional, *self.warnings) if note)

    def to_json(self) -> dict[str, Any]:
        """Plain data, one entry per field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "axes": list(self.axes), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Collective:
        values: dict[str, Any] = {**data, "axes": tuple(data["axes"]), "warnings": tuple(data.get("warnings", ()))}
        return cls(**values)


def is_collective(instruction: Instruction) -> bool:
    return instruction.opcode in OPS or instruction.opcode in _STARTS or slices.is_transfer(instruction)


def has_collectives(module: HloModule) -> bool:
    """Does anything in it move data between devices?"""
    return any(is_collective(line) for part in module.computations.values() for line in part.instructions)


def find_collectives(
    module: HloModule, mesh: Mapping[str, int], slice_of: Sequence[int] | None
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """All rows in the order of the program, and what could not be resolved."""
    walked = walk(module, is_collective)
    context = _Context(module, mesh, slice_of, DeviceGrid.of(mesh, slice_of), _started_channels(module), {})
    rows = [row for execution in walked for row in context.rows(execution)]
    return _merged(rows), walked.notes


def _merged(rows: Sequence[Collective]) -> tuple[Collective, ...]:
    """A computation called from several places is one site, executed that often."""
    merged: dict[tuple[object, ...], list[Collective]] = {}
    for row in rows:
        merged.setdefault((row.name, row.axes, row.phase, row.path, row.payload_bytes), []).append(row)
    return tuple(
        replace(
            found[0],
            count=sum(row.count for row in found),
            wire_bytes=sum(row.wire_bytes for row in found),
            conditional=any(row.conditional for row in found),
        )
        for found in merged.values()
    )


def _async_role(lines: Sequence[Instruction]) -> str:
    for line in lines:
        match = _ASYNC_ROLE.search(line.tail) if line.opcode == "custom-call" else None
        if match:
            return match[1]
    return ""


def _started_channels(module: HloModule) -> frozenset[str | None]:
    """Channels of TPU async collective fusions: start, middle and done each hold a clone of the collective."""
    return frozenset(
        line.attribute("channel_id")
        for computation in module.computations.values()
        if _async_role(computation.instructions) == "Start"
        for line in computation.instructions
        if is_collective(line)
    )


def wire(op: str, payload: int, size: int) -> float:
    """Bytes that one device sends in one execution among `size` devices.

    >>> wire("all-reduce", 800, 8), wire("all-gather", 800, 8), wire("collective-permute", 800, 8)
    (1400.0, 700.0, 800.0)
    """
    if op in ("collective-permute", "collective-broadcast"):
        return float(payload)
    share = (size - 1) / size
    return (2 if op == "all-reduce" else 1) * payload * share


@dataclass(frozen=True)
class _Context:
    module: HloModule
    mesh: Mapping[str, int]
    slice_of: Sequence[int] | None
    grid: DeviceGrid
    started: frozenset[str | None]
    known: dict[str, GroupAxes]

    def rows(self, execution: Execution) -> Iterator[Collective]:
        role = _async_role(execution.computation.instructions) if execution.fused else ""
        for line in execution.computation.instructions:
            if not is_collective(line):
                continue
            clone = role == "Done" or (role != "Start" and line.attribute("channel_id") in self.started)
            if execution.fused and clone:
                continue
            row = self.row(execution, line)
            if row.group_size > 1 and row.count:
                yield row

    def row(self, execution: Execution, line: Instruction) -> Collective:
        across = slices.is_transfer(line)
        op = slices.transfer_op(line) if across else line.opcode.removesuffix("-start")
        group = self._group(line, across)
        sizes = _sizes(execution, line, op, across)
        rewrite = "between slices" if across else ""
        if not across:
            _check_sizes(self.module, line, op, sizes, group.size)
        if op == "all-reduce" and _is_scattered(execution, line):
            op, rewrite = "reduce-scatter", "all-reduce-scatter fusion"
        payload = sizes.operand if op == "ragged-all-to-all" else max(sizes.operand, sizes.result)
        stack = Stack.of(self.module, execution, line)
        size = group.size if op != "collective-permute" else max(2, group.size) if group.axes else 1
        return Collective(
            op=op,
            axes=group.axes,
            count=execution.times,
            payload_bytes=payload,
            wire_bytes=round(wire(op, payload, size) * execution.times),
            dtype=sizes.dtype,
            origin=stack.origin,
            phase=stack.phase,
            file=stack.source.file if stack.source else "",
            line=stack.source.line if stack.source else 0,
            function=stack.source.function if stack.source else "",
            nearest=stack.nearest and stack.source is not None,
            path=argument_path(execution.frame, line.operands[0]) if line.operands else None,
            group_size=size,
            subset=group.subset,
            rewrite=rewrite or stack.rewrite(op, execution) or self._within(group),
            conditional=execution.conditional,
            link="dcn" if across else "ici",
            name=line.name,
            op_name=stack.op_name,
        )

    def _within(self, group: GroupAxes) -> str:
        """Part of a collective that is done slice by slice."""
        whole = math.prod(self.mesh[axis] for axis in group.axes)
        return "within a slice" if self.slice_of is not None and group.size < whole and not group.subset else ""

    def _group(self, line: Instruction, across: bool) -> GroupAxes:
        if across:
            return slices.transfer_axes(line, self.mesh, self.slice_of or ())
        devices, attributes = len(self.grid.positions), line.attributes
        if line.opcode.startswith("collective-permute"):
            return self.grid.of_pairs(parse_pairs(attributes, devices))
        text = groups_text(attributes)
        if text is None:
            fail(f"%{line.name}", f"{line.opcode} without replica_groups")
        if text not in self.known:
            self.known[text] = self.grid.of_groups(parse_groups(text, devices))
        return self.known[text]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes and elements that go in and come out of one execution on one device."""

    operand: int
    result: int
    elements_in: int
    elements_out: int
    types_in: tuple[str, ...]
    types_out: tuple[str, ...]
    dtype: str  # of the larger side, which is what travels

    @classmethod
    def of(cls, operands: Sequence[str], result: str) -> _Sizes:
        ins, outs = [a for shape in operands for a in arrays(shape)], arrays(result)
        return cls(
            sum(a.bytes for a in ins),
            nbytes(result),
            sum(a.size for a in ins),
            sum(a.size for a in outs),
            tuple(dict.fromkeys(a.dtype for a in ins)),
            tuple(dict.fromkeys(a.dtype for a in outs)),
            _dtype(ins if sum(a.bytes for a in ins) > nbytes(result) else outs),
        )


def _sizes(execution: Execution, line: Instruction, op: str, across: bool) -> _Sizes:
    computation = execution.computation
    if across:
        received = next((other for other in computation.instructions if _is_answer(other, line)), line)
        return _Sizes.of([elements(line.shape)[0]], elements(received.shape)[0])
    if "slice_sizes=" in line.tail:  # a permute that moves parts of one buffer within another
        return _Sizes.of([_slice_shape(line)], _slice_shape(line))
    names = line.operands[:1] if op == "ragged-all-to-all" else line.operands
    operands = [computation.shape(name) for name in names]
    if line.opcode not in _STARTS:
        return _Sizes.of(operands, line.shape)
    done = next((user for user in computation.users.get(line.name, ()) if user.opcode.endswith("-done")), None)
    if done is not None:
        return _Sizes.of(operands, done.shape)
    return _Sizes.of(operands, element(line.shape, 1) if line.shape.startswith("(") else line.shape)


def _slice_shape(line: Instruction) -> str:
    match = re.search(r"slice_sizes=\{((?:\{[\d,]*\},?)+)\}", line.tail)
    dtype = arrays(line.shape)[0].dtype
    return ", ".join(f"{dtype}[{dims}]" for dims in re.findall(r"\{([\d,]*)\}", match[1])) if match else line.shape


def _is_answer(candidate: Instruction, sent: Instruction) -> bool:
    if candidate.opcode != "recv":
        return False
    key = sent.attribute("_xla_host_transfer_rendezvous")
    return key is not None and candidate.attribute("_xla_host_transfer_rendezvous") == key


def _is_scattered(execution: Execution, line: Instruction) -> bool:
    """Is it a TPU fusion that keeps only this device's part of an all-reduce?"""
    caller = execution.frame.caller
    if caller is None or not execution.fused:
        return False
    return 0 < 2 * nbytes(caller.shape) <= nbytes(line.shape)


def _converts(module: HloModule, line: Instruction, sizes: _Sizes) -> bool:
    """TPUs add in a wider type than they are given, or give a narrower one than they add in: the computation that adds
    has the wider of the two."""
    adds = module.computations.get(line.callee("to_apply") or "")
    added = {array.dtype for array in arrays(adds.root.shape)} if adds else set[str]()
    widened = added == set(sizes.types_out) and sizes.operand <= sizes.result
    floats = all(re.match("b?f", dtype) for dtype in (*sizes.types_in, *sizes.types_out))
    return widened or (floats and added == set(sizes.types_in) and sizes.operand > sizes.result)


def _check_sizes(module: HloModule, line: Instruction, op: str, sizes: _Sizes, members: int) -> None:
    """A collective's result follows from its operand and its groups; if not, the text was altered."""
    if sizes.types_in != sizes.types_out and not _converts(module, line, sizes):
        fail(f"%{line.name}", f"{op} of {', '.join(sizes.types_in)} cannot give {', '.join(sizes.types_out)}")
    wanted = {"all-gather": sizes.elements_in * members, "ragged-all-to-all": sizes.elements_out}
    given = sizes.elements_out * members if op == "reduce-scatter" else sizes.elements_out
    if op != "collective-broadcast" and given != wanted.get(op, sizes.elements_in):
        problem = f"{op} of {sizes.elements_in} elements among {members} devices cannot give {sizes.elements_out}"
        raise HloParseError("HLO text that cannot be read", [Offence(f"%{line.name}", problem)])


def _dtype(moved: Sequence[ArrayShape]) -> str:
    sizes: dict[str, int] = {}
    for array in moved:
        if array.dtype not in ("token", "opaque") and (array.dims or len(moved) == 1):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.bytes
    return "+".join(sorted(sizes, key=lambda dtype: -sizes[dtype])) or "f32"
