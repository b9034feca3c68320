"""Who asked for a collective: its name stack, its phase and its Python line, from wherever the compiler kept them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.provenance import nearest_source, producer_name
from shardax.proving.sources import Source
from shardax.proving.walk import Execution

# What a person calls in JAX, and the collective it should become.
_USER = {
    "psum": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all", "ppermute": "collective-permute", "pbroadcast": "collective-broadcast",
}  # fmt: skip
_PRIMITIVE = re.compile(r"(?:^|/)(" + "|".join(_USER) + r")(?:_invariant|_reduced|_varying|2)?(?:[.\[][^/]*)?$")
_BACKWARD = re.compile(r"(?:^|[/(])transpose\(")
_PARTITIONER = 'is_spmd_generated="true"'


@dataclass(frozen=True)
class Stack:
    """The name stack and source line of an instruction, with those of what called it."""

    op_name: str
    source: Source | None
    nearest: bool
    marked: bool
    outer: tuple[str, ...]

    @classmethod
    def of(cls, module: HloModule, execution: Execution, line: Instruction) -> Stack:
        holders = [line, *_wrappers(execution)]
        marked = any(_PARTITIONER in holder.tail for holder in holders)
        outer = tuple(caller.op_name for caller in execution.callers)
        own = next((holder.op_name for holder in holders if holder.op_name), "")
        source = next((s for holder in holders if (s := module.source(holder))), None)
        if source is not None:
            return cls(own, source, False, marked, outer)
        source, name = _reducer(module, line)
        around = _top(execution, len(holders) - 1)
        if source is None:
            source, name = nearest_source(module, around, holders[-1])
        outer = (*outer, producer_name(around, holders[-1])) if not own else outer
        return cls(own or _named_after(line) or name, source, True, marked, outer)

    @property
    def primitive(self) -> str:
        match = _PRIMITIVE.search(self.op_name)
        return match[1] if match else ""

    @property
    def origin(self) -> str:
        return "user" if self.primitive and not self.marked else "partitioner"

    @property
    def phase(self) -> str:
        return "backward" if any(map(_BACKWARD.search, (self.op_name, *self.outer))) else "forward"

    def rewrite(self, op: str, execution: Execution) -> str:
        """What the compiler made of it, when that is not what was written."""
        if op == "collective-permute" and self.origin == "partitioner" and self._is_windowed_einsum(execution):
            return "windowed einsum"
        wanted = _USER.get(self.primitive, op) if self.origin == "user" else op
        return f"{wanted} done as {op}" if wanted != op else ""

    def _is_windowed_einsum(self, execution: Execution) -> bool:
        if "windowed_dot_general" in execution.computation.name:
            return True
        looped = any(caller.opcode == "while" for caller in execution.callers)
        return looped and not self.nearest and self.op_name.rpartition("/")[2].startswith("dot_general")


def _wrappers(execution: Execution) -> list[Instruction]:
    """The fusions and asynchronous calls that hold nothing but this collective's work."""
    found: list[Instruction] = []
    for caller in execution.callers:
        if caller.opcode in ("while", "conditional", "call"):
            break
        found.append(caller)
    return found


def _top(execution: Execution, levels: int) -> Computation:
    frame = execution.frame
    for _ in range(levels):
        frame = frame.outer or frame
    return frame.computation


def _reducer(module: HloModule, line: Instruction) -> tuple[Source | None, str]:
    """The computation that a reduction applies was made at the same place, and often keeps what the collective lost."""
    reducer = module.computations.get(line.callee("to_apply") or "")
    lines = reducer.instructions if reducer else ()
    source = next((s for line in lines if (s := module.source(line))), None)
    return source, next((line.op_name for line in lines if line.opcode == "parameter" and line.op_name), "")


def _named_after(line: Instruction) -> str:
    """A collective without a name stack that JAX itself named: `%ppermute.2`, rendezvous `psum.28_0`."""
    rendezvous = line.attribute("_xla_host_transfer_rendezvous") or line.name
    name = rendezvous.partition(".")[0]
    return name if name in _USER else ""
