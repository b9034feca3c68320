"""Bytes that the kernels of a compiled step move to and from a device's main memory, and how many kernels there are.

After optimisation every instruction outside a fusion is a kernel that reads its operands and writes its result. A
fusion that only slices an operand reads the slice; one that updates a buffer in place writes the update. Text from
before fusion (straight after the partitioner) has no kernels yet: there only what cannot be fused away is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardax.proving.flops import is_product, product_flops
from shardax.proving.hlo import Computation, HloModule, Instruction
from shardax.proving.integrity import consistent
from shardax.proving.shapes import ArrayShape, arrays, element, elements
from shardax.proving.walk import Execution, walk

_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "after-all",
     "partition-id", "replica-id", "opt-barrier", "send", "recv", "send-done", "recv-done", "add-dependency",
     "domain", "call-start", "async-start", "custom-call-start"}
)  # fmt: skip
_SLICING = frozenset({"dynamic-slice", "slice", "gather"})
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element", "transpose"})
# Before fusion: operations that end a fusion on every backend; the rest is taken to fuse into them.
_ANCHORS = frozenset(
    {"gather", "scatter", "sort", "reduce", "dynamic-update-slice", "all-reduce", "all-gather", "reduce-scatter",
     "all-to-all", "collective-permute", "ragged-all-to-all", "custom-call"}
)  # fmt: skip
_PLACEHOLDERS = ("AllocateBuffer", "Sharding", "SPMD", "CreateBuffer", "AssumeGatherIndicesInBound", "SliceId")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: how often it runs, the bytes and the FLOPs (by element type) of one run."""

    name: str
    opcode: str
    times: int
    bytes: int
    flops: tuple[tuple[str, int], ...]


def hbm_bytes(module: HloModule) -> int:
    """Bytes that the kernels of a compiled step read from main memory and write to it, on one device.

    >>> import jax, jax.numpy as jnp
    >>> from shardax.proving.hlo import parse_hlo
    >>> product = jax.jit(jnp.matmul).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
    >>> hbm_bytes(parse_hlo(product.as_text())) == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    True
    """
    return sum(kernel.bytes * kernel.times for kernel in kernels(module))


def kernels(module: HloModule) -> tuple[Kernel, ...]:
    """Every kernel of a step on one device."""
    with consistent(module.name):
        return tuple(_Reader.of(module).kernels())


