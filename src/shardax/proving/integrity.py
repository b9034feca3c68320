"""Is HLO text whole? Truncated, cut or altered text must not become a number.

HLO says most things twice: brackets close, every name is defined, a computation's first line repeats the shapes of its
parameters and of its root, the module's first line those of the entry. All of it is compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NoReturn, Protocol

from shardax.errors import HloParseError, Offence
from shardax.proving.opcodes import is_known
from shardax.proving.shapes import bare, parts

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NAME = re.compile(r"%([\w.\-]+)")
_WORK = re.compile(
    r"\b(?:replica_groups|source_target_pairs|is_host_transfer|lhs_contracting_dims|dim_labels|custom_call_target|"
    r"calls|to_apply|body|condition|branch_computations|true_computation|called_computations)="
)
_REQUIRED = {
    "fusion": frozenset({"calls"}),
    "while": frozenset({"condition", "body"}),
    "call": frozenset({"to_apply"}),
    "conditional": frozenset({"branch_computations"}),
}
_NOT_SIGNS = bytes(set(range(256)) - set(b'()[]{}"\n'))


class Line(Protocol):
    """What is asked of an instruction here."""

    @property
    def mark(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def opcode(self) -> str: ...
    @property
    def tail(self) -> str: ...
    @property
    def operands(self) -> tuple[str, ...]: ...


def fail(where: str, problem: str) -> NoReturn:
    raise HloParseError(
        "HLO text that cannot be read", [Offence(where, problem)], "compile again and hand over the whole text"
    )


@contextmanager
def consistent(where: str) -> Generator[None]:
    """What does not add up while a module is read is the text's fault: an index beyond a tuple, a size of nought."""
    try:
        yield
    except (IndexError, KeyError, ValueError, ZeroDivisionError, StopIteration) as error:
        if isinstance(error, HloParseError):
            raise
        headline = "HLO text that does not agree with itself"
        raise HloParseError(headline, [Offence(where, f"{type(error).__name__}: {error}")]) from error


def check_brackets(text: str) -> None:
    """Every line closes what it opens, except a computation's first and last.

    All but brackets and quotes is dropped at the speed of C; of the few hundred patterns left each is looked at once.
    """
    patterns = text.encode().translate(None, _NOT_SIGNS).split(b"\n")
    doubtful = {pattern for pattern in set(patterns) if not _is_closed(pattern)}
    if not doubtful:
        return
    for number, (pattern, line) in enumerate(zip(patterns, text.split("\n"), strict=True), 1):
        if pattern in doubtful:
            _check_line(number, line)


@lru_cache(maxsize=4096)
def _is_closed(pattern: bytes) -> bool:
    """Is it balanced as it stands, strings and all?"""
    before = None
    signs = pattern.replace(b'"', b"")
    while signs != before:
        before, signs = signs, signs.replace(b"()", b"").replace(b"[]", b"").replace(b"{}", b"")
    return not signs and pattern.count(b'"') % 2 == 0


def _check_line(number: int, line: str) -> None:
    stripped = _STRING.sub("", line)
    if '"' in stripped:
        fail(f"line {number}", "a string that does not end")
    if line.startswith("}"):
        stripped = "{" + stripped
    elif stripped.rstrip().endswith("{"):
        stripped += "}"
    if not _is_closed(stripped.encode().translate(None, _NOT_SIGNS)):
        fail(f"line {number}", f"brackets that do not match: {line.strip()[:80]!r}")


def check_nothing_left(text: str, found: Sequence[re.Match[str]]) -> None:
    """Between computations stand only blank lines (and, before the first, the tables of source lines)."""
    if not found:
        fail("", "no computation: the text is not whole")
    end = found[0].end()
    for match in found[1:]:
        if text[end : match.start()].strip():
            fail(f"before %{match[2]}", f"a line that belongs nowhere: {text[end : match.start()].strip()[:80]!r}")
        end = match.end()
    if text[end:].strip():
        fail(f"after %{found[-1][2]}", f"a line that belongs nowhere: {text[end:].strip()[:80]!r}")
    tables = text[: found[0].start()]
    if re.search(r"^(?:[ \t]|[}%]|ENTRY)", tables, re.M):
        fail(f"before %{found[0][2]}", "a computation that is not whole")


