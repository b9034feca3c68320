"""A small process beside each process of a job, which sees it die, freeze or fail, and tells the others.

It is a process of its own because a thread is no witness: Python code that holds the interpreter's lock for seconds
looks like death, and a thread dies with what it watches. It imports nothing but the standard library and is started
as a script:

    python -I -S sentinel.py RANK PARENT SILENCE listen HOST TOKEN
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
        if self.state not in ("running", "stopped"):
            return
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except OSError:
            letter = "" if os.path.isdir("/proc/self") else "S"  # no /proc: only its end can be seen
        gone = os.getppid() != self.pid or letter in ("Z", "X", "")
        self.state = "gone" if gone else "stopped" if letter in ("T", "t") else "running"

    def report(self) -> dict[str, Any]:
        said = {"state": self.state, "step": self.step}
        return said if self.failed is None else {**said, "failed": self.failed, "weak": self.weak}

    @staticmethod
    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass
class Hub:
    """Rank 0's sentinel: hears everyone, judges, tells everyone."""

    parent: Parent
    silence: float
    host: str
    token: str
    members: dict[int, Member] = field(default_factory=dict)
    peers: dict[socket.socket, tuple[Lines, int | None]] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> None:
        listener = socket.create_server((self.host, 0), backlog=4096)
        listener.setblocking(False)
        self.parent.tell({"port": listener.getsockname()[1]})
        self.members[0] = Member(0, _name(self.parent.pid), time.monotonic())
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        before = next_tick = time.monotonic()
        while not self._over():
            ready = self.selector.select(min(TICK, 0.05 if self._troubled() else TICK))
            now = time.monotonic()
            if now - before > self.silence / 2:  # this process itself was not running: nobody's silence counts
                for member in self.members.values():
                    member.heard = now
            before = now
            for key, _ in ready:
                self._serve(key.fileobj, listener, now)
            if now >= next_tick:
                next_tick = now + TICK
                self.parent.look()
                for peer in self.peers:
                    _send(peer, {"beat": 1})
            self.members[0].hear(self.parent.report(), now)
            if causes := judge(list(self.members.values()), now, self.silence):
                self._end(causes)
                return
        for peer in self.peers:
            _send(peer, {"closing": 1})

    def _troubled(self) -> bool:
        return any(member.failure or member.state == "gone" for member in self.members.values())

    def _over(self) -> bool:
        """Everyone is done (a member's connection closes after that)."""
        return self.parent.state == "done" and all(member.state == "done" for member in self.members.values())

    def _serve(self, ready: Any, listener: socket.socket, now: float) -> None:
        if ready is listener:
            peer, _ = listener.accept()
            peer.settimeout(1)
            self.peers[peer] = (Lines(), None)
            self.selector.register(peer, selectors.EVENT_READ)
        elif ready == 0:
            self.parent.listen()
            if self.parent.state in ("gone", "done"):
                self.selector.unregister(0)
        else:
            self._hear(ready, now)

    def _hear(self, peer: socket.socket, now: float) -> None:
        lines, rank = self.peers[peer]
        try:
            part = peer.recv(65536)
            said = lines.feed(part)
        except (OSError, ValueError):
            part, said = b"", []
        for report in said:
            if rank is None:
                if report.get("token") != self.token:
                    part = b""
                    break
                rank = int(report["rank"])
                self.peers[peer] = (lines, rank)
                self.members[rank] = Member(rank, report["name"], now)
            self.members[rank].hear(report, now)
        if not part:
            self.selector.unregister(peer)
            del self.peers[peer]
            peer.close()
            if rank is not None:
                self.members[rank].hear({"state": "gone"}, now)

    def _end(self, causes: list[list[Any]]) -> None:
        """The verdict for everyone; rank 0 last."""
        verdict = {"verdict": causes}
        for peer in self.peers:
            _send(peer, verdict)
        end = time.monotonic() + LAST
        while self.peers and (left := end - time.monotonic()) > 0:
            for key, _ in self.selector.select(left):
                if key.fileobj == 0:
                    self.selector.unregister(0)
                elif key.fileobj in self.peers:
                    self._hear(key.fileobj, time.monotonic())  # type: ignore[arg-type]
        self.parent.tell(verdict)


def join(parent: Parent, rank: int, silence: float, address: tuple[str, int], token: str) -> None:
    """The sentinel of any other rank: report, and pass the verdict on."""
    try:
        hub = socket.create_connection(address, timeout=10)
    except OSError as error:
        parent.tell({"unreachable": str(error)})
        return
    hub.settimeout(2)
    _send(hub, {"token": token, "rank": rank, "name": _name(parent.pid)})
    parent.tell({"joined": 1})
    lines = Lines()
    selector = selectors.DefaultSelector()
    selector.register(hub, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    heard = before = time.monotonic()
    while True:
        ready = {key.fileobj for key, _ in selector.select(TICK)}
        now = time.monotonic()
        heard = now if now - before > silence / 2 else heard
        before = now
        if 0 in ready:
            parent.listen()
            if parent.state in ("gone", "done"):
                selector.unregister(0)
        parent.look()
        _send(hub, parent.report())
        if parent.state in ("gone", "done") and parent.failed is None:
            return
        if hub in ready:
            try:
                part = hub.recv(65536)
            except OSError:
                part = b""
            said = lines.feed(part)
            heard = now
            if verdict := next((line for line in said if "verdict" in line), None):
                parent.tell(verdict)
                return
            if any("closing" in line for line in said):
                return
            if not part:
                parent.tell({"verdict": [[0, address[0], "is gone, and its sentinel with it"]]})
                return
        elif now - heard >= silence:
            parent.tell({"verdict": [[0, address[0], f"has not been seen for {now - heard:.1f} s (nor has its host)"]]})
            return


def _name(pid: int) -> str:
    return f"{socket.gethostname()} pid {pid}"


def main(rank: str, pid: str, silence: str, how: str, *rest: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent; this process ends with it
    parent = Parent(int(pid))
    if how == "listen":
        host, token = rest
        Hub(parent, float(silence), host, token).run()
    else:
        host, port, token = rest
        join(parent, int(rank), float(silence), (host, int(port)), token)


if __name__ == "__main__":
    main(*sys.argv[1:])
