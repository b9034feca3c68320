"""Two real processes that train together; one is killed on the way, and the job goes on from its checkpoint."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardax.cluster.launch import launch
from shardax.errors import ClusterError, Offence

Losses = dict[int, float]
PROCESSES = 2
VICTIM = 1
LAST_LINES = 12


@dataclass(frozen=True)
class Run:
    """One life of the job: the losses by step, its exit code, and what a guard said of its end."""

    losses: Losses
    code: int
    last_words: str = ""

    @property
    def first_step(self) -> int:
        """The step it began with."""
        return min(self.losses)


@dataclass(frozen=True)
class Job:
    """What the processes train: the sizes of the model, the mesh over all their devices, and where checkpoints go."""

    mesh: str
    sizes: Mapping[str, int]
    steps: int
    folder: Path
    devices: int = 8

    @property
    def command(self) -> list[str]:
        """What each process runs."""
        model = json.dumps(dict(self.sizes))
        return ["-m", "shardax.demo.worker", self.mesh, model, str(self.steps), str(self.folder / "checkpoints")]

    @property
    def compiles_once(self) -> dict[str, str]:
        """The second life of the job runs what the first has compiled."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


def run_job(job: Job, on_step: Callable[[int, float], None], kill_after: int | None = None) -> Run:
    """Launch the processes; with `kill_after`, one of them gets SIGKILL once it has done that step."""
    output = _Output(on_step, kill_after)
    each = job.devices // PROCESSES
    code = launch(job.command, PROCESSES, each, env=job.compiles_once, grace=2, output=output)
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    killed = kill_after is not None and output.killed
    if code and not killed:
        lines = [Offence("", line) for line in output.lines[-LAST_LINES:]]
        raise ClusterError(f"the job of {PROCESSES} processes ended with exit code {code}", lines)
    return Run(output.losses, code, output.last_words)


class _Output(io.StringIO):
    """What the processes write, line by line, each with its rank in front."""

    def __init__(self, on_step: Callable[[int, float], None], kill_after: int | None) -> None:
        super().__init__()
        self.on_step, self.kill_after, self.killed = on_step, kill_after, False
        self.losses: Losses = {}
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}
        self.lock = threading.Lock()

    def write(self, text: str, /) -> int:
        for line in text.splitlines():
            with self.lock:
                self._read(line)
        return len(text)

    def _read(self, line: str) -> None:
        label, _, said = line.partition("] ")
        if not said.startswith("{"):
            self.lines += [line] if said and "[Gloo]" not in said else []
            return
        rank, facts = int(label.strip("[ ")), json.loads(said)
        if "pid" in facts:
            self.pids[rank] = facts["pid"]
        elif rank == 0:
            self.losses[facts["step"]] = facts["loss"]
            self.on_step(facts["step"], facts["loss"])
        elif rank == VICTIM and facts["step"] == self.kill_after:
            self.killed = True
            os.kill(self.pids[VICTIM], signal.SIGKILL)

    @property
    def last_words(self) -> str:
        """What the survivor said of the other's end."""
        said = [line.partition("] ")[2] for line in self.lines]
        return next((line for line in said if line.startswith(f"shardax guard: rank {VICTIM}")), "")
