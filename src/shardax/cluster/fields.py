"""Any value as named fields of text, the same in every process that holds an equal value."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Fields = dict[str, str]

AN_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")


def fields_of(value: object) -> Fields:
    """The fields of a value: paths of a nested mapping, sequence or dataclass, lines of a text.

    >>> fields_of({"lr": 0.1, "mesh": {"dp": 2}, "sizes": [3, 4]})
    {'lr': '0.1', 'mesh/dp': '2', 'sizes[0]': '3', 'sizes[1]': '4'}
    >>> fields_of("a\\nb")
    {'line 1': 'a', 'line 2': 'b'}
    """
    return dict(_fields("", value))


def digest(fields: Fields) -> str:
    """A short name for these fields."""
    hashed = hashlib.sha256()
    for name, text in fields.items():
        hashed.update(f"{len(name)}:{name}{len(text)}:{text}".encode())
    return hashed.hexdigest()[:32]


def _fields(path: str, value: Any) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield from _lines(path, value)
        case Mapping():
            ordered = sorted(value.items(), key=lambda item: str(item[0]))
            yield from _children(
                path, "keys", ((_join(path, str(key)), child) for key, child in ordered), bool(ordered)
            )
        case jax.sharding.Mesh() | jax.sharding.AbstractMesh():
            yield from _mesh(path, value)
        case jax.sharding.PartitionSpec():
            yield path, str(value)
        case list() | tuple():
            yield from _children(path, "items", _labelled(path, value), bool(value))
        case set() | frozenset():
            yield path, "{" + ", ".join(sorted(map(str, value))) + "}"
        case jax.Array() | np.ndarray():
            yield path, _array(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare]
            yield from _children(path, "fields", ((_join(path, name), child) for name, child in named), bool(named))
        case _ if callable(getattr(value, "as_text", None)):  # a lowered program
            yield from _lines(path, value.as_text())
        case _:
            text = _repr(path, value)
            yield from _lines(path, text) if "\n" in text else [(path, text)]


def _children(path: str, what: str, items: Iterator[tuple[str, Any]], some: bool) -> Iterator[tuple[str, str]]:
    if not some:
        yield path, f"no {what}"
    for name, child in items:
        yield from _fields(name, child)


def _labelled(path: str, items: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Items by number, or by their own `path` (as the decisions of a layout have one)."""
    paths = [item.get("path") if isinstance(item, Mapping) else getattr(item, "path", None) for item in items]
    named = all(isinstance(own, str) for own in paths) and len(set(paths)) == len(paths)
    for number, (own, item) in enumerate(zip(paths, items, strict=True)):
        yield f"{path}[{own if named else number}]", item


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _lines(path: str, text: str) -> Iterator[tuple[str, str]]:
    lines = text.splitlines()
    if len(lines) < 2 and path:
        yield path, text
        return
    for number, line in enumerate(lines, 1):
        yield _join(path, f"line {number}"), line


def _mesh(path: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Iterator[tuple[str, str]]:
    for name, size in mesh.shape.items():
        yield _join(path, str(name)), str(size)
    yield _join(path, "axis order"), ", ".join(map(str, mesh.axis_names))
    yield _join(path, "axis types"), ", ".join(map(str, mesh.axis_types or ()))
    if isinstance(mesh, jax.sharding.Mesh):
        yield _join(path, "devices"), ", ".join(str(device.id) for device in mesh.devices.flat)


def _array(array: Any) -> str:
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        raise TypeError("an array that is spread over processes cannot be compared by value; pass its sharding")
    host = np.asarray(array)
    return f"{host.dtype}{list(host.shape)} {hashlib.sha256(np.ascontiguousarray(host).tobytes()).hexdigest()[:16]}"


def _repr(path: str, value: object) -> str:
    function: Callable[..., Any] | None = value if callable(value) else None
    if function is not None and hasattr(function, "__qualname__"):
        return f"{getattr(function, '__module__', '?')}.{function.__qualname__}"
    text = repr(value)
    if AN_ADDRESS.search(text):
        where = f" at {path!r}" if path else ""
        raise TypeError(
            f"{type(value).__name__}{where} shows its memory address, which differs in every process: {text}"
        )
    return text
