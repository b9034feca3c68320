"""Whole host copies of arrays that are spread over processes, without a replica on any device.

Every distinct block has one process that sends it. Each process packs its blocks into a stream of bytes, and the
streams are all-gathered in buffers of one size over one device per process: one compilation for any number of leaves,
and a device never holds more than a buffer per process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

BUFFER_BYTES = 64 << 20
"""What all processes together send at once."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One distinct block of one array, the process that sends it, and its place on the devices of that process."""

    array: int
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    sender: int


def exchange(arrays: Sequence[jax.Array]) -> list[NDArray[Any]]:
    """Each array whole, on every process. Every process must call it with the same arrays, in the same order."""
    whole = [np.empty(array.shape, array.dtype) for array in arrays]
    pieces = _plan(arrays)
    lengths = [0] * jax.process_count()
    for piece in pieces:
        lengths[piece.sender] += piece.nbytes
    if not max(lengths):
        return whole
    size = _buffer_size(max(lengths))
    sends = _packed(arrays, [piece for piece in pieces if piece.sender == jax.process_index()], size)
    readers = [_Reader(whole, [piece for piece in pieces if piece.sender == rank]) for rank in range(len(lengths))]
    for _ in range(-(-max(lengths) // size)):
        for reader, sent in zip(readers, all_gather_bytes(next(sends)), strict=True):
            reader.feed(sent)
    return whole


def _plan(arrays: Sequence[jax.Array]) -> list[_Piece]:
    """The pieces of all arrays, in one order for all processes; who sends is balanced by bytes."""
    load = [0] * jax.process_count()
    pieces: list[_Piece] = []
    for number, array in enumerate(arrays):
        owners: dict[tuple[tuple[int, int, int], ...], set[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            bounds = tuple(part.indices(size) for part, size in zip(index or (), array.shape, strict=True))
            owners.setdefault(bounds, set()).add(device.process_index)
        for bounds, ranks in owners.items():
            shape = tuple(stop - start for start, stop, _ in bounds)
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
            sender = min(ranks, key=lambda rank: (load[rank], rank))
            load[sender] += nbytes
            pieces.append(_Piece(number, tuple(slice(a, b) for a, b, _ in bounds), shape, nbytes, sender))
    return [piece for piece in pieces if piece.nbytes]


def _buffer_size(longest: int) -> int:
    """A power of two, so that few programs are compiled, and never so much that a device would notice."""
    most = max(BUFFER_BYTES // jax.process_count(), 1 << 16)
    return min(1 << (longest - 1).bit_length(), 1 << (most.bit_length() - 1))


def _packed(arrays: Sequence[jax.Array], pieces: Sequence[_Piece], size: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of the pieces in buffers of one size; after them, buffers of zeros for those who have more to send."""
    buffer, filled = np.zeros(size, np.uint8), 0
    for piece in pieces:
        data = _bytes_of(arrays[piece.array], piece)
        while len(data):
            part = min(len(data), size - filled)
            buffer[filled : filled + part] = data[:part]
            data, filled = data[part:], filled + part
            if filled == size:
                yield buffer
                buffer, filled = np.zeros(size, np.uint8), 0
    yield buffer
    while True:
        yield np.zeros(size, np.uint8)


def _bytes_of(array: jax.Array, piece: _Piece) -> NDArray[np.uint8]:
    wanted = [part.indices(size) for part, size in zip(piece.index, array.shape, strict=True)]
    for shard in array.addressable_shards:
        if [part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)] == wanted:
            return np.ascontiguousarray(np.asarray(shard.data)).reshape(-1).view(np.uint8)
    raise AssertionError(f"the sharding gives {piece.index} to a process that has no shard of it")


class _Reader:
    """Puts the bytes of one process's stream where they belong, piece after piece."""

    def __init__(self, whole: Sequence[NDArray[Any]], pieces: Sequence[_Piece]) -> None:
        self.whole, self.left = whole, iter(pieces)
        self._open()

    def _open(self) -> None:
        self.piece = next(self.left, None)
        self.held = np.empty(self.piece.nbytes if self.piece else 0, np.uint8)
        self.count = 0

    def feed(self, data: NDArray[np.uint8]) -> None:
        """Take the next buffer of the stream."""
        while self.piece is not None and len(data):
            part = data[: self.piece.nbytes - self.count]
            self.held[self.count : self.count + len(part)] = part
            self.count += len(part)
            data = data[len(part) :]
            if self.count == self.piece.nbytes:
                target = self.whole[self.piece.array]
                target[self.piece.index] = self.held.view(target.dtype).reshape(self.piece.shape)
                self._open()


# ---- the wire -------------------------------------------------------------------------------------------------------


def all_gather_bytes(mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The buffers of all processes, all of one size, in order of rank: one row each."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    devices = np.array([first[rank] for rank in sorted(first)])
    mesh = Mesh(devices, ("process",))
    apart, together = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
    local = jax.device_put(mine[None], first[jax.process_index()])
    sent = jax.make_array_from_single_device_arrays((len(devices), mine.size), apart, [local])
    with jax.set_mesh(mesh):  # the caller's mesh has other devices, and jit would refuse ours
        gathered = jax.jit(_identity, out_shardings=together)(sent)
    return np.asarray(gathered.addressable_data(0))


def _identity(x: Any) -> Any:
    return x
