"""`sx.initialize()` without arguments under a real SLURM and a real Open MPI."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardax.testing.environment import child_environment

# Loaded by its file: test folders are no packages.
_spec = importlib.util.spec_from_file_location("shardax_test_slurm", Path(__file__).with_name("slurm.py"))
slurm_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = slurm_module
_spec.loader.exec_module(slurm_module)

JOB = """
import os, sys
import shardax as sx

cluster = sx.initialize(initialization_timeout=90)
import jax
import numpy as np
from jax.experimental import multihost_utils

total = int(multihost_utils.process_allgather(np.array([cluster.rank])).sum())
digest = sx.agree("settings", {"batch": 32})
sys.stdout.write(f"rank {cluster.rank} of {cluster.size} devices {jax.device_count()} sum {total}\\n")  # at once
with sx.guard() as guard:
    guard.step(4)
    if "fail" in sys.argv and cluster.rank == 2:
        raise ValueError("on purpose")
    sx.barrier("end", 60 if "fail" not in sys.argv else 30)
"""

EVERYONE = [f"rank {rank} of 4 devices 4 sum 6" for rank in range(4)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if (why := slurm_module.missing()) is not None:
        pytest.skip(why)
    here = slurm_module.Slurm(tmp_path_factory.mktemp("slurm"), [])
    try:
        here.start()
        yield here
    finally:
        here.stop()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def run(command, env, timeout=150):
    return subprocess.run(
        command, env=child_environment(env), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def ranks_said(done):
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


def test_slurm_without_arguments(slurm, script):
    done = run(["srun", "-n", "4", sys.executable, str(script)], slurm.environment)
    assert done.returncode == 0, done.stderr + slurm.log()
    assert ranks_said(done) == EVERYONE


def test_slurm_ends_with_the_guard(slurm, script):
    done = run(["srun", "-n", "4", sys.executable, str(script), "fail"], slurm.environment)
    assert done.returncode == 70, done.stderr + slurm.log()
    assert done.stderr.count("shardax guard: rank 2 of 4") >= 3, done.stderr
    assert "at step 4: ValueError: on purpose" in done.stderr


def test_a_slurm_batch_script_without_srun_is_told_to_use_it(slurm, tmp_path):
    """Python started directly in a batch script: SLURM says 4 tasks, and one process is there."""
    batch, output = tmp_path / "batch.sh", tmp_path / "output"
    code = "import shardax as sx; sx.initialize(initialization_timeout=3)"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
    done = run(["sbatch", "--wait", "-n", "4", "-o", str(output), str(batch)], slurm.environment)
    assert done.returncode == 1, done.stderr + slurm.log()
    assert "this process does not know its place in the job" in output.read_text()
    assert "start it with srun" in output.read_text()


def test_open_mpi_without_arguments(script):
    if shutil.which("mpirun") is None:
        pytest.skip("not installed: mpirun (Debian: openmpi-bin)")
    version = run(["mpirun", "--version"], {}).stdout.splitlines()[0].split()[-1]
    if int(version.split(".")[0]) > 4 and not importlib.util.find_spec("mpi4py"):
        pytest.skip(f"Open MPI {version} is detected by jax with mpi4py only, which is not installed")
    local = ["--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,vader"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", "-np", "4", "--oversubscribe", *root, *local, sys.executable, str(script)]
    done = run(command, {})
    assert done.returncode == 0, done.stderr
    assert ranks_said(done) == EVERYONE
