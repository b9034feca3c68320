"""The shapes that HLO writes: `bf16[8,256]{1,0:T(8,128)S(1)}` or a tuple of them, as arrays with bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from shardax.errors import HloParseError, Offence

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ?]*)\](?:\{([^{}]*)\})?")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NUMBERED = re.compile(r"[su](1|2|4|8|16|32|64)|f(16|32|64)|bf(16)|c(64|128)|f(4|6|8)e\dm\d(?:b11)?(?:fn|fnu|fnuz)?")


@lru_cache(maxsize=256)
def dtype_bits(dtype: str) -> int:
    """Bits of one element.

    >>> dtype_bits("bf16"), dtype_bits("f8e4m3fn"), dtype_bits("s4"), dtype_bits("pred"), dtype_bits("token")
    (16, 8, 4, 8, 0)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NUMBERED.fullmatch(dtype)
    if match is None:
        raise HloParseError("HLO text that cannot be read", [Offence(dtype, "not an element type")])
    return int(next(filter(None, match.groups())))


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of a shape: element type, dimensions, and the memory space of its layout (0 is main memory)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.size * dtype_bits(self.dtype) // 8)


@lru_cache(maxsize=65536)
def arrays(shape: str) -> tuple[ArrayShape, ...]:
    """Every array in a shape, tuples flattened.

    >>> arrays("(f32[], bf16[8,256]{1,0:T(8,128)(2,1)S(1)})")
    (ArrayShape(dtype='f32', dims=(), space=0), ArrayShape(dtype='bf16', dims=(8, 256), space=1))
    """
    return tuple(_array(match) for match in _ARRAY.finditer(shape))


def _array(match: re.Match[str]) -> ArrayShape:
    dtype, dims, layout = match.groups()
    space = _SPACE.search(layout) if layout else None
    sizes = (dim.strip().removeprefix("<=") for dim in dims.split(",") if dim.strip())
    try:
        return ArrayShape(dtype, tuple(map(int, sizes)), int(space[1]) if space else 0)
    except ValueError:
        raise HloParseError("HLO text that cannot be read", [Offence(match[0], "a dimension without a size")]) from None


@lru_cache(maxsize=65536)
def nbytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without the padding of tiled layouts.

    >>> nbytes("(f32[16]{0}, (bf16[8,2]{1,0}, token[]))")
    96
    """
    return sum(array.bytes for array in arrays(shape))


def parts(text: str) -> list[str]:
    """Split at the commas outside every bracket.

    >>> parts("f32[8,2]{1,0}, (s32[], u8[4])")
    ['f32[8,2]{1,0}', '(s32[], u8[4])']
    """
    pieces = text.split(",")
    if len(pieces) == 1:
        return [text.strip()] if text.strip() else []
    found: list[str] = []
    depth, held = 0, ""
    for piece in pieces:
        depth += sum(map(piece.count, "([{")) - sum(map(piece.count, ")]}"))
        held = f"{held},{piece}" if held else piece
        if depth <= 0:
            found.append(held.strip())
            held = ""
    return [*found, held.strip()] if held.strip() else found


@lru_cache(maxsize=16384)
def elements(shape: str) -> tuple[str, ...]:
    """The element shapes of a tuple shape; an array is its own only element."""
    text = _COMMENT.sub("", shape).strip()
    if not text.startswith("("):
        return (text,)
    return tuple(parts(text[1:-1]))


def element(shape: str, index: int) -> str:
    """One element of a tuple shape.

    >>> element("(s32[], /*index=1*/bf16[8]{0})", 1)
    'bf16[8]{0}'
    """
    found = elements(shape)
    if not 0 <= index < len(found):
        raise HloParseError("HLO text that cannot be read", [Offence(shape, f"has no element {index}")])
    return found[index]


@lru_cache(maxsize=16384)
def bare(shape: str) -> str:
    """A shape without layouts and comments, for comparing.

    >>> bare("(f32[8,2]{1,0:T(8,128)}, /*index=1*/s32[])")
    '(f32[8,2], s32[])'
    """
    if "/" in shape:
        shape = _COMMENT.sub("", shape)
    return _LAYOUT.sub("", shape) if "{" in shape else shape
