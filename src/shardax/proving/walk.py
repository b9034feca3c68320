"""Every computation that runs, from where, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.integrity import fail
from shardax.proving.opcodes import is_known
from shardax.proving.shapes import bare
from shardax.proving.trips import Frame, trips

_ENTERING = frozenset(
    {"fusion", "call", "async-start", "fusion-start", "call-start", "custom-call-start", "while", "conditional", "map"}
)
_MATCHED = frozenset({"fusion", "call", "while", "fusion-start"})
_ENTERED_ROLES = ("calls", "to_apply", "called_computations")
_BRANCH_ROLES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True, eq=False)
class Execution:
    """A computation in one place of the program.

    `times` multiplies the trip counts of the loops around it; inside a branch it is an upper bound (`conditional`).
    """

    frame: Frame
    times: int
    conditional: bool = False

    @property
    def computation(self) -> Computation:
        return self.frame.computation

    @cached_property
    def fused(self) -> bool:
        return self.frame.caller is not None and self.frame.caller.opcode in ("fusion", "fusion-start")

    @cached_property
    def callers(self) -> tuple[Instruction, ...]:
        """The instructions on the way in, innermost first."""
        found: list[Instruction] = []
        frame: Frame | None = self.frame
        while frame is not None and frame.caller is not None:
            found.append(frame.caller)
            frame = frame.outer
        return tuple(found)


@dataclass(frozen=True)
class Walk:
    """All executions, callers first, and the loops whose trip count could not be found."""

    executions: tuple[Execution, ...]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Execution]:
        return iter(self.executions)


def reaching(module: HloModule, wanted: Callable[[Instruction], bool]) -> frozenset[str]:
    """The computations in which, or under which, a wanted instruction stands.

    In a finished program somebody calls each of them; a partitioner leaves behind what it replaced, or found twice.
    """
    found = [part.name for part in module.computations.values() if any(map(wanted, part.instructions))]
    reached = set(found)
    while found:
        name = found.pop()
        callers = module.callers.get(name, ())
        if not callers and name != module.entry.name and "is_scheduled=true" in module.header:
            fail(f"%{name}", "a computation with work in it that nobody calls")
        for computation, instruction in callers:
            if not _enters(instruction):  # applied to scalars, by a reduction, a sort, a collective
                continue
            _check_call(module, computation, instruction, name)
            if computation.name not in reached:
                reached.add(computation.name)
                found.append(computation.name)
    return frozenset(reached)


def _enters(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode in _ENTERING or (opcode == "custom-call" and "called_computations=" in instruction.tail)


def _check_call(module: HloModule, computation: Computation, instruction: Instruction, callee: str) -> None:
    """What goes in and out must have the shapes that the callee says."""
    if instruction.opcode not in _MATCHED:
        return
    handed = [bare(computation.shape(operand)) for operand in instruction.operands]
    inner = module.computations[callee]
    taken = [bare(inner.parameters[number].shape) for number in sorted(inner.parameters)]
    given = bare(inner.root.shape)
    back = instruction.opcode == "fusion-start" or ("condition", callee) in instruction.callees
    if handed != taken or (not back and given != bare(instruction.shape)):
        fail(f"%{computation.name}", f"%{instruction.name} does not have the shapes of what it calls, %{callee}")


def walk(module: HloModule, wanted: Callable[[Instruction], bool], into_fusions: bool = True) -> Walk:
    """The executions in which a wanted instruction can stand."""
    within = reaching(module, wanted)
    enters = _enters if into_fusions else lambda line: _enters(line) and not line.opcode.startswith("fusion")
    executions: list[Execution] = []
    notes: list[str] = []
    pending = [Execution(Frame(module, module.entry), 1)]
    while pending:
        execution = pending.pop()
        executions.append(execution)
        inner = [
            e for i in execution.computation.instructions if enters(i) for e in _inner(execution, i, within, notes)
        ]
        pending += reversed(inner)
    return Walk(tuple(executions), tuple(dict.fromkeys(notes)))


def _inner(execution: Execution, caller: Instruction, within: frozenset[str], notes: list[str]) -> Iterator[Execution]:
    callees = [(role, name) for role, name in caller.callees if name in within]
    if not callees:
        return
    frame, times, conditional = execution.frame, execution.times, execution.conditional
    if caller.opcode == "while":
        found = trips(frame, caller)
        if found.count is None:
            _check_opcodes(frame, caller)
            notes.append(_unknown(frame, caller, found.how))
        count = 1 if found.count is None else found.count
        for role, name in callees:
            yield Execution(frame.enter(caller, name, role), times * (count + (role == "condition")), conditional)
    elif caller.opcode == "conditional":
        branches = [name for role, name in caller.callees if role in _BRANCH_ROLES]
        for _, name in callees:
            yield Execution(frame.enter(caller, name, f"branch {branches.index(name)}"), times, True)
    else:
        for role, name in callees:
            if role in _ENTERED_ROLES:
                yield Execution(frame.enter(caller, name, role), times, conditional)


def _check_opcodes(frame: Frame, loop: Instruction) -> None:
    """A loop that cannot be counted, beside an instruction that HLO does not have: it is the text that is mangled."""
    names = [frame.computation.name, *(name for _, name in loop.callees)]
    for name in names:
        for line in frame.module.computations[name].instructions:
            if not is_known(line.opcode):
                fail(f"%{name}", f"unknown instruction {line.opcode!r} (%{line.name}) where a loop must be counted")


def _unknown(frame: Frame, loop: Instruction, why: str) -> str:
    source = frame.module.source(loop)
    place = f" ({source.file}:{source.line})" if source else ""
    return f"loop %{loop.name}{place} is counted once: {why}"
