"""`guard`: a process that raises, exits, is killed or is stopped ends the job with its rank, step and error on every rank."""

import signal
import time

import pytest

import shardax as sx
from shardax.cluster.guard import EXIT_CODE
from shardax.cluster.sentinel import Member, judge
from shardax.testing import run_processes, start_processes

LOOP = """
import sys, time
import shardax as sx

cluster = sx.initialize(initialization_timeout=90, collective_timeout_seconds=60)
import jax
from jax.experimental import multihost_utils

how, odd = sys.argv[1], int(sys.argv[2])

def train(guard):
    for step in range(100_000):
        guard.step(step)
        multihost_utils.sync_global_devices(f"step {step}")
        if step == 3:
            print("at work", flush=True)
        if step == 5 and cluster.rank == odd and how == "raise":
            raise ValueError("a bad batch")
        if step == 5 and cluster.rank == odd and how == "exit":
            sys.exit(3)
        time.sleep(0.05)

if how == "raise":
    train(sx.guard())        # the call alone: an uncaught exception is enough
else:
    with sx.guard() as guard:
        train(guard)
"""

# The promise is 3 s; these machines may be loaded beyond it.
SECONDS = 15


def check(done, odd, words, victim_code=EXIT_CODE):
    for one in done:
        assert one.returncode == (victim_code if one.rank == odd else EXIT_CODE), one
        if one.rank != odd or victim_code == EXIT_CODE:
            assert f"shardax guard: rank {odd} of 3" in one.stderr, one
            assert words in one.stderr, one
            assert f"this is rank {one.rank} at step" in one.stderr


@pytest.mark.parametrize(
    ("how", "odd", "words"),
    [("raise", 1, "at step 5: ValueError: a bad batch"), ("exit", 0, "failed at step 5: SystemExit: 3")],
)
def test_a_process_that_raises_or_exits_ends_all_with_its_error(how, odd, words):
    with start_processes(LOOP, 3, args=[how, str(odd)]) as running:
        running.wait_for("at work", timeout=120)
        begun = time.monotonic()
        done = running.finish(60)
    check(done, odd, words)
    assert time.monotonic() - begun < SECONDS
    assert "Traceback" in done[odd].stderr


@pytest.mark.parametrize("odd", [2, 0], ids=["a worker", "the coordinator"])
def test_a_killed_process_is_named_by_the_others(odd):
    with start_processes(LOOP, 3, args=["loop", "-1"]) as running:
        running.wait_for("at work", timeout=120)
        running.kill(odd)
        begun = time.monotonic()
        done = running.finish(60)
    check(done, odd, "was killed, or left without a word, at step", -signal.SIGKILL)
    assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize("odd", [1, 0], ids=["a worker", "the coordinator"])
def test_a_stopped_process_is_named_by_the_others(odd):
    with start_processes(LOOP, 3, args=["loop", "-1"]) as running:
        running.wait_for("at work", timeout=120)
        running.stop(odd)
        begun = time.monotonic()
        running.wait_for("it leaves with exit code", [rank for rank in range(3) if rank != odd], timeout=60)
        assert time.monotonic() - begun < SECONDS + 3
        running.signal(odd, signal.SIGCONT)  # when it wakes it hears the verdict, too
        done = running.finish(60)
    for one in done:
        assert one.returncode == EXIT_CODE, one
        assert f"rank {odd} of 3" in one.stderr
        assert "has been stopped for" in one.stderr


BUSY = """
import time
import shardax as sx

cluster = sx.initialize(initialization_timeout=90)
with sx.guard(silence=1.0) as guard:
    sx.barrier("begin")
    if cluster.rank == 1:
        sum(range(150_000_000))  # seconds in C: holds the interpreter's lock
    sx.barrier("end", 120)
if cluster.rank == 0:
    time.sleep(2)  # whoever is done is not watched any more
print("fine")
"""


def test_a_process_that_holds_the_interpreter_is_not_taken_for_dead():
    for one in run_processes(BUSY, 2, timeout=150):
        assert (one.returncode, one.stdout) == (0, "fine\n"), one


AGAIN = """
import time
import shardax as sx

cluster = sx.initialize(initialization_timeout=90)
if cluster.rank == 2:
    time.sleep(1.5)  # rank 0 is done before this one comes
with sx.guard():
    pass
with sx.guard():  # another one, at another address
    sx.barrier("second")
with sx.guard():
    with sx.guard():  # a library's, inside: it does not end the one outside
        sx.barrier("inner")
    if cluster.rank == 1:
        raise ValueError("after the inner one")
    time.sleep(60)
"""


def test_a_job_may_have_several_guards_one_after_another_and_one_inside_another():
    for one in run_processes(AGAIN, 3, timeout=90):
        assert one.returncode == EXIT_CODE, one
        assert "rank 1 of 3" in one.stderr and "ValueError: after the inner one" in one.stderr, one


EARLY = """
import time
import shardax as sx

cluster = sx.initialize(initialization_timeout=90)
sx.barrier("begin")
if cluster.rank == 2:
    time.sleep(1.2)  # the verdict is spoken before this one has come
with sx.guard():
    if cluster.rank == 1:
        raise ValueError("at once")
    time.sleep(60)
"""


def test_a_process_that_comes_after_the_verdict_hears_it():
    for one in run_processes(EARLY, 3, timeout=90):
        assert one.returncode == EXIT_CODE, one
        assert "rank 1 of 3" in one.stderr and "ValueError: at once" in one.stderr, one


def test_a_guard_that_would_not_guard_is_refused():
    with pytest.raises(sx.ClusterError, match=r"silence: 0\.1: it is at least 1 s[\s\S]*exit_code: 0 is no failure"):
        sx.guard(silence=0.1, exit_code=0)


def test_alone_a_guard_lets_exceptions_through():
    with pytest.raises(ZeroDivisionError), sx.guard() as guard:
        guard.step(1)
        1 / 0


def member(rank=1, heard=10.0, **facts):
    return Member(rank, f"host{rank}", heard, "step 8", **facts)


@pytest.mark.parametrize(
    ("members", "causes"),
    [
        ([member()], []),
        ([member(state="done", heard=0.0)], []),
        ([member(heard=6.0)], ["has not been seen for 4.0 s, last at step 8"]),
        ([member(state="stopped", stopped_since=9.0)], []),
        ([member(state="stopped", stopped_since=6.0)], ["has been stopped for 4.0 s, at step 8"]),
        ([member(state="gone", heard=9.5)], ["was killed, or left without a word, at step 8"]),
        ([member(failure="E: x", failed_at=9.95)], []),  # settling: others may fail in the same moment
        ([member(failure="E: x", failed_at=9.5)], ["failed at step 8: E: x"]),
        # A collective that broke is the consequence of a death, not a cause beside it.
        ([member(failure="gloo", weak=True, failed_at=9.0), member(2, 9.5, state="gone")], ["was killed, or left without a word, at step 8"]),
        ([member(failure="gloo", weak=True, failed_at=9.5)], []),
        ([member(failure="gloo", weak=True, failed_at=8.5)], ["failed at step 8: gloo"]),
    ],
)  # fmt: skip
def test_verdicts(members, causes):
    assert [text for _, _, text in judge(members, 10.0, 3.0)] == causes
