"""`initialize` in real processes: idempotent, with a table, time-outs that end waits, and errors before JAX can abort."""

import pytest

import shardax as sx
from shardax.testing import run_processes


def test_alone_it_does_nothing():
    cluster = sx.initialize()
    assert (cluster.rank, cluster.size, cluster.coordinator) == (0, 1, None)
    assert sx.initialize() == cluster
    sx.barrier("alone")
    assert len(sx.agree("alone", {"a": 1})) == 32
    assert str(cluster.table()).startswith("1 process, 8 devices")


def test_a_launcher_that_jax_does_not_know_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(sx.ClusterError, match="torchrun"):
        sx.initialize()


def test_every_wait_has_an_end_and_some_time_before_it():
    with pytest.raises(
        sx.ClusterError, match=r"initialization_timeout: '3' is no[\s\S]*heartbeat_timeout_seconds: 0 is"
    ):
        sx.initialize(initialization_timeout="3", heartbeat_timeout_seconds=0)
    for devices in (0, "8", True):
        with pytest.raises(sx.ClusterError, match="no number of simulated devices"):
            sx.simulate(devices)


def test_devices_touched_too_early_are_an_error_that_says_so():
    import jax

    jax.devices()
    with pytest.raises(sx.ClusterError, match=r"rank 1 has touched its devices before sx.initialize\(\)"):
        sx.initialize("127.0.0.1:1", 2, 1)


TWICE = """
import os
import shardax as sx

cluster = sx.initialize(show=True)
assert sx.initialize() == cluster
assert sx.initialize(num_processes=2) == cluster
try:
    sx.initialize(num_processes=5)
except sx.ClusterError as error:
    print(error)
import jax
assert jax.local_device_count() == 2
assert "--xla_cpu_collective_timeout_seconds=" in os.environ["XLA_FLAGS"]
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("first collective")
"""


def test_it_is_idempotent_and_shows_the_processes():
    for one in run_processes(TWICE, 2, devices=2, timeout=120):
        assert one.returncode == 0, one
        assert "cannot join one with num_processes=5 (it is 2)" in one.stdout
        assert ("2 processes, 4 devices" in one.stdout) == (one.rank == 0)
        if one.rank == 0:
            assert "rank  host" in one.stdout


HANG = """
import time
import shardax as sx

cluster = sx.initialize(collective_timeout_seconds=4)
import jax
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("first collective")
begun = time.monotonic()
if cluster.rank == 0:
    time.sleep(9)
else:
    try:
        multihost_utils.sync_global_devices("nobody else comes")
    except Exception as error:
        print("an exception after", round(time.monotonic() - begun), flush=True)
import os
os._exit(0)
"""


def test_a_collective_that_nobody_joins_is_an_exception():
    flags = {"XLA_FLAGS": ""}  # without the limit that the test environment sets
    done = run_processes(HANG, 2, env=flags, timeout=120)
    assert "an exception after" in done[1].stdout, done
    assert int(done[1].stdout.split()[-1]) < 9


PLAIN = """
import os
import jax
jax.distributed.initialize(os.environ["SHARDAX_COORDINATOR"], 2, int(os.environ["SHARDAX_RANK"]))
import shardax as sx
cluster = sx.initialize()
sx.barrier("adopted")
print(cluster.rank, cluster.size, sx.agree("value", 1))
"""


def test_a_job_that_jax_has_begun_is_adopted():
    done = run_processes(PLAIN, 2, timeout=120)
    assert [one.stdout.split()[:2] for one in done] == [["0", "2"], ["1", "2"]], done
