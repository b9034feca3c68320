"""`@pytest.mark.processes`: real processes in step, failures with rank and traceback, bounded time."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardax.errors import ProcessesError
from shardax.testing.environment import child_environment
from shardax.testing.pool import SkippedInProcesses


@pytest.mark.processes(2, devices=2)
def test_a_marked_test_runs_in_every_process():
    assert jax.process_count() == 2
    assert jax.device_count() == 4
    assert jax.local_device_count() == 2


@pytest.mark.processes(4)
@pytest.mark.parametrize("scale", [1, 3])
def test_collectives_work_and_parameters_arrive(scale, tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    ours = np.full((1, 3), scale * (jax.process_index() + 1), np.float32)
    array = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), ours)
    total = jax.jit(lambda a: a.sum(0), out_shardings=NamedSharding(mesh, P()))(array)
    np.testing.assert_array_equal(total, scale * np.full(3, 10.0))
    assert tmp_path.is_dir()


@pytest.mark.processes(4)
class TestMethods:
    def test_of_a_class(self):
        multihost_utils.sync_global_devices("methods")


@pytest.mark.processes(3, devices=(2, 2, 1))
def test_uneven_devices():
    assert jax.device_count() == 5
    assert jax.local_device_count() == (2, 2, 1)[jax.process_index()]


def whoami(offset):
    return {"rank": jax.process_index() + offset, "sum": jnp.arange(3).sum()}


def fails_on_one():
    if jax.process_index() == 1:
        raise ValueError("a bad batch")
    multihost_utils.sync_global_devices("never")


def asserts():
    left, right = jax.process_count(), 5
    assert left == right


def dies():
    import os

    if jax.process_index() == 1:
        os._exit(9)
    time.sleep(60)


def sleeps():
    time.sleep(60 if jax.process_index() == 0 else 0)


def skips():
    pytest.skip("not on this machine")


def test_a_skip_in_every_process_is_a_skip(process_pool):
    with pytest.raises(SkippedInProcesses, match="not on this machine"):
        process_pool.run(skips, processes=2)
    assert process_pool.run(whoami, 0, processes=2)[1]["rank"] == 1


def test_a_pool_returns_values_by_rank(process_pool):
    results = process_pool.run(whoami, 10, processes=2)
    assert results == [{"rank": 10, "sum": 3}, {"rank": 11, "sum": 3}]
    assert [r["rank"] for r in process_pool.run(whoami, offset=0, processes=3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("function", "timeout", "says"),
    [
        (fails_on_one, 60, ["rank 1 failed", "ValueError: a bad batch", "rank 0 did not answer", "in fails_on_one"]),
        (asserts, 60, ["2 of 2 processes", "rank 0, 1 failed", "assert 2 == 5"]),
        (dies, 60, ["rank 1 failed", "exit code 9"]),
        (sleeps, 2, ["1 of 2 processes", "rank 0 did not answer", "in sleeps"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_failures_name_rank_and_place(process_pool, function, timeout, says):
    begun = time.monotonic()
    with pytest.raises(ProcessesError) as caught:
        process_pool.run(function, processes=2, timeout=timeout)
    for text in says:
        assert text in str(caught.value)
    assert time.monotonic() - begun < 45


def test_unpicklable_arguments_and_nested_functions_are_refused(process_pool):
    with pytest.raises(ProcessesError, match="0: generator does not pickle"):
        process_pool.run(whoami, (i for i in ()), processes=2)
    with pytest.raises(ValueError, match="top of its file"):
        process_pool.run(lambda: None, processes=2)


REFUSED = """
import unittest
import pytest

@pytest.mark.processes(0)
def test_none(): pass

@pytest.mark.processes(2, devices=0)
def test_no_device(): pass

@pytest.mark.processes(2, device=1)
def test_typo(): pass

@pytest.mark.processes(2)
async def test_coroutine(): pass

class Case(unittest.TestCase):
    @pytest.mark.processes(2)
    def test_method(self): pass
"""


def test_what_would_not_run_in_processes_fails(tmp_path):
    """Not one of these may pass: nothing would have run, or not where it was asked to."""
    (tmp_path / "test_refused.py").write_text(REFUSED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(
        command,
        env=child_environment({"PYTHONPATH": os.pathsep.join(sys.path)}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for words in (
        "processes=0 is no number of processes",
        "devices=0 is no number of devices",
        "processes(2, device=1): write processes(n, devices=1, timeout=120)",
        "a coroutine or a generator does not run in processes",
        "methods of plain classes, run in processes; this is another kind",
    ):
        assert words in ran.stdout, ran.stdout
    assert " passed" not in ran.stdout


def returns_a_generator():
    return (number for number in ())


def test_a_result_that_does_not_pickle_is_an_error_that_says_so(process_pool):
    with pytest.raises(ProcessesError, match="its result cannot be sent to the parent"):
        process_pool.run(returns_a_generator, processes=2)
