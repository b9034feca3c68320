"""The pytest plugin, in a pytest of its own: the fixture, `--shardax-update`, and how a failure reads."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardax as sx

TESTS = """
import pytest
import shardax as sx

def proof():
    return sx.Proof.load("step.json")

def test_fixture(sharding_lock):
    sharding_lock(proof())

@pytest.mark.parametrize("target", ["cpu:8", "tpu:v5e:2x4"])
def test_several(sharding_lock, target):
    sharding_lock(proof(), target, tolerance=0.5)

def test_by_path():
    sx.check_lock(proof(), "sharding.lock")

def test_said_otherwise():
    sx.check_lock(proof(), "never.lock", update=True)
    sx.check_lock(proof(), "never.lock", update=False)
"""
FILES = [
    "locks/test_fixture.json",
    "locks/test_several-cpu-8.cpu-8.json",
    "locks/test_several-tpu-v5e-2x4.tpu-v5e-2x4.json",
    "sharding.lock",
]


@pytest.fixture(scope="module")
def proof():
    x, w = (jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(2))
    return sx.prove(lambda x, w: (x @ w).sum(), x, w, mesh="dp=4,tp=2", in_specs=(P("dp", "tp"), P("tp")))


@pytest.fixture
def project(tmp_path, proof):
    (tmp_path / "test_locks.py").write_text(TESTS)
    proof.save(tmp_path / "step.json")
    return tmp_path


DRIVER = """
import sys, pytest, pathlib
for options in (a.split() for a in sys.argv[1:]):
    if options[0] == "mv":
        pathlib.Path(options[1]).rename(options[2])
        continue
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", ".", "test_locks.py", *options[1:]])
    print(f"exit {int(code)}\\n=== next")
"""


def run(project, *steps):
    """What several runs of pytest say, all in one new process: importing jax is the dear part."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-c", DRIVER, *steps]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=200)
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.split("=== next\n")[:-1]


def test_locks_are_missed_written_kept_and_compared(project, proof):
    more = replace(proof, ledger=sx.Ledger((*proof.ledger.rows, replace(proof.ledger.rows[0], op="all-to-all"))))
    more.save(project / "more.json")
    missed, written, kept, changed, one = run(
        project,
        "run",
        "run --shardax-update",
        "run",
        "mv more.json step.json",
        "run",
        "run --shardax-update -k by_path",
    )
    assert "4 failed, 1 passed" in missed and missed.endswith("exit 1\n")
    assert "there is no sharding lock sharding.lock" in missed and "write it with pytest --shardax-update" in missed

    assert "5 passed" in written and written.endswith("exit 0\n")
    paths = [
        line.removeprefix("shardax: wrote ") for line in written.splitlines() if line.startswith("shardax: wrote ")
    ]
    assert sorted(os.path.relpath(project / path, project) for path in paths) == [*FILES[:3], "never.lock", FILES[3]]
    assert json.loads((project / FILES[0]).read_text()) == json.loads(json.dumps(proof.lock()))

    assert "5 passed" in kept and "wrote" not in kept
    assert "4 failed, 1 passed" in changed and "wrote" not in changed
    assert "is not what sharding.lock says: 1 difference" in changed
    assert "all-to-all over " in changed and "is new: 1×, " in changed
    assert "if this is meant: pytest --shardax-update, and look at the diff of the file" in changed
    assert "lock_differences" not in changed and "raise ProofFailure" not in changed  # our frames are hidden
    assert "1 passed" in one and one.count("shardax: wrote ") == 1
    assert json.loads((project / "sharding.lock").read_text()) == json.loads(json.dumps(more.lock()))


def test_the_plugin_wakes_no_jax():
    code = "import sys, shardax.pytest_plugin, shardax.testing.locks; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_the_fixture_names_files_that_every_system_takes(sharding_lock):
    assert sharding_lock.path().name == "test_the_fixture_names_files_that_every_system_takes.json"
    assert sharding_lock.path().parent.name == "locks"
    assert sharding_lock.path("b=2").name.endswith("takes.b=2.json")