def raise_unreadable(computation: str, body: str, pattern: re.Pattern[str]) -> NoReturn:
    line = next((line for line in body.splitlines() if not pattern.match(line)), body[:80])
    fail(f"%{computation}", f"not an instruction: {line.strip()[:100]!r}")


def check_computation(name: str, signature: str, lines: Sequence[Line], body: str, known: Mapping[str, object]) -> None:
    """One root, no name twice, every operand and callee defined, shapes as announced."""
    defined = {line.name for line in lines}
    if len(defined) != len(lines):
        fail(f"%{name}", "two instructions of one name")
    roots = [line for line in lines if line.mark]
    if len(roots) != 1:
        fail(f"%{name}", f"{len(roots)} ROOT instructions instead of one")
    _check_opcodes(name, lines)
    _check_names(name, lines, body, defined, known)
    if signature:
        _check_signature(name, signature, lines, roots[0])


def _check_opcodes(name: str, lines: Sequence[Line]) -> None:
    """An instruction that HLO does not have may be a new one that computes something small; it must not be one that
    sends, multiplies or calls: mangled or new, what it does would be missing from every sum."""
    unknown = {opcode for opcode in {line.opcode for line in lines} if not is_known(opcode)}
    for line in lines if unknown else ():
        mark = _WORK.search(line.tail) if line.opcode in unknown else None
        if mark:
            fail(f"%{name}", f"unknown instruction {line.opcode!r} (%{line.name}) with {mark[0]}")


def check_callees(where: str, line: Line, callees: Sequence[tuple[str, str]]) -> None:
    """A loop without a body, a fusion that calls nothing: an attribute was lost."""
    missing = _REQUIRED.get(line.opcode, frozenset[str]()).difference(role for role, _ in callees)
    if missing and not (line.opcode == "conditional" and callees):
        fail(f"%{where}", f"%{line.name} is a {line.opcode} without {min(missing)}")


def _check_names(
    name: str, lines: Sequence[Line], body: str, defined: Collection[str], known: Mapping[str, object]
) -> None:
    unknown = {word for word in set(_NAME.findall(body)).difference(defined) if word not in known}
    if unknown:
        unknown = {word for word in set(_NAME.findall(_STRING.sub("", body))).difference(defined) if word not in known}
    if unknown:
        fail(f"%{name}", f"%{min(unknown)} is used and nowhere defined")
    if lines and "%" not in body:  # printed without the sign: look at each operand
        for line in lines:
            missing = [o for o in line.operands if o.partition("#")[0] not in defined]
            if missing and line.opcode not in ("constant", "parameter"):
                fail(f"%{name}", f"{missing[0]} is used and nowhere defined")


def _check_signature(name: str, signature: str, lines: Sequence[Line], root: Line) -> None:
    inputs, _, output = bare(signature).rpartition(" -> ")
    if bare(root.shape) != output:
        fail(f"%{name}", f"its root is {bare(root.shape)} where its first line says {output}")
    parameters = {line.tail.partition(")")[0]: line for line in lines if line.opcode == "parameter"}
    ordered = [parameters.get(str(number)) for number in range(len(parameters))]
    written = ", ".join(f"{line.name}: {bare(line.shape)}" if line else "?" for line in ordered)
    if inputs != f"({written})":
        fail(f"%{name}", f"its parameters are ({written[:200]}) where its first line says {inputs[:200]}")


def check_entry_layout(header: str, signature: str) -> None:
    """The module's first line repeats the shapes of the entry computation."""
    match = re.search(r"\bentry_computation_layout=\{(\(.*?\)->.*?)\}(?:, \w+=|$)", header)
    if not match or not signature:
        return
    inputs, _, output = signature.rpartition(" -> ")
    shapes = [text.partition(": ")[2] for text in parts(bare(inputs.strip())[1:-1])]
    announced_inputs, _, announced_output = bare(match[1]).rpartition(")->")
    if parts(announced_inputs.strip()[1:]) != shapes or announced_output.strip() != bare(output.strip()):
        fail("ENTRY", f"its shapes are not those of the module's first line: {bare(match[1])[:120]}")
