"""How often a loop runs: as the compiler wrote it, or derived from its condition, its first value and its step.

TPU text carries no `known_trip_count`, so the counter is followed by hand: through copies, conversions, fusions, tuples
and outer loops, as `element of the loop's tuple + constant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.integrity import fail
from shardax.proving.shapes import bare, element

_KNOWN = re.compile(r'known_trip_count["\\]*\s*[:=]\s*\{["\\]*n["\\]*\s*:\s*["\\]*(\d+)')
_THROUGH = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "opt-barrier"})
_ENTERED = frozenset({"fusion", "call"})
_DEEPEST = 40
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True, eq=False)
class Frame:
    """A computation while it runs: which instruction of which frame entered it (nothing for the entry)."""

    module: HloModule
    computation: Computation
    caller: Instruction | None = None
    outer: Frame | None = None
    role: str = ""

    def enter(self, caller: Instruction, name: str, role: str) -> Frame:
        return Frame(self.module, self.module.computations[name], caller, self, role)

    def inside(self, caller: Instruction) -> Frame | None:
        """The computation of a fusion or a call."""
        name = caller.callee("calls") or caller.callee("to_apply")
        return self.enter(caller, name, "calls") if name and name in self.module.computations else None

    @cached_property
    def is_loop(self) -> bool:
        return self.role in ("body", "condition")

    def argument(self, number: int) -> tuple[Frame, str] | None:
        """What the caller hands in as parameter `number`."""
        if self.caller is None or self.outer is None:
            return None
        operands = self.caller.operands
        if self.role.startswith("branch"):  # a conditional: its first operand chooses, branch n gets operand n + 1
            number = int(self.role.partition(" ")[2]) + 1
        if not operands:  # TPU's offloaded calls get their operands one instruction later
            updates = self.outer.computation.users.get(self.caller.name, ())
            operands = next((user.operands[1:] for user in updates if user.opcode.endswith("-update")), ())
        return (self.outer, operands[number]) if number < len(operands) else None

    def carries(self, element: int) -> bool:
        """Does this loop hand on an element of its tuple unchanged?"""
        if self.outer is None or self.caller is None:
            return False
        body = self.outer.enter(self.caller, self.caller.callee("body") or self.computation.name, "body")
        root = body.computation.root
        handed = root.operands[element] if root.opcode == "tuple" else f"{root.name}#{element}"
        return _follow(body, handed) == Value(element, 0)


@dataclass(frozen=True, slots=True)
class Value:
    """`element` of the enclosing loop's tuple (or nothing) plus a constant."""

    element: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class Trips:
    """How often, and how that is known: "known", "derived", or why it is not."""

    count: int | None
    how: str


def _follow(frame: Frame, operand: str, depth: int = 0) -> Value | None:
    """An integer scalar as a Value of the innermost loop around it."""
    name, _, path = operand.partition("#")
    instruction = frame.computation.by_name.get(name)
    if instruction is None or depth > _DEEPEST:
        return None
    if path:
        return _element(frame, name, int(path.split("#")[0]), depth + 1)
    step = _FOLLOW.get(instruction.opcode)
    return step(frame, instruction, depth + 1) if step else None


