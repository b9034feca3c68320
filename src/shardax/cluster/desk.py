"""Rank 0's side of the preflight: it collects what the other processes say of themselves and gives all one answer."""

from __future__ import annotations

import json
import logging
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardax.cluster.facts import Fault, ProcessFacts, faults
from shardax.cluster.ranks import show_ranks

logger = logging.getLogger("shardax")

GREETING = b"shardax preflight 1 "
"""The first bytes on every connection: by them a process knows a preflight from a JAX coordinator."""

LINGER = 1.0
"""How long to wait for more arrivals once something is wrong, so that the answer names all odd ranks."""

LONGEST_LINE = 1 << 20


@dataclass(eq=False)
class Desk:
    """Everyone who has arrived, until `gather` knows enough for an answer."""

    listener: socket.socket
    facts: ProcessFacts
    end: float
    _unread: dict[socket.socket, bytes] = field(default_factory=dict)
    _arrived: dict[socket.socket, ProcessFacts] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)

    @property
    def arrived(self) -> list[ProcessFacts]:
        return sorted([self.facts, *self._arrived.values()], key=lambda facts: facts.rank)

    @property
    def absent(self) -> list[int]:
        return sorted(set(range(self.facts.size)) - {facts.rank for facts in self.arrived})

    def gather(self) -> list[Fault]:
        """Until all are here, or time is up, or a little after the first fault; what is wrong with those who came."""
        stop, next_note = self.end, time.monotonic() + 10
        found: list[Fault] = []
        while (absent := self.absent or found) and (now := time.monotonic()) < stop:
            for key, _ in self._selector.select(min(0.5, stop - now)):
                self._serve(key.fileobj)
            if not found and (found := faults(self.arrived, self.facts.size)):
                stop = min(self.end, time.monotonic() + LINGER)
            if now > next_note and absent:
                logger.warning("rank 0 still waits for %s", show_ranks(self.absent))
                next_note += 30
        return faults(self.arrived, self.facts.size)

    def answer(self, verdict: Mapping[str, Any]) -> None:
        """The same words to everyone who came."""
        line = json.dumps(verdict).encode() + b"\n"
        for connection in self._arrived:
            connection.settimeout(5)
            with suppress(OSError):  # it left while it waited: JAX's own time-out will name what is left
                connection.sendall(line)

    def close(self) -> None:
        self._selector.close()
        for connection in [*self._unread, *self._arrived]:
            connection.close()

    def _serve(self, ready: Any) -> None:
        if ready is self.listener:
            self._welcome()
            return
        try:
            part = ready.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:  # it left; whoever starts in its place is not a second one
            self._dismiss(ready)
        elif ready in self._unread:
            self._unread[ready] += part
            if self._unread[ready].endswith(b"\n"):
                self._admit(ready)
            elif len(self._unread[ready]) > LONGEST_LINE:
                self._dismiss(ready)

    def _welcome(self) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            seconds = max(0.0, self.end - time.monotonic())
            line = json.dumps({"facts": self.facts.to_json(), "seconds": seconds}).encode()
            connection.send(GREETING + line + b"\n")
            self._unread[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _admit(self, connection: socket.socket) -> None:
        try:
            facts = ProcessFacts.from_json(json.loads(self._unread.pop(connection)))
        except (ValueError, TypeError, KeyError):  # a port scanner, not a process of ours
            self._dismiss(connection)
            return
        self._arrived[connection] = facts

    def _dismiss(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._unread.pop(connection, None)
        self._arrived.pop(connection, None)
        connection.close()
