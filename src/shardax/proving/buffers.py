"""The largest buffers that a compiled step makes, by the Python line that asked for them.

A hint, not an allocation: which of them live at the same time is the compiler's secret.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardax.proving.hlo import HloModule
from shardax.proving.integrity import consistent
from shardax.proving.provenance import nearest_source
from shardax.proving.shapes import ArrayShape, arrays
from shardax.proving.walk import Execution, walk

_NOT_NEW = frozenset(
    {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "opt-barrier",
     "send", "recv", "send-done", "recv-done", "dynamic-update-slice"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array that a device holds while the step runs."""

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    file: str
    line: int
    function: str
    nearest: bool
    op_name: str
    name: str
    opcode: str

    @property
    def place(self) -> str:
        """Where it comes from, with `~` when that is the nearest line and not the exact one."""
        return f"{'~' if self.nearest else ''}{self.file.rpartition('/')[2]}:{self.line}" if self.file else ""


def largest_buffers(module: HloModule, count: int = 10) -> tuple[Buffer, ...]:
    """The largest results of kernels, one for each line and shape.

    >>> import jax, jax.numpy as jnp
    >>> from shardax.proving.hlo import parse_hlo
    >>> product = jax.jit(jnp.matmul).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
    >>> [(found.bytes, found.shape) for found in largest_buffers(parse_hlo(product.as_text()))]
    [(128, (8, 4))]
    """
    on_chip = ":T(" in module.header
    found: list[tuple[int, ArrayShape, Execution, int]] = []
    with consistent(module.name):
        for execution in walk(module, lambda _: True, into_fusions=False):
            for place, line in enumerate(execution.computation.instructions):
                if line.opcode not in _NOT_NEW and not line.opcode.endswith("-start"):
                    found += [(a.bytes, a, execution, place) for a in arrays(line.shape) if not (on_chip and a.space)]
    found.sort(key=lambda entry: -entry[0])
    buffers: dict[tuple[object, ...], Buffer] = {}
    for _, array, execution, place in found:
        buffer = _buffer(module, execution, place, array)
        buffers.setdefault((buffer.file, buffer.line, buffer.dtype, buffer.shape), buffer)
        if len(buffers) == count:
            break
    return tuple(buffers.values())


def _buffer(module: HloModule, execution: Execution, place: int, array: ArrayShape) -> Buffer:
    line = execution.computation.instructions[place]
    source, op_name = module.source(line), line.op_name
    nearest = source is None
    if source is None:
        source, op_name = nearest_source(module, execution.computation, line)
    return Buffer(
        bytes=array.bytes,
        dtype=array.dtype,
        shape=array.dims,
        file=source.file if source else "",
        line=source.line if source else 0,
        function=source.function if source else "",
        nearest=nearest and source is not None,
        op_name=op_name,
        name=line.name,
        opcode=line.opcode,
    )
