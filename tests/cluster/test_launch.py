"""`launch`: prefixed output, the first failure ends the rest, its exit code is kept."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

import shardax as sx
from shardax.testing.environment import child_environment


def run(tmp_path, source, processes=3, **options):
    script = tmp_path / "script.py"
    script.write_text(source)
    output = io.StringIO()
    code = sx.launch([script, *options.pop("arguments", [])], processes, output=output, **options)
    return code, output.getvalue().splitlines()


def test_output_has_its_rank_in_front_and_arguments_arrive(tmp_path):
    source = """
import os, sys
print(os.environ["SHARDAX_RANK"], os.environ["SHARDAX_PROCESSES"], os.environ["PYTHONHASHSEED"], *sys.argv[1:])
sys.stderr.write("no newline at the end")
"""
    code, lines = run(tmp_path, source, 11, arguments=["--steps", "3"])
    assert code == 0
    assert {f"[{rank:>2}] {rank} 11 {os.environ['PYTHONHASHSEED']} --steps 3" for rank in range(11)} <= set(lines)
    assert lines.count("[ 0] no newline at the end") == 1


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("sys.exit(3)", 3, "rank 1 of 3 failed with exit code 3, before the others"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 of 3 was killed by SIGKILL, before the others"),
    ],
)
def test_the_first_failure_ends_the_rest(tmp_path, how, code, says):
    source = f"""
import os, sys, time
if os.environ["SHARDAX_RANK"] == "1":
    {how}
time.sleep(60)
"""
    begun = time.monotonic()
    got, lines = run(tmp_path, source, grace=0.5)
    assert got == code
    assert lines[-1] == f"shardax launch: {says}"
    assert time.monotonic() - begun < 20


def test_what_ignores_sigterm_is_killed(tmp_path):
    source = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("not me", flush=True))
if os.environ["SHARDAX_RANK"] == "0":
    time.sleep(1)
    sys.exit(5)
while True:
    time.sleep(0.1)
"""
    code, lines = run(tmp_path, source, 2, grace=0.5)
    assert code == 5
    assert "[1] not me" in lines


def test_sigterm_to_the_launcher_reaches_everyone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(60)
""")
    command = [sys.executable, "-m", "shardax.cluster.launch", "-n", "2", str(script)]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 0


@pytest.mark.parametrize(("failed", "code", "said"), [(False, 130, False), (True, 9, True)])
def test_ctrl_c_is_nobodys_failure_unless_somebody_had_failed(tmp_path, failed, code, said):
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys, time
print("ready", flush=True)
if {failed} and os.environ["SHARDAX_RANK"] == "1":
    sys.exit(9)
time.sleep(60)
""")
    command = [sys.executable, "-m", "shardax.cluster.launch", "-n", "2", "--grace", "30", str(script)]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        time.sleep(2 if failed else 0)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: everyone gets it
        output = launcher.stdout.read()
        assert launcher.wait(30) == code, output
    assert ("before the others" in output) == said


def test_ctrl_c_in_a_terminal_comes_once(tmp_path):
    """A terminal interrupts its whole process group: a second one would break into what a script does on the first."""
    script = tmp_path / "script.py"
    script.write_text("""
import signal, time
count = 0
def handler(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, handler)
print("ready", flush=True)
end = time.monotonic() + 2
while time.monotonic() < end:
    time.sleep(0.1)
print(f"interrupted {count}")
""")
    command = [sys.executable, "-m", "shardax.cluster.launch", "-n", "2", str(script)]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
        os.killpg(launcher.pid, signal.SIGINT)
        assert sorted(launcher.stdout.read().splitlines()) == ["[0] interrupted 1", "[1] interrupted 1"]
        assert launcher.wait(30) == 0


def test_a_job_with_initialize_and_simulated_devices(tmp_path):
    source = """
import shardax as sx
cluster = sx.initialize()
import jax
print(cluster.rank, cluster.size, jax.device_count(), jax.local_device_count())
with sx.guard() as guard:
    guard.step(7)
    if cluster.rank == 1:
        raise RuntimeError("on purpose")
    sx.barrier("never", 60)
"""
    code, lines = run(tmp_path, source, 2, devices=3)
    assert code == 70
    assert "[0] 0 2 6 3" in lines
    assert any(line.startswith("[0] shardax guard: rank 1 of 2") and "at step 7" in line for line in lines)


def test_nonsense_is_refused():
    with pytest.raises(sx.ClusterError, match="cannot launch 0 processes"):
        sx.launch(["x.py"], 0)
    with pytest.raises(sx.ClusterError, match="cannot simulate 0 devices"):
        sx.launch(["x.py"], 1, 0)
    with pytest.raises(sx.ClusterError, match="cannot run 'no-such-program': No such file"):
        sx.launch("no-such-program", 2)
    with pytest.raises(sx.ClusterError, match="nothing to launch"):
        sx.launch([], 1)
