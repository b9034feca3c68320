"""Is HLO text whole? Truncated, cut or altered text must not become a number.

HLO says most things twice: brackets close, every name is defined, a computation's first line repeats the shapes of its
parameters and of its root, the module's first line those of the entry. All of it is compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn, Protocol

from shardax.errors import HloParseError, Offence
from shardax.proving.shapes import bare, parts

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NAME = re.compile(r"%([\w.\-]+)")
_PAIRS = ("()", "[]", "{}")


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


def check_brackets(text: str) -> None:
    """Every line closes what it opens, except a computation's first and last."""
    stripped, strings = _STRING.subn("", text)
    if text.count('"') - text.count('\\"') < 2 * strings or '"' in stripped:
        where = next((n for n, line in enumerate(stripped.split("\n"), 1) if '"' in line), 1)
        fail(f"line {where}", "a string that does not end")
    for number, line in enumerate(stripped.split("\n"), 1):
        for opening, closing in _PAIRS:
            if line.count(opening) != line.count(closing) and not _is_fence(line, opening):
                fail(f"line {number}", f"{opening!r} and {closing!r} do not match")


def _is_fence(line: str, opening: str) -> bool:
    if opening != "{":
        return False
    more = line.count("{") - line.count("}")
    return (more == 1 and line.rstrip().endswith("{")) or (more == -1 and line.startswith("}"))


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
    _check_names(name, lines, body, defined, known)
    if signature:
        _check_signature(name, signature, lines, roots[0])


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
    inputs, _, output = signature.rpartition(" -> ")
    if bare(root.shape) != bare(output.strip()):
        fail(f"%{name}", f"its root is {bare(root.shape)} where its first line says {bare(output.strip())}")
    announced = parts(bare(inputs.strip())[1:-1])
    parameters = {line.tail.partition(")")[0]: line for line in lines if line.opcode == "parameter"}
    if len(announced) != len(parameters):
        fail(f"%{name}", f"{len(parameters)} parameters where its first line says {len(announced)}")
    for number, text in enumerate(announced):
        line = parameters.get(str(number))
        if line is None or text != f"{line.name}: {bare(line.shape)}":
            said = line.shape if line else "missing"
            fail(f"%{name}", f"parameter {number} is {said} where its first line says {text}")


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
