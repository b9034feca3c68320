"""`launch`: a job of N processes on this machine, with their output in one place and one end.

python -m shardax.cluster.launch -n 4 --devices 2 train.py --steps 10
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from shardax.cluster.detect import COORDINATOR, JOB, PROCESSES, RANK
from shardax.cluster.ports import reserve_port
from shardax.errors import ClusterError

GRACE_SECONDS = 5.0
"""How long the others have to end by themselves (a guard needs 3 s), and after SIGTERM again."""


@dataclass(frozen=True)
class _Process:
    rank: int
    popen: subprocess.Popen[str]
    reader: threading.Thread


def launch(
    argv: str | Path | Sequence[str | Path],
    processes: int,
    devices: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE_SECONDS,
    output: TextIO | None = None,
) -> int:
    """Run a script or a command (`["train.py", "--steps", "10"]`) as N processes; the first failure's exit code, or 0.

    `sx.initialize()` in the script finds its place. With `devices` each process has that many simulated CPU devices.
    Every line of output has its rank in front. When one process fails the others get `grace` seconds, then SIGTERM,
    then SIGKILL; Ctrl-C and SIGTERM are passed on to all. A death by signal n counts as exit code 128 + n, and so does
    a job that Ctrl-C has ended.

    >>> import io
    >>> output = io.StringIO()
    >>> launch(["-c", "print('hello')"], processes=2, output=output)
    0
    >>> sorted(output.getvalue().splitlines())
    ['[0] hello', '[1] hello']
    """
    if processes < 1:
        raise ClusterError(f"cannot launch {processes} processes", remedy="at least 1")
    if devices is not None and devices < 1:
        raise ClusterError(f"cannot simulate {devices} devices", remedy="at least 1, or None for the real ones")
    command = _command([os.fspath(part) for part in ([argv] if isinstance(argv, (str, Path)) else argv)])
    sink = output or sys.stdout
    port = reserve_port()
    job = {COORDINATOR: port.address, PROCESSES: str(processes), JOB: uuid.uuid4().hex[:12], **_simulated(devices)}
    shared = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), "PYTHONUNBUFFERED": "1", **job}
    started: list[_Process] = []
    try:
        with _Forwarding(started) as forwarding:
            for rank in range(processes):
                started.append(_start(command, {**shared, RANK: str(rank), **(env or {})}, rank, processes, sink))
            first = _follow(started, grace)
        if first is None:
            return 0
        return 128 + signal.SIGINT if forwarding.interrupted else _say_who_failed(first, processes, sink)
    finally:
        for process in started:
            if process.popen.poll() is None:
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
            process.reader.join(2)
        port.close()


def _command(argv: Sequence[str]) -> list[str]:
    """A script or `-m module` runs under this Python; anything else is a program."""
    if not argv:
        raise ClusterError("nothing to launch", remedy="give a script and its arguments")
    python = argv[0].endswith(".py") or argv[0] in ("-m", "-c")
    return [sys.executable, *argv] if python else list(argv)


def _simulated(devices: int | None) -> dict[str, str]:
    if devices is None:
        return {}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": " ".join(flags)}


def _start(command: list[str], env: dict[str, str], rank: int, processes: int, sink: TextIO) -> _Process:
    """In a process group of its own: Ctrl-C comes once, passed on, and not from the terminal as well."""
    try:
        popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        raise ClusterError(
            f"cannot run {command[0]!r}: {error.strerror}", remedy="give a script or a program"
        ) from None
    assert popen.stdout is not None
    label = f"[{rank:>{len(str(processes - 1))}}] "
    reader = threading.Thread(target=_prefix, args=(popen.stdout, label, sink), daemon=True)
    reader.start()
    return _Process(rank, popen, reader)


def _prefix(stream: IO[str], label: str, sink: TextIO) -> None:
    for line in stream:
        sink.write(f"{label}{line.removesuffix(chr(10))}\n")
        sink.flush()


def _follow(started: list[_Process], grace: float) -> _Process | None:
    """Wait for all; end the rest after the first failure, which is returned."""
    first: _Process | None = None
    deadline = 0.0
    escalation = [signal.SIGTERM, signal.SIGKILL]
    while running := [process for process in started if process.popen.poll() is None]:
        if first is None and (first := _failed(started)) is not None:
            deadline = time.monotonic() + grace
        if first is not None and escalation and time.monotonic() > deadline:
            number = escalation.pop(0)
            for process in running:
                if number == signal.SIGKILL:
                    os.killpg(process.popen.pid, number)  # and what it has started
                else:
                    process.popen.send_signal(number)
            deadline = time.monotonic() + grace
        time.sleep(0.05)
    return first or _failed(started)


def _say_who_failed(first: _Process, processes: int, sink: TextIO) -> int:
    """The exit code of the first failure, after a line about it."""
    first.reader.join(2)
    code = first.popen.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    sink.write(f"shardax launch: rank {first.rank} of {processes} {how}, before the others\n")
    sink.flush()
    return code if code > 0 else 128 - code


def _failed(started: list[_Process]) -> _Process | None:
    return next((process for process in started if process.popen.poll() not in (None, 0)), None)


class _Forwarding:
    """While open, SIGTERM and SIGINT to the launcher go to all processes (a preemption notice reaches everyone)."""

    def __init__(self, children: list[_Process]) -> None:
        self._children = children
        self._earlier: dict[int, object] = {}
        self.interrupted = False  # by Ctrl-C: then nobody failed

    def __enter__(self) -> _Forwarding:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.interrupted |= number == signal.SIGINT and not any(child.popen.poll() for child in self._children)
        for child in self._children:
            if child.popen.poll() is None:
                child.popen.send_signal(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: `python -m shardax.cluster.launch -n 4 script.py …`."""
    parser = argparse.ArgumentParser(
        prog="python -m shardax.cluster.launch", description="N processes of a script here"
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument("--devices", type=int, help="simulated CPU devices of each (default: the real devices)")
    parser.add_argument("--grace", type=float, default=GRACE_SECONDS, help="seconds for the rest after a failure")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    parsed = parser.parse_args(arguments)
    return launch(parsed.command, parsed.processes, parsed.devices, grace=parsed.grace)


if __name__ == "__main__":
    sys.exit(main())
