"""`should_stop`: one SIGTERM, the same step everywhere, and the handlers of both traps still run."""

import signal
import subprocess
import sys

import pytest

import shardax as sx
from shardax.cluster.signals import handler_address
from shardax.testing import start_processes
from shardax.testing.environment import child_environment

LOOP = """
import os, signal, sys, time

rank = int(os.environ["SHARDAX_RANK"])
mine = lambda number, frame: print("handler ran", flush=True)
if rank == 1:
    signal.signal(signal.SIGTERM, mine)          # before: JAX displaces it, it would never run
import shardax as sx

cluster = sx.initialize()
if rank == 2:
    earlier = signal.signal(signal.SIGTERM, mine)  # after: it displaces JAX's, nobody would hear of the preemption
for step in range(100_000):
    sx.barrier("step")
    time.sleep(0.02)
    if step == 5:
        print("at work", flush=True)
    if sx.should_stop(step):
        print("stopped at", step, flush=True)
        break
sx.barrier("saved")
"""


@pytest.mark.parametrize("odd", [0, 1, 2], ids=["no handler", "a handler before", "a handler after"])
def test_all_stop_at_the_same_step(odd):
    with start_processes(LOOP, 3) as running:
        running.wait_for("at work", timeout=120)
        running.signal(odd, signal.SIGTERM)
        done = running.finish(60)
    assert [one.returncode for one in done] == [0, 0, 0], done
    assert len({one.stdout.splitlines()[-1] for one in done}) == 1, done
    assert "stopped at" in done[0].stdout
    assert [("handler ran" in one.stdout) for one in done] == [odd == one.rank != 0 for one in done]


ALONE = """
import signal, sys, time
import shardax as sx

seen = []
def mine(number, frame):
    seen.append(number)
    if callable(earlier):
        earlier(number, frame)      # as a well-behaved handler does, even if that is ours

assert not sx.should_stop(0)
earlier = signal.signal(signal.SIGTERM, mine)
assert not sx.should_stop(1)
print("at work", flush=True)
while not sx.should_stop(2):
    time.sleep(0.01)
print("stopped", seen, flush=True)
while True:
    time.sleep(0.01)
"""


def test_alone_it_works_and_a_second_sigterm_ends_the_process():
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE], env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"stopped [{int(signal.SIGTERM)}]\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_a_step_is_a_whole_number(step):
    """JAX takes -1 for the step at which all have stopped, and says so at once."""
    with pytest.raises(sx.ClusterError, match="is no step"):
        sx.should_stop(step)
    with pytest.raises(sx.ClusterError, match="is no step"):
        sx.guard().step(step)


def test_the_c_handler_of_a_signal_can_be_read():
    earlier = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert handler_address(signal.SIGUSR2) > 1
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert handler_address(signal.SIGUSR2) == 1
    finally:
        signal.signal(signal.SIGUSR2, earlier)
    with pytest.raises(OSError, match="signal 9999"):
        handler_address(9999)


OFF = """
import jax
jax.config.update("jax_enable_preemption_service", False)
import shardax as sx
sx.initialize()
try:
    sx.should_stop(0)
except sx.ClusterError as error:
    print(error)
"""


def test_without_the_service_it_says_so():
    with start_processes(OFF, 1) as running:
        (done,) = running.finish(60)
    assert "jax_enable_preemption_service" in done.stdout, done
