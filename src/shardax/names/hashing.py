"""Hashes that follow structure, and agree between processes whatever PYTHONHASHSEED says."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType
from typing import Any

from shardax.errors import HashingError, did_you_mean

_BITS = 60  # a non-negative int of 60 bits passes through `hash()` unchanged on every platform


def hash_fn(obj: Any) -> int:
    """The structural hash of an object: its class and its fields, all the way down.

    Equal structures hash alike in every process; lists hash like tuples, dicts and sets without regard to order,
    and dataclass fields with `compare=False` are left out. Usable as `__hash__ = hash_fn` in a class.

    >>> hash_fn({"a": [1, 2], "b": None}) == hash_fn({"b": None, "a": (1, 2)})
    True
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: int
    ...     __hash__ = hash_fn
    >>> hash(Point(1)) == hash(Point(1)) == hash_fn(Point(1)) != hash(Point(2))
    True
    """
    return int.from_bytes(_digest(obj, ())[:8], "big") >> (64 - _BITS)


def get_safe_hash_int(text: Any, algorithm: str = "md5") -> int:
    """The digest of a text as an integer.

    >>> get_safe_hash_int("hello world")
    125893641179230474042701625388361764291
    >>> get_safe_hash_int("hello world") < get_safe_hash_int("hello world", algorithm="sha256")
    True
    """
    if algorithm not in hashlib.algorithms_available:
        close = did_you_mean(algorithm, sorted(hashlib.algorithms_available))
        raise HashingError(f"Unsupported hash algorithm: {algorithm}{close}")
    digest = hashlib.new(algorithm, str(text).encode(), usedforsecurity=False)
    if not digest.digest_size:
        raise HashingError(f"Unsupported hash algorithm: {algorithm}", remedy="its digest has no length of its own")
    return int.from_bytes(digest.digest(), "big")


_Digest = Callable[[Any], bytes]


def _digest(value: Any, trail: tuple[int, ...]) -> bytes:
    """One digest per node: the kind of the node, then the digests of its parts, all of one length."""
    if id(value) in trail:
        return _join("cycle", [])
    inner = (*trail, id(value))
    return _node(value, lambda part: _digest(part, inner))


def _node(value: Any, digest: _Digest) -> bytes:
    if isinstance(value, Number):  # 1 == 1.0 == True, and Python hashes them alike in every process
        # a NaN hashes by identity since Python 3.10
        return _join("number", [str("nan" if value != value else hash(value)).encode()])  # noqa: PLR0124
    if isinstance(value, (str, bytes)):
        return _join("text", [value.encode() if isinstance(value, str) else b"b" + value])
    if isinstance(value, (list, tuple)):
        return _join("sequence", map(digest, value))
    if isinstance(value, Mapping):
        return _join("mapping", sorted(digest(key) + digest(item) for key, item in value.items()))
    if isinstance(value, Set):
        return _join("set", sorted(map(digest, value)))
    return _object(value, digest)


def _object(value: Any, digest: _Digest) -> bytes:
    kind = type(value)
    if isinstance(value, Enum):
        return _join(f"enum {kind.__qualname__}.{value.name}", [])
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return _join(f"named {value.__module__}.{value.__qualname__}", [])
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if field.compare]
        return _join(kind.__qualname__, [digest((field.name, getattr(value, field.name))) for field in fields])
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return _join("array", [digest((str(value.dtype), value.shape)), value.tobytes()])
    if hasattr(value, "__dict__"):
        return _join(kind.__qualname__, [digest(vars(value))])
    return _join(kind.__qualname__, [digest(_constituents(value))])


def _constituents(value: Any) -> Any:
    """What pickle would rebuild an object from; for what it would not, the hash or the repr of the object."""
    if value is None or value is Ellipsis:
        return repr(value)
    try:
        made = value.__reduce_ex__(2)
        return made if isinstance(made, str) else made[:3]
    except TypeError:
        return hash(value) if isinstance(value, Hashable) else repr(value)


def _join(kind: str, parts: Iterable[bytes]) -> bytes:
    node = hashlib.blake2b(digest_size=16)
    for part in (kind.encode(), *parts):
        node.update(len(part).to_bytes(8, "big"))
        node.update(part)
    return node.digest()
