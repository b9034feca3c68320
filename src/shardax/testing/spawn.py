"""Processes private to one test, which may be killed, stopped or started wrongly."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shardax.cluster.ports import ReservedPort, reserve_port
from shardax.testing.environment import child_environment, per_rank

Script = str | Path | Callable[[], Any]


@dataclass(frozen=True)
class Finished:
    """How one process ended. `returncode` is negative for a signal; None means it was still running and was killed."""

    rank: int
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@dataclass(eq=False)
class RunningProcesses:
    """The processes of one job; leaving the `with` block kills what is left of them."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[tuple[IO[bytes], IO[bytes]]]
    port: ReservedPort
    begun: float

    def __enter__(self) -> RunningProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for stdout, stderr in self.outputs:
            stdout.close()
            stderr.close()
        self.port.close()

    def kill(self, rank: int) -> None:
        """End one process at once, as the kernel does when memory runs out."""
        self.processes[rank].kill()

    def stop(self, rank: int) -> None:
        """Freeze one process: it lives, and answers nothing."""
        self.signal(rank, signal.SIGSTOP)

    def signal(self, rank: int, number: int) -> None:
        self.processes[rank].send_signal(number)

    def output(self, rank: int) -> str:
        """What a process has written so far, stdout first."""
        return "".join(_read(file) for file in self.outputs[rank])

    def wait_for(self, text: str, ranks: list[int] | None = None, timeout: float = 60.0) -> None:
        """Until these processes (all, if not said) have written `text`."""
        waiting = set(range(len(self.processes)) if ranks is None else ranks)
        end = time.monotonic() + timeout
        while waiting := {rank for rank in waiting if text not in self.output(rank)}:
            ended = [rank for rank in sorted(waiting) if self.processes[rank].poll() is not None]
            ended = [rank for rank in ended if text not in self.output(rank)]
            if ended or time.monotonic() > end:
                rank = (ended or sorted(waiting))[0]
                why = f"ended with {self.processes[rank].returncode}" if ended else f"did not in {timeout:.0f} s"
                raise AssertionError(f"rank {rank} should write {text!r} and {why}:\n{self.output(rank)}")
            time.sleep(0.05)

    def finish(self, timeout: float = 60.0) -> list[Finished]:
        """The end of every process, by rank; what still runs after `timeout` is killed and has returncode None."""
        end = time.monotonic() + timeout
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes) and time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - self.begun
            time.sleep(0.02)
        for rank, process in enumerate(self.processes):
            if rank not in ended:
                process.kill()
                process.wait()
        return [
            Finished(
                rank, process.returncode if rank in ended else None, _read(out), _read(err), ended.get(rank, timeout)
            )
            for rank, (process, (out, err)) in enumerate(zip(self.processes, self.outputs, strict=True))
        ]


def start_processes(
    script: Script,
    processes: int,
    devices: int | tuple[int, ...] | list[int] = 1,
    *,
    args: list[str] | None = None,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    address: str | None = None,
    prefix: Callable[[int], list[str]] | None = None,
) -> RunningProcesses:
    """Start private processes and return at once, so that the test can kill or stop one.

    `script` is a path, Python source, or a function without arguments whose body uses only what it imports itself.
    `sx.initialize()` without arguments finds rank, size and address in the environment that is set here; `env` adds
    variables, for all ranks or by rank; `prefix` puts a command in front of Python, by rank.
    """
    port = reserve_port()
    begun = time.monotonic()
    running = RunningProcesses([], [], port, begun)
    try:
        for rank, count in enumerate(per_rank(devices, processes)):
            extra = {
                "SHARDAX_COORDINATOR": address or port.address,
                "SHARDAX_PROCESSES": str(processes),
                "SHARDAX_RANK": str(rank),
                "JAX_NUM_CPU_DEVICES": str(count),
                **((env(rank) if callable(env) else env) or {}),
            }
            files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 — closed by __exit__
            running.outputs.append(files)
            command = [*(prefix(rank) if prefix else []), sys.executable, *_source(script), *(args or [])]
            running.processes.append(
                subprocess.Popen(
                    command, env=child_environment(extra), stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1]
                )
            )
    except BaseException:
        running.__exit__(None, None, None)
        raise
    return running


def run_processes(
    script: Script,
    processes: int,
    devices: int | tuple[int, ...] | list[int] = 1,
    timeout: float = 60.0,
    **options: Any,
) -> list[Finished]:
    """Run a script (or a function without arguments) in private processes to its end.

    >>> [done.stdout for done in run_processes("import os; print(os.environ['SHARDAX_RANK'])", 2)]
    ['0\\n', '1\\n']
    """
    with start_processes(script, processes, devices, **options) as running:
        return running.finish(timeout)


def _source(script: Script) -> list[str]:
    if isinstance(script, Path):
        return [str(script)]
    if isinstance(script, str):
        return ["-c", textwrap.dedent(script)]
    text = textwrap.dedent(inspect.getsource(script))
    return ["-c", f"{text}\n{script.__name__}()"]


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
