"""The partitioner's own complaints: "Involuntary full rematerialization" names an array that all devices copy whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardax.proving.collectives import Collective
from shardax.proving.hlo import HloModule

_MESSAGE = re.compile(
    r"Involuntary full rematerialization\..*? from sharding (?P<source>\{.*?\}) to (?P<target>\{.*?\}) "
    r"(?:efficiently for HLO operation|without doing a full rematerialization of the tensor for HLO operation:) "
    r"(?P<instruction>.*?)(?:\. (?:As the last resort|You probably want)|$)",
    re.M,
)


@dataclass(frozen=True, slots=True)
class RematMessage:
    """One complaint: the array, and the two shardings between which there was no better way."""

    source_sharding: str
    target_sharding: str
    instruction: str
    op_name: str

    def __str__(self) -> str:
        return (
            f"replicated on the way from {self.source_sharding} to {self.target_sharding} "
            f"(involuntary full rematerialization of {self.op_name or self.instruction[:60]})"
        )


def remat_messages(text: str) -> tuple[RematMessage, ...]:
    """Read them out of what a compiler printed; the same complaint twice is one."""
    found = (
        RematMessage(match["source"], match["target"], match["instruction"], _op_name(match["instruction"]))
        for match in _MESSAGE.finditer(text)
    )
    return tuple(dict.fromkeys(found))


def _op_name(instruction: str) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction)
    return match[1] if match else ""


def attach_messages(
    rows: Sequence[Collective], messages: Sequence[RematMessage], module: HloModule
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """Put each complaint on the row that pays for it; those of no row are returned beside."""
    attached = list(rows)
    left: list[str] = []
    for message in messages:
        places = [place for place, row in enumerate(attached) if _pays(row, message, module)]
        if not places:
            left.append(str(message))
            continue
        largest = max(places, key=lambda place: attached[place].wire_bytes)
        row = attached[largest]
        attached[largest] = replace(row, warnings=(*row.warnings, str(message)))
    return tuple(attached), tuple(left)


def _pays(row: Collective, message: RematMessage, module: HloModule) -> bool:
    if row.origin != "partitioner":
        return False
    if message.op_name and message.op_name in (row.op_name, row.path):
        return True
    source = module.sources.source(message.instruction)
    return source is not None and (row.file, row.line) == (source.file, source.line)
