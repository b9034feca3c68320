"""`Site`: one place of a program where data travels, or where an Explicit mesh would refuse to say how."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from shardax.proving.collectives import Collective

Cause = Literal["asked", "implied", "ambiguous"]


@dataclass(frozen=True, slots=True)
class Site:
    """One operation and one collective that it makes; bytes are those of one device.

    `cause` is "asked" (a constraint, a collective of the program's own), "implied" (there is one way to do it) or
    "ambiguous" (the compiler chooses; the least is assumed). `op` is empty where a refused operation moves nothing.
    """

    op: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: int  # of one execution
    wire_bytes: int  # sent by one device, in all
    dtype: str
    operation: str
    cause: Cause
    why: str
    phase: str
    file: str = ""
    line: int = 0
    function: str = ""
    path: str | None = None
    note: str = ""

    @property
    def place(self) -> str:
        """ "step.py:12 (loss)"."""
        if not self.file:
            return ""
        function = f" ({self.function.rpartition('<locals>.')[2]})" if self.function else ""
        return f"{self.file.rpartition('/')[2]}:{self.line}{function}"

    def as_collective(self) -> Collective:
        """The row of a ledger that a compiled program would have for it."""
        return Collective(
            self.op,
            self.axes,
            self.count,
            self.payload_bytes,
            self.wire_bytes,
            self.dtype,
            "user" if self.cause == "asked" else "partitioner",
            self.phase,
            self.file,
            self.line,
            self.function,
            path=self.path,
            conditional=bool(self.note),
            op_name=self.operation,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, one entry per field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "axes": list(self.axes)}
