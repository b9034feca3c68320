"""Where an operand comes from (which argument), and which Python line is nearest where none is written."""

from __future__ import annotations

from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.sources import Source
from shardax.proving.trips import Frame

_STEPS = 200
_NEAR = 5
# Operations that hand on (a part of) their first operand: what comes out is still that argument.
_HANDS_ON = frozenset(
    {"copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape", "transpose", "slice",
     "dynamic-slice", "opt-barrier", "all-gather", "all-gather-start", "all-gather-done", "fusion-done",
     "async-done", "call-done"}
)  # fmt: skip
_ENTERED = frozenset({"fusion", "call", "fusion-start", "call-start", "async-start"})


def argument_path(frame: Frame, operand: str) -> str | None:
    """The pytree path of the argument that an operand is (a slice, a conversion, a gathered part of), if it is one."""
    module, indices = frame.module, tuple[int, ...]()
    for _ in range(_STEPS):
        name, *elements = operand.split("#")
        indices = (*map(int, elements), *indices)
        instruction = frame.computation.by_name.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            if frame.caller is None:
                return module.parameters[int(instruction.operand_text)].path or None
            stepped = _outward(frame, instruction, indices)
        else:
            stepped = _backward(frame, instruction, indices)
        if stepped is None:
            return None
        frame, operand, indices = stepped
    return None


def _outward(
    frame: Frame, parameter: Instruction, indices: tuple[int, ...]
) -> tuple[Frame, str, tuple[int, ...]] | None:
    if frame.is_loop and not (indices and frame.carries(indices[0])):
        return None
    handed = frame.argument(int(parameter.operand_text))
    return (*handed, indices) if handed else None


def _backward(
    frame: Frame, instruction: Instruction, indices: tuple[int, ...]
) -> tuple[Frame, str, tuple[int, ...]] | None:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "get-tuple-element":
        return frame, operands[0], (int(instruction.attribute("index") or 0), *indices)
    if opcode in ("tuple", "while"):
        return _through_tuple(frame, instruction, indices) if indices else None
    if opcode in _ENTERED:
        inner = frame.inside(instruction)
        return (inner, inner.computation.root.name, indices) if inner else None
    if opcode in _HANDS_ON and operands:
        return frame, operands[0], () if opcode.endswith("-done") or opcode.startswith("copy-") else indices
    return None


def _through_tuple(
    frame: Frame, instruction: Instruction, indices: tuple[int, ...]
) -> tuple[Frame, str, tuple[int, ...]] | None:
    if instruction.opcode == "tuple":
        return frame, instruction.operands[indices[0]], indices[1:]
    body = frame.enter(instruction, instruction.callee("body") or "", "body")
    return (frame, instruction.operands[0], indices) if body.carries(indices[0]) else None


def nearest_source(module: HloModule, computation: Computation, start: Instruction) -> tuple[Source | None, str]:
    """The line and name stack of the closest producer or consumer that has them: a guess, to be shown as one."""
    seen = {start.name}
    ring = [start]
    for _ in range(_NEAR):
        following: list[Instruction] = []
        for instruction in ring:
            for neighbour in _neighbours(computation, instruction):
                if neighbour.name in seen:
                    continue
                seen.add(neighbour.name)
                source, op_name = _inside(module, neighbour)
                if source is not None:
                    return source, op_name
                following.append(neighbour)
        ring = following
    return None, ""


def producer_name(computation: Computation, start: Instruction) -> str:
    """The name stack of the closest producer that has one: what follows from a gradient is of the backward pass."""
    ring, known = [start], computation.by_name
    for _ in range(_NEAR):
        ring = [known[name] for each in ring for o in each.operands if (name := o.partition("#")[0]) in known]
        named = next((each.op_name for each in ring if each.op_name and each.opcode != "parameter"), "")
        if named:
            return named
    return ""


def _neighbours(computation: Computation, instruction: Instruction) -> list[Instruction]:
    known = computation.by_name
    before = [known[name] for o in instruction.operands if (name := o.partition("#")[0]) in known]
    return [*computation.users.get(instruction.name, ()), *before]


def _inside(module: HloModule, instruction: Instruction) -> tuple[Source | None, str]:
    source = module.source(instruction)
    if source is not None:
        return source, instruction.op_name
    name = instruction.callee("calls") if instruction.opcode == "fusion" else None
    inner = module.computations.get(name) if name else None
    for line in inner.instructions if inner else ():
        source = module.source(line)
        if source is not None:
            return source, line.op_name
    return None, ""