@dataclass(frozen=True)
class _Reader:
    module: HloModule
    on_chip: bool  # TPU layouts name memory that is not main memory: S(1) and up
    fused: bool
    counted: dict[str, tuple[tuple[str, int], ...]]

    @classmethod
    def of(cls, module: HloModule) -> _Reader:
        fused = "is_scheduled=true" in module.header or any(
            line.opcode == "fusion" for computation in module.computations.values() for line in computation.instructions
        )
        return cls(module, ":T(" in module.header, fused, {})

    def kernels(self) -> Iterator[Kernel]:
        for execution in walk(self.module, lambda _: True, into_fusions=False):
            for line in execution.computation.instructions:
                if self._is_kernel(line):
                    yield self._kernel(execution, line)
        if not self.fused:
            entry = self.module.entry
            read = sum(parameter.bytes for parameter in self.module.parameters)
            yield Kernel("arguments and results", "copy", 1, read + self._bytes(entry.root.shape), ())

    def _is_kernel(self, line: Instruction) -> bool:
        if line.opcode in _FREE or line.opcode.endswith(("-done", "-update")):
            return False
        if line.opcode.startswith("custom-call") and any(name in line.tail for name in _PLACEHOLDERS):
            return False
        return self.fused or line.opcode in _ANCHORS or is_product(line)

    def _kernel(self, execution: Execution, line: Instruction) -> Kernel:
        computation = execution.computation
        return Kernel(
            line.name, line.opcode, execution.times, self._moved(computation, line), self._flops(computation, line)
        )

    def _flops(self, computation: Computation, line: Instruction) -> tuple[tuple[str, int], ...]:
        if is_product(line):
            return (product_flops(computation, line),)
        name = line.callee("calls") if line.opcode.startswith("fusion") else None
        if name is None:
            return ()
        if name not in self.counted:
            inner = self.module.computations[name]
            self.counted[name] = tuple(count for one in inner.instructions for count in self._flops(inner, one))
        return self.counted[name]

    def _bytes(self, shape: str) -> int:
        return sum(self._array(array) for array in arrays(shape))

    def _array(self, array: ArrayShape) -> int:
        return 0 if self.on_chip and array.space else array.bytes

    def _moved(self, computation: Computation, line: Instruction) -> int:
        if line.opcode in ("fusion", "fusion-start"):
            return self._fusion(computation, line)
        special = _MOVED.get(line.opcode)
        if special is not None:
            return special(self, computation, line)
        return sum(self._bytes(computation.shape(operand)) for operand in line.operands) + self._bytes(line.shape)

    def sliced(self, computation: Computation, line: Instruction) -> int:
        source = (
            0 if self.on_chip and arrays(computation.shape(line.operands[0]))[0].space else arrays(line.shape)[0].bytes
        )
        return source + self._bytes(line.shape)

    def updated(self, computation: Computation, line: Instruction) -> int:
        place = 2 if line.opcode == "scatter" else 1
        update = computation.shape(line.operands[place])
        into = self._bytes(line.shape) and arrays(update)[0].bytes
        return self._bytes(update) + into

    def started(self, computation: Computation, line: Instruction) -> int:
        written = element(line.shape, 0) if line.opcode == "copy-start" else elements(line.shape)[-1]
        if line.opcode != "copy-start" and len(elements(line.shape)) > 1:
            written = element(line.shape, 1)
        return sum(self._bytes(computation.shape(operand)) for operand in line.operands) + self._bytes(written)

    def written_only(self, computation: Computation, line: Instruction) -> int:
        return self._bytes(line.shape)

    def _fusion(self, computation: Computation, line: Instruction) -> int:
        inner = self.module.computations[line.callee("calls") or ""]
        read = sum(
            self._read(inner, number, computation.shape(operand)) for number, operand in enumerate(line.operands)
        )
        shape = elements(line.shape)[1] if line.opcode == "fusion-start" else line.shape
        return read + self._written(inner, inner.root, shape)

    def _read(self, inner: Computation, number: int, shape: str) -> int:
        """What a fusion reads of one operand: all of it, unless everybody inside takes slices or writes into it."""
        whole = self._bytes(shape)
        parameter = inner.parameters.get(number)
        if not whole or parameter is None:
            return whole
        parts = [self._taken(inner, parameter.name, user) for user in _users(inner, parameter)]
        return whole if not parts or None in parts else min(whole, sum(part or 0 for part in parts))

    def _taken(self, inner: Computation, name: str, user: Instruction) -> int | None:
        first = user.operands[0] if user.operands else ""
        if _origin(inner, first) != name:
            return None
        if user.opcode in _SLICING:
            return arrays(user.shape)[0].bytes
        return 0 if user.opcode in ("dynamic-update-slice", "scatter") else None

    def _written(self, inner: Computation, root: Instruction, shape: str) -> int:
        if root.opcode == "tuple":
            parts = zip(root.operands, elements(shape), strict=False)
            return sum(self._written(inner, inner.instruction(operand), part) for operand, part in parts)
        origin = inner.instruction(_origin(inner, root.name))
        if origin.opcode == "dynamic-update-slice" and self._bytes(shape):
            return arrays(inner.shape(origin.operands[1]))[0].bytes
        return self._bytes(shape)


def _origin(computation: Computation, name: str) -> str:
    """Through what only looks at the same bytes."""
    name = name.partition("#")[0]
    line = computation.by_name.get(name)
    while line is not None and line.opcode in _VIEWS and line.operands:
        name = line.operands[0].partition("#")[0]
        line = computation.by_name.get(name)
    return name


def _users(computation: Computation, start: Instruction) -> list[Instruction]:
    """Who uses its bytes, looking through views."""
    found: list[Instruction] = []
    pending = [start]
    while pending:
        for user in computation.users.get(pending.pop().name, ()):
            (pending if user.opcode in _VIEWS else found).append(user)
    return found


_MOVED: dict[str, Callable[[_Reader, Computation, Instruction], int]] = {
    **dict.fromkeys(_SLICING, _Reader.sliced),
    "dynamic-update-slice": _Reader.updated,
    "scatter": _Reader.updated,
    "copy-start": _Reader.started,
    **{
        f"{op}-start": _Reader.started
        for op in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    },
    "iota": _Reader.written_only,
    "broadcast": _Reader.written_only,
}
