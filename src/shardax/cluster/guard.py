"""`guard`: when one process raises, is killed or freezes, every process says which, where and why, and leaves.

Without it the others wait in a collective until a time-out, and then JAX aborts them from C++.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, SupportsIndex

from jax.errors import JaxRuntimeError

from shardax._compat import distributed_place
from shardax.cluster import sentinel
from shardax.cluster.kv import JobCounts, Store, job_store
from shardax.cluster.progress import PROGRESS
from shardax.cluster.ranks import show_ranks
from shardax.cluster.signals import AbortHandler
from shardax.errors import ClusterError, Offence

EXIT_CODE = 70
"""What every process leaves with once one of them has failed (EX_SOFTWARE)."""

SHORTEST = 1.0
"""A shorter silence would be that of a process that is merely slow."""

CONSEQUENCES = ("gloo", "coordination service", "nccl", "connection closed by peer")
"""Words of errors that follow from another process's end."""


@dataclass(eq=False)
class Guard:
    """A running guard; made by `guard()`. Without other processes it does nothing."""

    store: Store | None
    exit_code: int
    _child: subprocess.Popen[bytes] | None = None
    _answers: IO[bytes] | None = None
    _abort: AbortHandler | None = None
    _earlier_hook: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _holders: int = 0

    def step(self, number: SupportsIndex) -> None:
        """This process is now at this step; `sx.should_stop(step)` says so, too."""
        PROGRESS.reach(number)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._child is not None and error is not None and not _is_clean_exit(error):
            traceback.print_exception(error)
            self._fail(error)
        self._holders -= 1
        if self._holders <= 0:  # whoever holds it further out is still watched
            self.close()

    def close(self) -> None:
        """This process is done: what it does from here on is not watched."""
        if self._child is None:
            return
        self._tell({"done": 1})
        PROGRESS.follower = None
        sys.excepthook = self._earlier_hook
        if self._abort is not None:
            self._abort.remove()
        self._child = None
        _running.pop("guard", None)

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _start(self, silence: float) -> None:
        assert self.store is not None
        started = _started.of(self.store)
        started["guard"] += 1  # a job may have several guards, one after another
        key = f"guard/{started['guard']}"
        where, first = _meeting_point(self.store, key)
        command = [sys.executable, "-I", "-S", str(sentinel.__file__), str(self.store.rank), str(os.getpid())]
        self._child = subprocess.Popen(
            [*command, str(silence), *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        self._answers = self._child.stdout
        said = self._read()
        if first not in said:
            self._child.kill()
            hub = "" if self.store.rank == 0 else f" of rank 0 at {':'.join(where[1:3])}"
            why = said.get("unreachable", "its sentinel ended at once")
            raise ClusterError(f"rank {self.store.rank} cannot join the guard{hub}: {why}")
        if self.store.rank == 0:
            self.store.put(key, json.dumps([said["port"], where[2]]))
        PROGRESS.follower = lambda step: self._tell({"step": step})
        self._earlier_hook, sys.excepthook = sys.excepthook, self._hook
        self._abort = AbortHandler(self._aborted)
        self._abort.install()
        threading.Thread(target=self._watch, daemon=True, name="shardax guard").start()

    def _tell(self, message: dict[str, Any]) -> None:
        child = self._child
        if child is None or child.stdin is None:
            return
        try:
            child.stdin.write(json.dumps(message).encode() + b"\n")
        except (BlockingIOError, BrokenPipeError):
            return  # a step that is not told is told by the next one; a sentinel that is gone was reported

    def _read(self) -> dict[str, Any]:
        assert self._answers is not None
        line = b""
        while not line.endswith(b"\n") and (part := self._answers.read(1)):
            line += part
        return json.loads(line) if line.endswith(b"\n") else {}

    # ---- ending -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the verdict; it is the same on every rank."""
        said = self._read()
        if "verdict" in said:
            self._leave(said["verdict"])
        elif self._child is not None:
            _say("shardax guard: its sentinel has ended; failures of other ranks will not be noticed any more")

    def _hook(self, kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        self._earlier_hook(kind, error, at)
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tell the others of this process's error; the verdict that comes back ends it, like them."""
        text = "".join(traceback.format_exception_only(error)).strip()
        frames = traceback.extract_tb(error.__traceback__)
        place = f'\n    File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}' if frames else ""
        weak = isinstance(error, (JaxRuntimeError, ValueError)) and any(word in text.lower() for word in CONSEQUENCES)
        self._tell({"failed": text[:4000] + place, "weak": weak})
        time.sleep(sentinel.SETTLE_WEAK + sentinel.LAST + 1)
        self._leave([])

    def _aborted(self) -> None:
        """C++ is ending this process; the cause, if it is another rank's, is already on its way."""
        self._tell({"failed": "the JAX runtime aborted; its reason stands in this rank's log", "weak": True})
        time.sleep(sentinel.SETTLE_WEAK + 1)
        self._leave([])

    def _leave(self, causes: list[list[Any]]) -> None:
        with self._lock:
            rank, size, _ = distributed_place()
            groups: dict[str, list[tuple[int, str]]] = {}
            for other, name, text in causes:
                groups.setdefault(text, []).append((other, name))
            for text, who in groups.items():
                names = f" ({who[0][1]})" if len(who) == 1 else ""
                _say(f"shardax guard: {show_ranks(r for r, _ in who)} of {size}{names} {text}")
            _say(f"shardax guard: this is rank {rank} at {PROGRESS}; it leaves with exit code {self.exit_code}")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self.exit_code)


_running: dict[str, Guard] = {}
_started = JobCounts()


def guard(*, silence: float = 3.0, exit_code: int = EXIT_CODE) -> Guard:
    """Watch over all processes of the job from here on; every process calls it, after `sx.initialize()`.

    If one raises, is killed, or is not seen for `silence` seconds, every process writes which rank that was, at which
    step and with which error, and leaves with `exit_code`. Use it as a context manager (then `sys.exit` in the middle
    counts as a failure, too) or call it once. A process alone is left alone.

        with sx.guard() as guard:
            for step in range(steps):
                guard.step(step)
                train(step)
    """
    _check(silence, exit_code)
    held = _running.get("guard")
    if held is None:
        held = Guard(job_store(), exit_code)
        if held.store is not None:
            held._start(silence)  # pyright: ignore[reportPrivateUsage]
            _running["guard"] = held
            atexit.register(held.close)
    held._holders += 1  # pyright: ignore[reportPrivateUsage]
    return held


def _check(silence: object, exit_code: object) -> None:
    wrong: list[Offence] = []
    if isinstance(silence, bool) or not isinstance(silence, (int, float)) or not silence >= SHORTEST:
        wrong.append(Offence("silence", f"{silence!r}: it is at least {SHORTEST:g} s, processes report every 0.5 s"))
    if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 0 < exit_code < 256:
        wrong.append(Offence("exit_code", f"{exit_code!r} is no failure: it is one of 1 … 255"))
    if wrong:
        raise ClusterError("this guard would not guard", wrong)


def _meeting_point(store: Store, key: str) -> tuple[list[str], str]:
    """How the sentinel of this rank starts, and the first word expected from it."""
    _, _, coordinator = distributed_place()
    host = str(coordinator).rpartition(":")[0].strip("[]")
    local = host in ("localhost", "::1") or host.startswith("127.")
    if store.rank == 0:
        return ["listen", "127.0.0.1" if local else "", secrets.token_hex(16), str(store.size)], "port"
    found = store.wait(key, 60)
    if found is None:
        raise ClusterError("rank 0 has not called sx.guard() within 60 s", remedy="call it in every process")
    port, token = json.loads(found)
    return ["join", "127.0.0.1" if local else host, str(port), token], "joined"


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _say(text: str) -> None:
    os.write(2, text.encode() + b"\n")
