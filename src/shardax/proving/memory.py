"""`Memory`: what one device holds during the step, and what the compiler says when it does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardax.proving.target import Target
from shardax.tables import Table, show_bytes

UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = r"([\d.]+)([BKMGT]?)"


@dataclass(frozen=True)
class BigBuffer:
    """One of the largest buffers, with the Python line that it comes from."""

    bytes: int
    what: str  # dtype and shape
    place: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `peak` is everything at once; `hbm` is what the device gives (None: not known)."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    peak: int
    hbm: int | None = None
    groups: tuple[tuple[str, int], ...] = ()  # of the arguments, by argument and first key
    buffers: tuple[BigBuffer, ...] = ()

    @property
    def margin(self) -> int | None:
        """What is left of the device (negative: what is missing)."""
        return None if self.hbm is None else self.hbm - self.peak

    def table(self) -> Table:
        """The story, from arguments to margin."""
        rows = [("arguments", show_bytes(self.arguments))]
        rows += [(f"  {name}", show_bytes(size)) for name, size in self.groups if len(self.groups) > 1]
        rows += [
            ("outputs (new)", show_bytes(self.outputs - self.aliased)),
            ("temporaries", show_bytes(self.temporaries)),
        ]
        rows += [("peak", show_bytes(self.peak))]
        if self.hbm is not None:
            rows += [("device", show_bytes(self.hbm)), ("margin", show_bytes(self.hbm - self.peak))]
        return Table("", ("memory per device", "bytes"), tuple(rows), ("bytes",))

    def __str__(self) -> str:
        return str(self.table())

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Memory:
        """The inverse of `to_json`."""
        read: dict[str, Any] = dict(data)
        read["groups"] = tuple((str(name), int(size)) for name, size in data["groups"])
        read["buffers"] = tuple(BigBuffer(**buffer) for buffer in data["buffers"])
        return cls(**read)


def read_memory(
    stats: Mapping[str, int],
    target: Target,
    groups: Sequence[tuple[str, int]],
    buffers: Sequence[BigBuffer],
    hbm: int | None,
) -> Memory:
    """The compiler's numbers in our words."""
    arguments, outputs = stats["argument_size_in_bytes"], stats["output_size_in_bytes"]
    temporaries, aliased = stats["temp_size_in_bytes"], stats["alias_size_in_bytes"]
    code = stats["generated_code_size_in_bytes"]
    together = arguments + outputs - aliased + temporaries
    if target.platform == "tpu":  # what the compiler itself holds against the device
        peak = stats.get("total_allocation_bytes") or together
    elif target.platform == "gpu":
        peak = stats.get("peak_memory_in_bytes") or together
    else:  # XLA:CPU's own peak leaves the temporaries out
        peak = together
    return Memory(arguments, outputs, temporaries, aliased, code, peak, hbm, tuple(groups), tuple(buffers))


# ---- out of memory is an answer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What the TPU compiler says when a program does not fit: how much it needs, of how much, and the largest parts."""

    used: int
    available: int
    program: int | None = None
    arguments: int | None = None
    buffers: tuple[BigBuffer, ...] = ()


def size_of(number: str, unit: str) -> int:
    """ "16.30", "G" → bytes."""
    return int(float(number) * UNITS[unit])


def read_refusal(message: str) -> Refusal | None:
    """The two forms of "out of memory", or None when the compiler refused for another reason.

    >>> early = "the total memory required for HLO temporaries (15.79G) exceeds available HBM (15.75G)."
    >>> show_bytes(read_refusal("RESOURCE_EXHAUSTED: Ran out of memory on HBM, " + early).used)
    '15.8 GiB'
    """
    early = re.search(rf"total memory required for [^(]*\({SIZE}\) exceeds available HBM \({SIZE}\)", message)
    if early:
        return Refusal(size_of(early[1], early[2]), size_of(early[3], early[4]))
    late = re.search(rf"Used {SIZE} of {SIZE} hbm", message)
    if not late:
        return None

    def part(name: str) -> int | None:
        found = re.search(rf"^\s*{name}\s+{SIZE}", message, re.MULTILINE)
        return size_of(found[1], found[2]) if found else None

    return Refusal(
        size_of(late[1], late[2]),
        size_of(late[3], late[4]),
        part("program"),
        part("arguments"),
        tuple(_allocations(message)),
    )


def _allocations(message: str) -> list[BigBuffer]:
    _, _, listed = message.partition("Largest program allocations in hbm:")
    found: list[BigBuffer] = []
    for entry in re.split(r"^\s*\d+\. Size: ", listed, flags=re.MULTILINE)[1:]:
        size = re.match(SIZE, entry)
        operator = re.search(r'op_name="([^"]*)"', entry)
        line = re.search(r'source_file="([^"]*)" source_line=(\d+)', entry)
        shape = re.search(r"Shape: ([^\s{]+)", entry)
        place = f"{line[1].rsplit('/', 1)[-1]}:{line[2]}" if line else operator[1] if operator else ""
        if size:
            found.append(BigBuffer(size_of(size[1], size[2]), shape[1] if shape else "", place))
    return found


def report_buffers(report: str, most: int = 8) -> list[tuple[int, list[str]]]:
    """The largest allocations of XLA's memory-usage report: bytes, and the shapes that share them."""
    rows = re.findall(rf"^\s*{SIZE}i?B?\(\s*\d+%\);\s*{SIZE}i?B;\s*\d+;\s*\d+;\s*(.*)$", report, flags=re.MULTILINE)
    return [
        (
            size_of(size, unit),
            [re.sub(r"^\d+×", "", shape.strip(" ()")) for shape in re.split(r", (?=\S*[a-z])", shapes)],
        )
        for _, _, size, unit, shapes in rows[:most]
    ]
