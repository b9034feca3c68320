"""A pool of real processes that runs many functions in step: started once, reshaped to another world when asked."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any

from shardax.cluster.ports import ReservedPort, reserve_port
from shardax.errors import Offence, ProcessesError, plural
from shardax.testing.environment import child_environment, per_rank
from shardax.testing.functions import address_of

GRACE_SECONDS = 5.0
"""How long the others may go on once one process has failed: they probably wait for it in a collective."""


@dataclass(eq=False)
class _Worker:
    """The parent's end of one process."""

    pipe: Connection
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    @staticmethod
    def start() -> _Worker:
        ours, theirs = Pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as the process
        path = [entry for entry in sys.path if entry]
        process = subprocess.Popen(
            [sys.executable, "-m", "shardax.testing.worker", str(theirs.fileno())],
            env=child_environment({"PYTHONPATH": os.pathsep.join(path)}),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        return _Worker(ours, process, log)

    def send(self, verb: str, content: object) -> None:
        with suppress(OSError):  # it is dead: reading from it says so, with its output
            self.pipe.send((verb, content))

    def answer(self) -> tuple[str, Any]:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return "failed", f"the process died with exit code {self.process.wait(10)}"

    def written(self, start: int) -> str:
        # A file of the parent's own description: its offset does not move the child's.
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def size_of_log(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def where(self) -> str:
        """The Python stack of a process that does not answer."""
        start = self.size_of_log()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        return self.written(start).strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.log.close()


@dataclass(eq=False)
class ProcessPool:
    """Real processes with simulated CPU devices, each function run in all of them at once.

    The operating system's processes are started once and used again: for another number of processes or devices the
    JAX runtime inside them is shut down and initialised anew (about a second). After a failure they are all replaced.

        pool = ProcessPool()
        ranks = pool.run(jax.process_index, processes=4, devices=2)
        pool.close()
    """

    grace: float = GRACE_SECONDS
    _workers: list[_Worker] = field(default_factory=list)
    _world: tuple[int, ...] = ()
    _port: ReservedPort | None = None

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        processes: int,
        devices: int | tuple[int, ...] | list[int] = 1,
        timeout: float = 120.0,
        **named: Any,
    ) -> list[Any]:
        """What `function` returns in each process, by rank; jax arrays come back as NumPy arrays.

        Raises `ProcessesError` with the rank, the traceback and the output of every process that fails, and with the
        place where the others wait for it.
        """
        address, packed = address_of(function), _pack(arguments, named)
        self._become(per_rank(devices, processes))
        return self._all("call", [(address, packed)] * processes, timeout)

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.kill()
        self._workers, self._world = [], ()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _become(self, world: tuple[int, ...]) -> None:
        if world == self._world:
            return
        if self._world:
            self._all("leave", [None] * len(self._world), 60)
        while len(self._workers) < len(world):
            self._workers.append(_Worker.start())
        if self._port is not None:
            self._port.close()
        self._port, self._world = reserve_port(), world
        self._all(
            "join",
            [
                {"coordinator": self._port.address, "processes": len(world), "rank": rank, "devices": count}
                for rank, count in enumerate(world)
            ],
            180,
        )

    def _all(self, verb: str, contents: Iterable[object], timeout: float) -> list[Any]:
        members = self._workers[: len(self._world)]
        starts = [worker.size_of_log() for worker in members]
        for worker, content in zip(members, contents, strict=True):
            worker.send(verb, content)
        answers = self._collect(members, timeout)
        if all(answer is not None and answer[0] == "done" for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        skipped = [answer[1] for answer in answers if answer is not None and answer[0] == "skipped"]
        if len(skipped) == len(members):
            raise SkippedInProcesses(skipped[0])
        try:
            raise _error(members, answers, starts, timeout)
        finally:
            self.close()

    def _collect(self, members: list[_Worker], timeout: float) -> list[tuple[str, Any] | None]:
        """The answer of each process, or None for one that had none in time."""
        answers: list[tuple[str, Any] | None] = [None] * len(members)
        waiting = {worker.pipe: rank for rank, worker in enumerate(members)}
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                answers[rank] = answer = members[rank].answer()
                if answer[0] != "done":
                    end = min(end, time.monotonic() + self.grace)
        return answers


class SkippedInProcesses(Exception):
    """Every process skipped the test, for this reason."""


def _pack(arguments: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((arguments, named))
    except Exception as error:
        every = {**dict(enumerate(arguments)), **named}
        offences = [
            Offence(str(key), f"{type(value).__name__} does not pickle")
            for key, value in every.items()
            if not _pickles(value)
        ]
        raise ProcessesError("an argument cannot be sent to other processes", offences, str(error)) from error


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 — pickling may raise anything
        return False
    return True


def _error(
    members: list[_Worker], answers: list[tuple[str, Any] | None], starts: list[int], timeout: float
) -> ProcessesError:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (worker, answer, start) in enumerate(zip(members, answers, starts, strict=True)):
        if answer is None:
            output = worker.written(start)
            kind, text = "did not answer", f"it stands at\n{worker.where()}"
        elif answer[0] == "done":
            continue
        else:
            (kind, text), output = answer, worker.written(start)
        text = text.rstrip() + _tail(output)
        groups.setdefault((kind, text), []).append(rank)
    offences = [
        Offence(f"rank {', '.join(map(str, ranks))} {kind}", f"\n{_indent(text)}")
        for (kind, text), ranks in groups.items()
    ]
    bad = sum(map(len, groups.values()))
    return ProcessesError(f"{bad} of {plural(len(members), 'process', 'processes')} failed", offences)


def _tail(output: str, lines: int = 30) -> str:
    kept = [line for line in output.splitlines() if line.strip()][-lines:]
    return "\n--- its output ---\n" + "\n".join(kept) if kept else ""


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