def _follow_constant(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    text = instruction.operand_text.strip()
    return Value(None, int(text)) if re.fullmatch(r"-?\d+", text) else None


def _follow_element(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    index = int(instruction.attribute("index") or 0)
    taken = element(frame.computation.shape(instruction.operands[0]), index)
    if bare(taken) != bare(instruction.shape):
        fail(f"%{frame.computation.name}", f"%{instruction.name} is not element {index} of its tuple")
    return _element(frame, instruction.operands[0], index, depth)


def _follow_first(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    inner = frame.computation.shape(instruction.operands[0])
    if instruction.opcode == "copy" and bare(inner) != bare(instruction.shape):
        fail(f"%{frame.computation.name}", f"%{instruction.name} copies {bare(inner)} to {bare(instruction.shape)}")
    return _follow(frame, instruction.operands[0], depth)


def _follow_sum(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    left, right = (_follow(frame, operand, depth) for operand in instruction.operands)
    if left is None or right is None:
        return None
    sign = 1 if instruction.opcode == "add" else -1
    if right.element is None:
        return Value(left.element, left.offset + sign * right.offset)
    if left.element is None and sign == 1:
        return Value(right.element, left.offset + right.offset)
    return None


def _follow_inside(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    inner = frame.inside(instruction)
    return _follow(inner, inner.computation.root.name, depth) if inner else None


def _follow_outside(frame: Frame, instruction: Instruction, depth: int) -> Value | None:
    handed = None if frame.is_loop else frame.argument(int(instruction.operand_text))
    return _follow(*handed, depth) if handed else None


_Step = Callable[[Frame, Instruction, int], Value | None]
_FOLLOW: dict[str, _Step] = {
    **dict.fromkeys(_THROUGH, _follow_first),
    **dict.fromkeys(_ENTERED, _follow_inside),
    "constant": _follow_constant,
    "get-tuple-element": _follow_element,
    "add": _follow_sum,
    "subtract": _follow_sum,
    "parameter": _follow_outside,
}


def _element(frame: Frame, name: str, index: int, depth: int) -> Value | None:
    """Element `index` of a tuple."""
    outer = frame.computation.by_name.get(name)
    if outer is None or depth > _DEEPEST:
        return None
    if outer.opcode == "tuple":
        return _follow(frame, outer.operands[index], depth + 1)
    if outer.opcode == "parameter" and frame.is_loop:
        element(outer.shape, index)  # refuses an index that the tuple does not have
        return Value(index, 0)
    handed = _holder(frame, outer, index)
    return _element(*handed, index, depth + 1) if handed else None


def _holder(frame: Frame, outer: Instruction, index: int) -> tuple[Frame, str] | None:
    """Where the tuple comes from, when `outer` only hands it on."""
    if outer.opcode == "parameter":
        return frame.argument(int(outer.operand_text))
    if outer.opcode in _THROUGH:
        return frame, outer.operands[0]
    if outer.opcode in _ENTERED:
        inner = frame.inside(outer)
        return (inner, inner.computation.root.name) if inner else None
    if outer.opcode == "while":
        body = frame.enter(outer, outer.callee("body") or "", "body")
        return (frame, outer.operands[0]) if body.carries(index) else None
    return None


def number(frame: Frame, value: Value | None, depth: int = 0) -> int | None:
    """A Value as a number: the loop's element must be one that no iteration changes."""
    if value is None or depth > _DEEPEST:
        return None
    if value.element is None:
        return value.offset
    loop = _loop_of(frame)
    if loop is None or not loop.carries(value.element):
        return None
    first = _first(loop, value.element, depth)
    return None if first is None else first + value.offset


def _loop_of(frame: Frame) -> Frame | None:
    found: Frame | None = frame
    while found is not None and not found.is_loop:
        found = found.outer
    return found


def _first(loop: Frame, element: int, depth: int = 0) -> int | None:
    """The value an element of a loop's tuple has before the first iteration."""
    if loop.outer is None or loop.caller is None:
        return None
    value = _element(loop.outer, loop.caller.operands[0], element, 0)
    return number(loop.outer, value, depth + 1)


def trips(frame: Frame, loop: Instruction) -> Trips:
    """How often `loop` (a while in `frame`) runs its body."""
    found = _derived(frame, loop)
    match = _KNOWN.search(loop.tail)
    if not match:
        return found
    if found.count not in (None, int(match[1])):
        fail(f"%{frame.computation.name}", f"%{loop.name} runs {found.count} times but says {match[1]}")
    return Trips(int(match[1]), "known")


def _derived(frame: Frame, loop: Instruction) -> Trips:
    condition = frame.enter(loop, loop.callee("condition") or "", "condition")
    body = frame.enter(loop, loop.callee("body") or "", "body")
    compared = _comparison(condition, condition.computation.root.name)
    if compared is None:
        return Trips(None, "its condition is not a comparison of a counter")
    left, right, direction = compared
    limit = number(condition, right)
    if limit is None:
        left, right, direction = right, left, _FLIPPED.get(direction, direction)
        limit = number(condition, right)
    if limit is None or left is None or left.element is None:
        return Trips(None, "its limit depends on data")
    start = _first(condition, left.element)
    step = _step(body, left.element)
    if start is None or not step:
        return Trips(None, "its counter does not start or step by a constant")
    count = _count(start + left.offset, limit, step, direction)
    return Trips(count, "derived") if count is not None else Trips(None, f"its counter never meets {direction}")


def _comparison(frame: Frame, name: str, depth: int = 0) -> tuple[Value | None, Value | None, str] | None:
    instruction = frame.computation.by_name[name]
    if depth > _DEEPEST:
        return None
    if instruction.opcode in _THROUGH:
        return _comparison(frame, instruction.operands[0], depth + 1)
    if instruction.opcode in _ENTERED:
        inner = frame.inside(instruction)
        return _comparison(inner, inner.computation.root.name, depth + 1) if inner else None
    if instruction.opcode != "compare":
        return None
    shapes = {bare(frame.computation.shape(operand)) for operand in instruction.operands}
    if len(shapes) > 1:
        fail(f"%{frame.computation.name}", f"%{name} compares {' with '.join(sorted(shapes))}")
    direction = instruction.attribute("direction")
    if direction not in _FLIPPED:
        fail(f"%{frame.computation.name}", f"%{name} compares without a direction")
    left, right = (_follow(frame, operand) for operand in instruction.operands)
    return left, right, direction


def _step(body: Frame, element: int) -> int | None:
    root = body.computation.root
    handed = root.operands[element] if root.opcode == "tuple" else None
    value = _follow(body, handed) if handed else _element(body, root.name, element, 0)
    if value is None or value.element != element:
        return None
    return value.offset


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    distance = limit - start
    if direction in ("GT", "GE"):
        distance, step, direction = -distance, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        distance += 1
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE") or step <= 0:
        return 0 if direction in ("LT", "LE") and distance <= 0 else None
    return max(0, -(-distance // step))
