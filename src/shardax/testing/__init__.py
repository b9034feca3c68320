"""Tests in several real processes: the marker `@pytest.mark.processes(4, devices=2)`, a pool, and private processes.

Every test of a suite that is marked runs in the same pool of processes, started once; a test that kills or stops its
processes starts its own with `run_processes`.
"""

from shardax.testing.pool import ProcessPool as ProcessPool
from shardax.testing.spawn import Finished as Finished
from shardax.testing.spawn import RunningProcesses as RunningProcesses
from shardax.testing.spawn import run_processes as run_processes
from shardax.testing.spawn import start_processes as start_processes
