"""A small process beside each process of a job, which sees it die, freeze or fail, and tells the others.

It is a process of its own because a thread is no witness: Python code that holds the interpreter's lock for seconds
looks like death, and a thread dies with what it watches. It imports nothing but the standard library and is started
as a script:

    python -I -S sentinel.py RANK PARENT SILENCE listen HOST TOKEN SIZE
    python -I -S sentinel.py RANK PARENT SILENCE join HOST PORT TOKEN

Its parent writes JSON lines to its stdin (`step`, `failed`, `done`) and reads JSON lines from its stdout (`port`,
`verdict`). The sentinel of rank 0 is the hub: the others report to it, and it gives all the same verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

TICK = 0.5
"""How often a sentinel looks at its parent and reports."""

SETTLE, SETTLE_WEAK = 0.15, 1.0
"""How long a cause waits for others of the same moment; a weak one may be the consequence of one still unheard."""

LAST = 2.5
"""How long rank 0 stays for the others to leave first: its end would abort them without a word."""


@dataclass
class Member:
    """One process, as the hub knows it."""

    rank: int
    name: str
    heard: float
    step: str = "the start"
    state: str = "running"
    stopped_since: float | None = None
    failure: str | None = None
    weak: bool = False
    failed_at: float = 0.0

    def hear(self, report: dict[str, Any], now: float) -> None:
        """Take in one report of this member's sentinel."""
        self.heard = now
        self.step = report.get("step", self.step)
        if self.state != "done":
            self.state = report.get("state", self.state)
        self.stopped_since = (self.stopped_since or now) if self.state == "stopped" else None
        if "failed" in report and self.failure is None:
            self.failure, self.weak, self.failed_at = report["failed"], report["weak"], now

    def cause(self, now: float, silence: float) -> tuple[str, bool, float] | None:
        """What is wrong with this member: in words, whether that may be a consequence, and since when."""
        if self.failure is not None:
            return f"failed at {self.step}: {self.failure}", self.weak, self.failed_at
        if self.state == "done":
            return None
        if self.state == "gone":
            return f"was killed, or left without a word, at {self.step}", False, self.heard
        if self.stopped_since is not None and now - self.stopped_since >= silence:
            return f"has been stopped for {now - self.stopped_since:.1f} s, at {self.step}", False, 0.0
        if now - self.heard >= silence:
            return f"has not been seen for {now - self.heard:.1f} s, last at {self.step}", False, 0.0
        return None


def judge(members: list[Member], now: float, silence: float) -> list[list[Any]]:
    """The causes to end the job for, each with its rank, or nothing yet.

    >>> members = [Member(0, "a", 9.9), Member(1, "b", 5.0, "step 8")]
    >>> judge(members, 10.0, 3.0)
    [[1, 'b', 'has not been seen for 5.0 s, last at step 8']]
    """
    causes = [(member, cause) for member in members if (cause := member.cause(now, silence))]
    if not causes:
        return []
    all_weak = all(weak for _, (_, weak, _) in causes)
    if now - min(since for _, (_, _, since) in causes) < (SETTLE_WEAK if all_weak else SETTLE):
        return []
    return [[member.rank, member.name, text] for member, (text, weak, _) in causes if all_weak or not weak]


class Lines:
    """Whole lines out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, part: bytes) -> list[dict[str, Any]]:
        *whole, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in whole if line.strip()]


@dataclass
class Parent:
    """The process this sentinel watches: what it says, and how the kernel sees it."""

    pid: int
    step: str = "the start"
    state: str = "running"
    failed: str | None = None
    weak: bool = False
    lines: Lines = field(default_factory=Lines)

    @property
    def ended(self) -> bool:
        return self.state in ("gone", "done")

    @property
    def orphaned(self) -> bool:
        return os.getppid() != self.pid

    def listen(self) -> None:
        part = os.read(0, 65536)
        if not part and self.state != "done":
            self.state = "gone"
        for said in self.lines.feed(part):
            self.step = said.get("step", self.step)
            if "failed" in said:
                self.failed, self.weak = said["failed"], said["weak"]
            if "done" in said:
                self.state = "done"

    def look(self) -> None:
        if self.ended:
            return
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except OSError:
            letter = "" if os.path.isdir("/proc/self") else "S"  # no /proc: only its end can be seen
        gone = self.orphaned or letter in ("Z", "X", "")
        self.state = "gone" if gone else "stopped" if letter in ("T", "t") else "running"

    def report(self) -> dict[str, Any]:
        said = {"state": self.state, "step": self.step}
        return said if self.failed is None else {**said, "failed": self.failed, "weak": self.weak}

    @staticmethod
    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")


@dataclass
class Clock:
    """Time as this process saw it pass: after a pause of its own, nobody else's silence counts."""

    silence: float
    now: float = field(default_factory=time.monotonic)
    next_tick: float = 0.0

    def advance(self) -> tuple[bool, bool]:
        """Read the time; was this process paused, and is it time to look around?"""
        before, self.now = self.now, time.monotonic()
        ticks = self.now >= self.next_tick
        if ticks:
            self.next_tick = self.now + TICK
        return self.now - before > max(self.silence / 2, 2 * TICK), ticks


