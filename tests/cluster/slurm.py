"""A SLURM of one node, private to a test session: its own key, configuration, ports and daemons, all on loopback."""

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from shardax.cluster.ports import reserve_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv")

CONFIGURATION = """
ClusterName=shardax
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no SLURM here."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@dataclass
class Slurm:
    folder: Path
    daemons: list[subprocess.Popen]

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def log(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        with_ports = [reserve_port(), reserve_port()]
        controller, node = (port.number for port in with_ports)
        for port in with_ports:
            port.close()
        text = CONFIGURATION.format(
            controller=controller, node=node, folder=self.folder, host=socket.gethostname().split(".")[0]
        )
        (self.folder / "slurm.conf").write_text(text)
        here = self.folder
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={here}/munge.socket",
            f"--pid-file={here}/munge.pid", f"--log-file={here}/munge.log", f"--seed-file={here}/munge.seed",
        )  # fmt: skip
        self._until("munge's socket", (here / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D", "-N", "localhost")
        self._until("an idle node", lambda: "State=IDLE" in self._control("show", "node", "localhost"))

    def _daemon(self, name: str, *arguments: str) -> None:
        with_us = ["setpriv", "--pdeathsig", "KILL"]  # a test session that is killed leaves no SLURM behind
        with (self.folder / f"{name}.out.log").open("w") as out:
            self.daemons.append(
                subprocess.Popen(
                    [*with_us, str(_program(name)), *arguments],
                    env={**os.environ, **self.environment},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _control(self, *arguments: str) -> str:
        done = subprocess.run(
            ["scontrol", *arguments], env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30
        )
        return done.stdout

    def _until(self, what: str, reached, seconds: float = 40) -> None:
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} in {seconds} s:\n{self.log()}")
            time.sleep(0.2)

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
