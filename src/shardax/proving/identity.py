"""When are two lowered programs the same? When their operations and the Python lines of the *step* are.

A lowered program carries the whole call stack of every operation, down to the line that called `prove`. That line moves
with every edit of a script; the answer of a compiler does not. So stacks are cut where they leave the step.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from shardax.proving.sources import is_prover

_DEFINITION = re.compile(r"^#loc(\d*) = loc\((.*)\)$", re.M)
_CALLSITE = re.compile(r"callsite\(#loc(\d*) at #loc(\d*)\)")
_FILE = re.compile(r'"([^"]*)":')
_NAMED = re.compile(r'"[^"]*"\(#loc(\d*)\)')
_REFERENCE = re.compile(r"#loc(\d*)\b")


def identity_of(text: str) -> str:
    """A digest of StableHLO text with its locations (`lowered.as_text(debug_info=True)`).

    >>> step = '#loc1 = loc("step.py":3:0)'
    >>> prover = f'#loc2 = loc("{__file__.replace("identity", "prove")}":9:0)'
    >>> chain = '#loc4 = loc(callsite(#loc2 at #loc3))\\n#loc5 = loc(callsite(#loc1 at #loc4))\\nadd loc(#loc5)'
    >>> first, later = (f'{step}\\n{prover}\\n#loc3 = loc("run.py":{line}:0)\\n{chain}' for line in (7, 70))
    >>> identity_of(first) == identity_of(later) != identity_of(first.replace("step.py", "other.py"))
    True
    """
    known: dict[str, str] = {}
    definitions = dict(_DEFINITION.findall(text))
    operations = _DEFINITION.sub("", text)

    def resolved(match: re.Match[str]) -> str:
        return _resolved(match[1], definitions, known)

    plain = "\n".join(line for line in _REFERENCE.sub(resolved, operations).splitlines() if line)
    return hashlib.sha256(plain.encode()).hexdigest()


def _is_prover_frame(words: str, definitions: Mapping[str, str]) -> bool:
    """`"prove.py":9:0`, or that with the name of its function: `"prove"(#loc4)`."""
    named = _NAMED.fullmatch(words)
    file = _FILE.match(definitions.get(named[1], "") if named else words)
    return file is not None and is_prover(file[1])


def _resolved(name: str, definitions: Mapping[str, str], known: dict[str, str]) -> str:
    """A location in words: its own file and line, then its callers' up to the first frame that is ours."""
    if name in known:
        return known[name]
    words = definitions.get(name, "")
    call = _CALLSITE.fullmatch(words)
    if call:
        own, callers = (_resolved(part, definitions, known) for part in call.groups())
        words = own if not own or not callers else f"{own}<{callers}"
    elif _is_prover_frame(words, definitions):
        words = ""
    else:
        words = _REFERENCE.sub(lambda match: _resolved(match[1], definitions, known), words)
    known[name] = words
    return words