@dataclass
class Hub:
    """Rank 0's sentinel: hears everyone, judges, tells everyone."""

    parent: Parent
    silence: float
    host: str
    token: str
    size: int
    members: dict[int, Member] = field(default_factory=dict)
    peers: dict[socket.socket, tuple[Lines, int | None]] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        """Until all have come and are done, or there is a verdict."""
        listener = socket.create_server((self.host, 0), backlog=4096)
        self.parent.tell({"port": listener.getsockname()[1]})
        clock = Clock(self.silence)
        self.members[0] = Member(0, _name(self.parent.pid), clock.now)
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        while not self._over():
            ready = self.selector.select(0.05 if self._troubled() else TICK)
            paused, ticks = clock.advance()
            for key, _ in ready:
                self._serve(key.fileobj, listener, clock.now)
            if ticks:
                self.parent.look()
                self._tell_peers({"beat": 1})
            self.members[0].hear(self.parent.report(), clock.now)
            if paused:
                for member in self.members.values():
                    member.heard = clock.now
            if causes := judge(list(self.members.values()), clock.now, self.silence):
                self._end(causes, listener)
                return
        self._tell_peers({"closing": 1})

    def _over(self) -> bool:
        """Rank 0 may be done before another has come: that one still finds a hub, while rank 0's process lives."""
        done = all(member.state == "done" for member in self.members.values())
        return done and (len(self.members) == self.size or self.parent.orphaned)

    def _troubled(self) -> bool:
        return any(member.failure or member.state == "gone" for member in self.members.values())

    def _tell_peers(self, message: dict[str, Any]) -> None:
        for peer in self.peers:
            _send(peer, message)

    def _serve(self, ready: Any, listener: socket.socket, now: float) -> None:
        if ready is listener:
            self._welcome(listener)
        elif ready == 0:
            self.parent.listen()
            if self.parent.ended:
                self.selector.unregister(0)
        else:
            self._hear(ready, now)

    def _welcome(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        peer.settimeout(1)
        self.peers[peer] = (Lines(), None)
        self.selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket, now: float) -> None:
        lines, rank = self.peers[peer]
        said, open_ = _receive(peer, lines)
        for report in said:
            if rank is None:
                if report.get("token") != self.token:
                    open_ = False
                    break
                rank = int(report["rank"])
                self.peers[peer] = (lines, rank)
                self.members[rank] = Member(rank, report["name"], now)
            self.members[rank].hear(report, now)
        if not open_:
            self.selector.unregister(peer)
            del self.peers[peer]
            peer.close()
            if rank is not None:
                self.members[rank].hear({"state": "gone"}, now)

    def _end(self, causes: list[list[Any]], listener: socket.socket) -> None:
        """The verdict for everyone, also for those who come only now; rank 0 last."""
        self._tell_peers({"verdict": causes})
        told = set(self.peers)
        end = time.monotonic() + LAST
        while (self.peers or len(self.members) < self.size) and (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                ready: Any = key.fileobj
                if ready is listener:
                    self._welcome(listener)
                elif ready not in self.peers:
                    self.selector.unregister(ready)
                else:
                    self._hear(ready, time.monotonic())
                    if ready not in told and self.peers.get(ready, (None, None))[1] is not None:
                        _send(ready, {"verdict": causes})
                        told.add(ready)
        self.parent.tell({"verdict": causes})


@dataclass
class Spoke:
    """The sentinel of any other rank: reports to the hub, and passes the verdict on."""

    parent: Parent
    rank: int
    silence: float
    address: tuple[str, int]
    token: str

    def run(self) -> None:
        """Until the parent is done or gone, or the hub has spoken."""
        try:
            hub = socket.create_connection(self.address, timeout=10)
        except OSError as error:
            self.parent.tell({"unreachable": str(error)})
            return
        hub.settimeout(2)
        _send(hub, {"token": self.token, "rank": self.rank, "name": _name(self.parent.pid)})
        self.parent.tell({"joined": 1})
        if (verdict := self._watch(hub)) is not None:
            self.parent.tell({"verdict": verdict})

    def _watch(self, hub: socket.socket) -> list[list[Any]] | None:
        lines, clock = Lines(), Clock(self.silence)
        selector = selectors.DefaultSelector()
        selector.register(hub, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        heard = clock.now
        while True:
            ready = {key.fileobj for key, _ in selector.select(TICK)}
            paused, _ = clock.advance()
            if 0 in ready:
                self.parent.listen()
                if self.parent.ended:
                    selector.unregister(0)
            self.parent.look()
            _send(hub, self.parent.report())
            if self.parent.ended and self.parent.failed is None:
                return None
            said, open_ = _receive(hub, lines) if hub in ready else ([], True)
            heard = clock.now if hub in ready or paused else heard
            for line in said:
                if "verdict" in line:
                    return line["verdict"]
                if "closing" in line:
                    return None
            if not open_:
                return [[0, self.address[0], "is gone, and its sentinel with it"]]
            if clock.now - heard >= self.silence:
                return [[0, self.address[0], f"has not been seen for {clock.now - heard:.1f} s, nor has its host"]]


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, lines: Lines) -> tuple[list[dict[str, Any]], bool]:
    """What has come, and whether more can come."""
    try:
        part = connection.recv(65536)
        return lines.feed(part), bool(part)
    except (OSError, ValueError):
        return [], False


def _name(pid: int) -> str:
    return f"{socket.gethostname()} pid {pid}"


def main(rank: str, pid: str, silence: str, how: str, *rest: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent; this process ends with it
    parent = Parent(int(pid))
    if how == "listen":
        host, token, size = rest
        Hub(parent, float(silence), host, token, int(size)).run()
    else:
        host, port, token = rest
        Spoke(parent, int(rank), float(silence), (host, int(port)), token).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
