"""The caller's side of the process border: warm compiler processes that may crash, hang or talk without harm here."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from shardax.errors import CompilerError, CompilerTimeoutError, Offence

DEFAULT_TIMEOUT = 1800.0
MOST_IDLE = 2  # warm processes kept per kind; a compiler holds 0.3 to 2 GiB
CPU_SIZES = (256, 2048)  # simulated devices are counted at start-up; 2,048 take a second and 0.6 GiB

QUIET_TPU = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any: silences "Failed to find host bounds"
    "TPU_WORKER_HOSTNAMES": "localhost",  # silences "unexpected worker hostname"
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes at once, else its lock file refuses the second
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings are wanted: they name full rematerializations
    "TPU_MIN_LOG_LEVEL": "1",
}
_NOT_PASSED_ON = ("JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES")  # the latter wins over the count in XLA_FLAGS


def environment(platform: str, devices: int = 0) -> dict[str, str]:
    """The environment of a compiler process; the user's own XLA flags stay, device counts and dumps do not."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    dropped = ("--xla_force_host_platform_device_count", "--xla_dump")
    flags = [flag for flag in kept.pop("XLA_FLAGS", "").split() if not flag.startswith(dropped)]
    if platform == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": " ".join(flags),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # it cannot read back what it writes for absent devices
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "JAX_PLATFORMS": "cpu",  # a topology is all that is asked of an accelerator's plugin
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs no cuDNN of the right version
    }
    return kept | ours | (QUIET_TPU if platform == "tpu" else {})


class Worker:
    """One compiler process: `ask` sends a job and waits for the answer."""

    def __init__(self, platform: str, devices: int = 0) -> None:
        self.platform = platform
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile(prefix="shardax-compiler-")  # noqa: SIM115 (lives as long as the worker)
        ours, theirs = socket.socketpair()
        with theirs:
            call = f"from shardax.proving.compiler import serve; serve({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", call],
                env=environment(platform, devices),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches the caller, who then closes the worker
            )
        self._line = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        """Is the process still there?"""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, job: Mapping[str, Any], timeout: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """The answer to a job, with what the compiler wrote to its terminal meanwhile under "stderr"."""
        with self._lock:
            start = self._stderr.seek(0, os.SEEK_END)
            try:
                self._line.send(job)
                if not self._line.poll(timeout):
                    self.close()
                    raise CompilerTimeoutError(
                        f"the {self.platform} compiler did not answer within {timeout:g} s and was stopped",
                        _last_lines(self._said_since(start)),
                        "pass timeout=… seconds, or scan over layers instead of unrolling them",
                    )
                answer: dict[str, Any] = self._line.recv()
            except (EOFError, OSError) as error:
                if isinstance(error, CompilerTimeoutError):
                    raise
                raise self._crash(start) from error
            except BaseException:  # interrupted: the answer still to come must not be read by the next job
                self.close()
                raise
            return answer | {"stderr": self._said_since(start)}

    def _said_since(self, start: int) -> str:
        self._stderr.seek(start)
        return self._stderr.read().decode(errors="replace")

    def _crash(self, start: int) -> CompilerError:
        try:
            code = self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.close()
            code = self._process.returncode
        how = f"was killed by {_signal_name(-code)}" if code and code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (out of memory on this machine?)"
        return CompilerError(f"the {self.platform} compiler's process {how}", _last_lines(self._said_since(start)))

    def close(self) -> None:
        """Hang up and see the process off."""
        self._line.close()
        if self.alive:
            self._process.kill()
        self._process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(text: str, most: int = 12) -> list[Offence]:
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return [Offence("stderr", line) for line in lines[-most:]]


class WorkerPool:
    """Warm workers by kind; a busy one is never waited for, a dead one never handed out."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[Worker]] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @contextmanager
    def worker(self, platform: str, devices: int = 0) -> Generator[Worker]:
        """A worker for the `with` block: a warm one where there is one."""
        size = next((size for size in CPU_SIZES if size >= devices), devices) if platform == "cpu" else 0
        kind = (platform, size)
        worker = self._take(kind) or Worker(platform, size)
        try:
            yield worker
        finally:
            self._give(kind, worker)

    def _take(self, kind: tuple[str, int]) -> Worker | None:
        with self._lock:
            if self._owner != os.getpid():  # after a fork these processes are the parent's
                self._idle, self._owner = {}, os.getpid()
            waiting = self._idle.setdefault(kind, [])
            while waiting:
                worker = waiting.pop()
                if worker.alive:
                    return worker
        return None

    def _give(self, kind: tuple[str, int], worker: Worker) -> None:
        with self._lock:
            waiting = self._idle.setdefault(kind, [])
            if worker.alive and len(waiting) < MOST_IDLE:
                waiting.append(worker)
                return
        worker.close()

    def close(self) -> None:
        """End every idle worker."""
        with self._lock:
            if self._owner == os.getpid():
                for worker in [worker for waiting in self._idle.values() for worker in waiting]:
                    worker.close()
            self._idle = {}


POOL = WorkerPool()
atexit.register(POOL.close)
