"""Which Python line an instruction came from: the tables at the top of HLO text, or the older inline metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from shardax.proving.integrity import fail

_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_INLINE = re.compile(r'\bsource_file="([^"]*)"(?:[^}]*?\bsource_line=(\d+))?')
_OURS = str(Path(__file__).parents[1]) + "/"
_PROVER = str(Path(__file__).parent) + "/"
_LIBRARIES = ("/site-packages/", "/dist-packages/")
_JAX = re.compile(r"/(?:site|dist)-packages/(?:jax|jaxlib)/")


@dataclass(frozen=True, slots=True)
class Source:
    """A Python line."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class SourceTable:
    """Stack frame id → the call chain that made an instruction, innermost first, and the one line of it to show."""

    chains: Mapping[int, tuple[Source, ...]]
    shown: Mapping[int, Source]

    def source(self, tail: str) -> Source | None:
        """The line in the text of one instruction that a person would recognise as theirs."""
        place = tail.find("stack_frame_id=")
        match = _FRAME.match(tail, place) if place >= 0 else None
        if match:
            return self.shown.get(int(match[1]))
        match = _INLINE.search(tail) if "source_file=" in tail else None
        return Source(match[1], int(match[2] or 0), "") if match else None


def is_prover(file: str) -> bool:
    """Is it a frame of `prove` itself? What called it asked for the proof and has no part in the step."""
    return file.startswith(_PROVER)


def own_frames(chain: Sequence[Source]) -> list[Source]:
    """The lines of the step itself: outside libraries, JAX and shardax; the innermost first."""
    step = list(takewhile(lambda source: not is_prover(source.file), chain)) or chain
    return [s for s in step if not s.file.startswith(_OURS) and not any(library in s.file for library in _LIBRARIES)]


def recognisable(chain: Sequence[Source]) -> Source:
    """The innermost line of the step outside libraries; then outside JAX and shardax; then any."""
    step = list(takewhile(lambda source: not is_prover(source.file), chain)) or chain
    outside = [s for s in step if not s.file.startswith(_OURS) and not _JAX.search(s.file)]
    return (own_frames(chain) or outside or step)[0]


def read_sources(text: str) -> SourceTable:
    """Read the four tables (absent in old text: an empty table)."""
    tables: dict[str, dict[int, str]] = {section: {} for section in _SECTIONS}
    current: dict[int, str] | None = None
    for line in text.splitlines():
        if line in tables:
            current = tables[line]
        elif current is not None and line.strip():
            key, _, value = line.partition(" ")
            if not key.isdigit() or int(key) in current:
                fail("tables of source lines", f"not an entry: {line[:80]!r}")
            current[int(key)] = value
    names, functions, locations, frames = (tables[section] for section in _SECTIONS)
    places = {key: _place(value, names, functions) for key, value in locations.items()}
    chains = _chains({key: _numbers(value) for key, value in frames.items()}, places)
    return SourceTable(chains, {key: recognisable(chain) for key, chain in chains.items() if chain})


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(-?\d+)", text)}


def _place(text: str, names: Mapping[int, str], functions: Mapping[int, str]) -> Source:
    facts = _numbers(text)
    file = names.get(facts.get("file_name_id", 0), '"?"').strip('"')
    function = functions.get(facts.get("function_name_id", 0), '""').strip('"')
    return Source(file, facts.get("line", 0), function)


def _chains(frames: Mapping[int, Mapping[str, int]], places: Mapping[int, Source]) -> dict[int, tuple[Source, ...]]:
    # Some printers count parents from one where nought means none: then the first frame names itself as its parent.
    shift = 1 if any(facts.get("parent_frame_id") == key for key, facts in frames.items()) else 0
    chains: dict[int, tuple[Source, ...]] = {}
    for key in frames:
        chain: list[Source] = []
        at, seen = key, set[int]()
        while at in frames and at not in seen:
            seen.add(at)
            place = places.get(frames[at].get("file_location_id", 0))
            if place is not None:
                chain.append(place)
            at = frames[at].get("parent_frame_id", 0) - shift
        chains[key] = tuple(chain)
    return chains
