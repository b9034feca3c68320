"""The meeting before JAX starts: every fault of the table in HOSTS, with names, within seconds.

The protocol is tested with threads of one process (it needs nothing of JAX); what JAX would make of it, with real ones.
"""

import contextlib
import dataclasses
import socket
import threading
import time

import pytest

from shardax.cluster.detect import Place
from shardax.cluster.facts import ProcessFacts
from shardax.cluster.ports import reserve_port
from shardax.cluster.preflight import preflight
from shardax.errors import PreflightError
from shardax.testing import run_processes, start_processes


def meet(members, timeout=3.0, address=None):
    """Let these (rank, size, changes, delay) meet; what each got: a token, or the text of its error."""
    with contextlib.closing(reserve_port()) as port:
        results: list[object] = [None] * len(members)

        def one(index, rank, size, changes, delay):
            time.sleep(delay)
            place = Place(address or port.address, size, rank, job=changes.get("job"))
            facts = dataclasses.replace(ProcessFacts.here(place), pid=1000 + index, **changes)
            try:
                with preflight(place, facts, timeout) as token:
                    results[index] = token
            except PreflightError as error:
                results[index] = error

        threads = [threading.Thread(target=one, args=(i, *member)) for i, member in enumerate(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def members(size, ranks=None, **changes):
    return [(rank, size, dict(changes), 0.0) for rank in (range(size) if ranks is None else ranks)]


def test_all_get_the_same_token():
    tokens = meet(members(5))
    assert len(set(tokens)) == 1
    assert isinstance(tokens[0], str)


def test_a_late_rank_is_waited_for_and_so_is_a_late_coordinator():
    for late in (0, 2):
        arrivals = [(rank, size, changes, 1.0 if rank == late else 0.0) for rank, size, changes, _ in members(3)]
        assert len(set(map(str, meet(arrivals, 10)))) == 1


@pytest.mark.parametrize(
    ("arrivals", "says", "ranks"),
    [
        (members(4, [0, 1, 3]), "rank 2: did not arrive within 3 s; here: 0 (", (2,)),
        (members(8, [0, 5]), "ranks 1-4, 6, 7: did not arrive", (1, 2, 3, 4, 6, 7)),
        ([*members(4, [0, 1, 2]), (2, 4, {}, 0.1)], "rank 2: two processes say they are rank 2: ", (2,)),
        ([*members(3, [0, 1]), (2, 4, {}, 0.0)], "rank 2: num_processes is 4, but 3 on ranks 0, 1", (2,)),
        ([*members(3, [0, 1]), (5, 8, {}, 0.0)], "rank 5: is outside 0..2", (5,)),
        ([*members(3, [0, 1]), (2, 3, {"settings": (("jax", "0.1"),)}, 0.0)], "rank 2: jax is 0.1, but ", (2,)),
    ],
)
def test_a_fault_is_told_to_everyone_with_its_rank(arrivals, says, ranks):
    begun = time.monotonic()
    for error in meet(arrivals):
        assert isinstance(error, PreflightError)
        assert says in str(error)
        assert set(ranks) <= set(error.ranks)
    assert time.monotonic() - begun < 10


def test_without_a_coordinator_the_others_say_so():
    for rank, error in enumerate(meet(members(3, [1, 2]), 1.5), 1):
        assert isinstance(error, PreflightError)
        assert error.ranks == (0,)
        assert "rank 0: did not arrive: nothing answers at 127.0.0.1:" in str(error)
        assert f"pid {999 + rank} waited" in str(error)


def test_a_second_coordinator_is_refused_and_the_first_goes_on():
    first, second, other = meet([(0, 2, {}, 0.0), (0, 2, {}, 0.5), (1, 2, {}, 1.5)], 10)
    assert first == other
    assert "rank 0: two processes say they are rank 0: " in str(second)


def test_another_jobs_processes_are_turned_away_and_ours_go_on():
    ours, theirs = {"job": "ours"}, {"job": "theirs"}
    results = meet([(0, 2, ours, 0.0), (0, 2, theirs, 0.3), (1, 2, theirs, 0.3), (1, 2, ours, 7.0)], 20)
    assert results[0] == results[3]
    assert "the job 'ours'" in str(results[1])
    assert "another port" in str(results[1])
    assert "job 'ours'" in str(results[2])
    assert "this process is of job 'theirs'" in str(results[2])


def test_a_port_that_serves_something_else_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (error,) = meet(members(2, [0]), 1.0, address)
    assert "rank 0: cannot listen on" in str(error)
    assert "Address already in use" in str(error)


def test_port_scanners_do_no_harm():
    with contextlib.closing(reserve_port()) as port:
        place = Place(port.address, 2, 0)
        tokens = []

        def coordinator():
            with preflight(place, ProcessFacts.here(place), 30) as token:
                tokens.append(token)

        thread = threading.Thread(target=coordinator)
        thread.start()
        for said in (b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b"[1]\n", b"null\n", b"\xff" * 100 + b"\n", b""):
            for _ in range(50):
                with (
                    contextlib.suppress(ConnectionRefusedError),
                    socket.create_connection(("127.0.0.1", port.number), 5) as scanner,
                ):
                    scanner.sendall(said)
                    break
                time.sleep(0.05)
        other = dataclasses.replace(place, rank=1)
        with preflight(other, ProcessFacts.here(other), 30) as token:
            tokens.append(token)
        thread.join(30)
    assert len(tokens) == 2
    assert len(set(tokens)) == 1


def test_between_the_meeting_and_the_service_nobody_takes_the_port():
    with contextlib.closing(reserve_port()) as port:
        number = port.number
    place = Place(f"127.0.0.1:{number}", 1, 0)
    with preflight(place, ProcessFacts.here(place), 5):
        for reuse in (0, 1):
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                with pytest.raises(OSError, match="in use"):
                    thief.bind(("", number))
        with socket.socket() as service:  # as JAX's coordinator does it
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            service.bind(("", number))


# ---- real processes ---------------------------------------------------------------------------------------------------

JOIN = """
import os, sys, time
import shardax as sx

try:
    cluster = sx.initialize(initialization_timeout=float(os.environ.get("PATIENCE", "60")))
except sx.PreflightError as error:
    print(error.ranks, error, flush=True)
    sys.exit(3)
sx.barrier("joined")
print("rank", cluster.rank, "of", cluster.size, flush=True)
time.sleep(float(os.environ.get("STAY", "0")))
"""


def test_two_jobs_on_one_port_never_mix():
    """HOSTS section 3: started at the same moment, none of three trials was fine without a preflight."""
    with contextlib.closing(reserve_port()) as port:
        jobs = {"first": (0, 1), "second": (0, 1)}
        running = {
            job: start_processes(
                JOIN, len(ranks), address=port.address, env={"SHARDAX_JOB": job, "PATIENCE": "30", "STAY": "10"}
            )
            for job, ranks in jobs.items()
        }
        with running["first"] as first, running["second"] as second:
            done = {"first": first.finish(90), "second": second.finish(90)}
    codes = {job: {one.returncode for one in ended} for job, ended in done.items()}
    assert {0} in codes.values(), done  # one job is whole
    (lost,) = [job for job, code in codes.items() if code != {0}]
    assert codes[lost] == {3}, done
    assert "rank 0: cannot listen" in done[lost][0].stdout
    assert "rank 1: came to" in done[lost][1].stdout


def test_real_processes_with_a_rank_twice_a_rank_missing_and_other_flags():
    def environment(rank):
        said = {0: {}, 1: {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, 2: {"SHARDAX_RANK": "1"}}[rank]
        return {"PATIENCE": "40", **said}

    for one in run_processes(JOIN, 3, env=environment, timeout=90):
        assert one.returncode == 3, one
        assert "rank 1: two processes say they are rank 1" in one.stdout
        assert one.seconds < 60


def test_a_rank_that_comes_after_the_others_began_is_told():
    with start_processes(JOIN, 1, env={"SHARDAX_PROCESSES": "1", "STAY": "60"}) as first:
        first.wait_for("rank 0 of 1")
        (late,) = run_processes(
            JOIN, 1, address=first.port.address, env={"SHARDAX_RANK": "1", "SHARDAX_PROCESSES": "2"}
        )
    assert late.returncode == 3
    assert "rank 1: came to" in late.stdout
    assert "its job has begun without it, or the port is another job's" in late.stdout
