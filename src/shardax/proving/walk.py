"""Every computation that runs, from where, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.trips import Frame, trips

_ENTERING = ("fusion", "call", "async-start", "fusion-start", "call-start", "custom-call-start", "custom-call", "map")
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
    """The computations in which, or under which, a wanted instruction stands."""
    calls: dict[str, set[str]] = {}
    found: list[str] = []
    for computation in module.computations.values():
        if any(map(wanted, computation.instructions)):
            found.append(computation.name)
        for instruction in computation.instructions:
            if _enters(instruction):
                for _, callee in instruction.callees:
                    calls.setdefault(callee, set()).add(computation.name)
    reached = set(found)
    while found:
        for caller in calls.get(found.pop(), ()):
            if caller not in reached:
                reached.add(caller)
                found.append(caller)
    return frozenset(reached)


def _enters(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return "called_computations=" in instruction.tail
    return opcode in _ENTERING or opcode in ("while", "conditional")


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


def _unknown(frame: Frame, loop: Instruction, why: str) -> str:
    source = frame.module.source(loop)
    place = f" ({source.file}:{source.line})" if source else ""
    return f"loop %{loop.name}{place} is counted once: {why}"
