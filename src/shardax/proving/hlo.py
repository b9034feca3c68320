"""One careful reader of HLO text: what a compiler printed, as frozen values.

The text is cut into computations and instructions by two regular expressions at the speed of C; attributes are decoded
only where somebody asks. What is not whole (`integrity.py`) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import NamedTuple

from shardax.errors import HloParseError, Offence
from shardax.proving import integrity
from shardax.proving.opcodes import may_call
from shardax.proving.shapes import arrays, element, nbytes
from shardax.proving.sources import Source, SourceTable, read_sources

_COMPUTATION = re.compile(
    r"^(ENTRY )?%?([^\s(%]+) (\([^\n]*\) -> [^\n]* )?\{[ ]*\n((?:[ \t][^\n]*+\n)*+)\}([^\n]*)$", re.M
)
_INSTRUCTION = re.compile(r"^[ \t]+(ROOT )?%?([^\s=]+) = ([^\s(]\S*|\(.*?\)) ([a-z][\w\-]*)\((.*)$", re.M)
_NAME = re.compile(r"%([\w.\-]+(?:#[\d.]+)?)")
_CALLEES = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations"
    r"|select|scatter)"
    r"=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WORD = re.compile(r'"?%?([\w.\-/]+)')
_APPENDICES = (" metadata={", " backend_config=")
_WITHOUT_OPERANDS = frozenset({"constant", "parameter", "iota", "partition-id", "replica-id"})


class Instruction(NamedTuple):
    """One line: its name, the text of its shape, its opcode, and the rest, decoded when asked for."""

    mark: str
    name: str
    shape: str
    opcode: str
    tail: str

    @property
    def is_root(self) -> bool:
        return bool(self.mark)

    @property
    def operand_text(self) -> str:
        return self.tail[: _closing(self.tail)]

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; `name#3` means element 3 of a tuple."""
        text = self.operand_text
        names = _NAME.findall(text)
        if names and "[" not in text and text.count(",") + 1 != len(names):
            integrity.fail(f"%{self.name}", f"operands that cannot be read: {text[:80]!r}")
        if names or self.opcode in _WITHOUT_OPERANDS:
            return tuple(names)
        return tuple(part.split()[-1] for part in re.sub(r"/\*.*?\*/", "", text).split(",") if part.strip())

    @property
    def attributes(self) -> str:
        """What follows the operands, up to the metadata and the backend's own configuration."""
        end = min((place for mark in _APPENDICES if (place := self.tail.find(mark)) >= 0), default=None)
        return self.tail[_closing(self.tail) + 1 : end].strip(", ")

    def attribute(self, key: str) -> str | None:
        """The bare value of `key=value` (a word, without quotes or braces)."""
        place = self.tail.find(f"{key}=")
        match = _WORD.match(self.tail, place + len(key) + 1) if place >= 0 else None
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """The name stack that JAX gave, e.g. `jit(step)/transpose(jvp())/dot_general`."""
        place = self.tail.find('op_name="')
        match = _STRING.match(self.tail, place + len("op_name=")) if place >= 0 else None
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @property
    def callees(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) for every computation it names: `("body", "region_0")`, …"""
        if not may_call(self.opcode):
            return ()
        found: list[tuple[str, str]] = []
        for role, many, one in _CALLEES.findall(self.attributes):
            found += [(role, name.strip().lstrip("%")) for name in (many.split(",") if many else [one]) if name.strip()]
        return tuple(found)

    def callee(self, role: str) -> str | None:
        return next((name for found, name in self.callees if found == role), None)


_INSTRUCTION_OF = partial(tuple.__new__, Instruction)  # `_make` without its Python frame


def _closing(tail: str) -> int:
    """Where the bracket that opens an operand list is closed again."""
    end = tail.find(")")
    if end >= 0 and tail.find("(", 0, end) < 0 and tail.find('"', 0, end) < 0:
        return end
    depth, place, quoted = 1, 0, False
    for match in re.finditer(r'\\.|["()]', tail):
        sign, place = match[0], match.start()
        if sign == '"':
            quoted = not quoted
        elif not quoted and sign in "()":
            depth += 1 if sign == "(" else -1
            if depth == 0:
                return place
    raise HloParseError("HLO text that cannot be read", [Offence(tail[:80], "an operand list that does not end")])


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]
    signature: str = ""

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions if instruction.mark)

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {int(i.operand_text): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                found.setdefault(operand.partition("#")[0], []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    def instruction(self, operand: str) -> Instruction:
        """The instruction that an operand names (without its `#element`)."""
        name = operand.partition("#")[0]
        try:
            return self.by_name[name]
        except KeyError:
            raise HloParseError(
                "HLO text that cannot be read", [Offence(f"%{self.name}", f"operand %{name} is not defined")]
            ) from None

    def shape(self, operand: str) -> str:
        """The shape of an operand, `name#3` included."""
        shape = self.instruction(operand).shape
        for index in operand.split("#")[1:]:
            shape = element(shape, int(index))
        return shape

    def operand_bytes(self, instruction: Instruction) -> int:
        return sum(nbytes(self.shape(operand)) for operand in instruction.operands)

    def __repr__(self) -> str:
        return f"Computation({self.name!r}, {len(self.instructions)} instructions)"


@dataclass(frozen=True, slots=True)
class Alias:
    """An output that takes the memory of a donated parameter."""

    output_index: tuple[int, ...]
    parameter: int
    parameter_index: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class EntryParameter:
    """An argument of the compiled program as one device sees it; `path` is its place in the Python call."""

    number: int
    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    aliased: bool
    donor: bool


@dataclass(frozen=True)
class HloModule:
    """A compiled program: computations, the tables of source lines, and what its header says."""

    header: str
    computations: Mapping[str, Computation]
    entry: Computation
    sources: SourceTable

    @cached_property
    def name(self) -> str:
        return self.header.split(",")[0].removeprefix("HloModule ").strip()

    @cached_property
    def num_partitions(self) -> int:
        return self._count("num_partitions")

    @cached_property
    def replica_count(self) -> int:
        return self._count("replica_count")

    def _count(self, key: str) -> int:
        match = re.search(rf"\b{key}=(\d+)", self.header)
        return int(match[1]) if match else 1

    @cached_property
    def aliases(self) -> tuple[Alias, ...]:
        """Donated parameters whose memory an output takes."""
        found = re.findall(
            r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, ([\w\-]+))?\)", self._header_block("input_output_alias")
        )
        return tuple(Alias(_index(out), int(number), _index(inner), kind) for out, number, inner, kind in found)

    @cached_property
    def donors(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Donated parameters that no output has taken (yet)."""
        found = re.findall(r"\((\d+), \{([\d, ]*)\}\)", self._header_block("buffer_donor"))
        return tuple((int(number), _index(inner)) for number, inner in found)

    def _header_block(self, key: str) -> str:
        start = self.header.find(f"{key}={{")
        if start < 0:
            return ""
        depth = 0
        for place in range(start + len(key) + 1, len(self.header)):
            depth += {"{": 1, "}": -1}.get(self.header[place], 0)
            if depth == 0:
                return self.header[start : place + 1]
        return ""

    @cached_property
    def parameters(self) -> tuple[EntryParameter, ...]:
        """The arguments by number, with the pytree paths that JAX wrote on them."""
        aliased = {alias.parameter for alias in self.aliases}
        donors = {number for number, _ in self.donors}
        return tuple(
            _entry_parameter(number, instruction, number in aliased, number in donors)
            for number, instruction in sorted(self.entry.parameters.items())
        )

    @cached_property
    def callers(self) -> Mapping[str, tuple[tuple[Computation, Instruction], ...]]:
        """Who names a computation, and where; who must name one and does not is refused."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                if may_call(instruction.opcode):
                    callees = instruction.callees
                    integrity.check_callees(computation.name, instruction, callees)
                    for _, name in callees:
                        found.setdefault(name, []).append((computation, instruction))
        return {name: tuple(places) for name, places in found.items()}

    def source(self, instruction: Instruction) -> Source | None:
        """The Python line an instruction came from, when the compiler kept it."""
        return self.sources.source(instruction.tail)

    def __repr__(self) -> str:
        return f"HloModule({self.name!r}, {len(self.computations)} computations, {self.num_partitions} partitions)"


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _entry_parameter(number: int, instruction: Instruction, aliased: bool, donor: bool) -> EntryParameter:
    leaves = arrays(instruction.shape)
    dtype, dims = (leaves[0].dtype, leaves[0].dims) if len(leaves) == 1 else ("tuple", ())
    path = instruction.op_name
    return EntryParameter(number, instruction.name, path, dtype, dims, nbytes(instruction.shape), aliased, donor)


def parse_hlo(text: str) -> HloModule:
    """Read HLO text of any backend, before or after optimisation.

    >>> module = parse_hlo('''HloModule f, num_partitions=1
    ...
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0), metadata={op_name="x"}
    ...   ROOT %double = f32[8]{0} add(%x, %x)
    ... }
    ... ''')
    >>> module.entry.root.operands, module.parameters[0].path, module.parameters[0].bytes
    (('x', 'x'), 'x', 32)
    """
    start = text.find("HloModule ")
    if start < 0 or text[:start].strip():
        raise HloParseError("HLO text that cannot be read", [Offence("line 1", "does not begin with 'HloModule'")])
    header, _, rest = text[start:].partition("\n")
    integrity.check_brackets(text)
    found = list(_COMPUTATION.finditer(rest))
    computations = [_computation(match) for match in found]
    integrity.check_nothing_left(rest, found)
    by_name = {computation.name: computation for computation in computations}
    if len(by_name) != len(computations):
        raise HloParseError("HLO text that cannot be read", [Offence(header[:60], "two computations of one name")])
    entries = [computation for computation, match in zip(computations, found, strict=True) if match[1]]
    if len(entries) != 1:
        problem = f"{len(entries)} ENTRY computations: the text is not whole"
        raise HloParseError("HLO text that cannot be read", [Offence(header[:60], problem)])
    _check(computations, found, by_name)
    integrity.check_entry_layout(header, entries[0].signature)
    tables = rest[: found[0].start()]
    return HloModule(header, MappingProxyType(by_name), entries[0], read_sources(tables))


def _computation(match: re.Match[str]) -> Computation:
    body = match[4]
    instructions = tuple(map(_INSTRUCTION_OF, _INSTRUCTION.findall(body)))
    if len(instructions) != body.count("\n"):
        integrity.raise_unreadable(match[2], body, _INSTRUCTION)
    return Computation(match[2], instructions, (match[3] or "").strip())


def _check(computations: Iterable[Computation], found: Iterable[re.Match[str]], known: Mapping[str, object]) -> None:
    for computation, match in zip(computations, found, strict=True):
        integrity.check_computation(computation.name, computation.signature, computation.instructions, match[4], known)
