"""Every example runs as it says: on simulated devices, quietly, and what it trains gets better."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env = clean | {"SHARDAX_CACHE": str(cwd / "cache")}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def losses(text):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]


def test_the_examples_that_were_promised_are_here():
    assert {"gpt.py", "moe.py", "multihost_feed.py", "stateful_shard_map.py", "equinox_mlp.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_read_in_one_sitting(name):
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < 150
    assert lines[0].startswith('"""')


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_on_simulated_devices(name, tmp_path):
    done = run(EXAMPLES / name, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout
    if found := losses(done.stdout):
        assert min(found[-3:]) < 0.7 * found[0], found


def test_the_feed_goes_on_with_another_number_of_processes(tmp_path):
    """Two processes, then four: the rows and losses are those of one process that was never interrupted."""
    script = EXAMPLES / "multihost_feed.py"
    alone = run(script, "alone.json", cwd=tmp_path).stdout + run(script, "alone.json", cwd=tmp_path).stdout
    text = ""
    for processes, devices in ((2, 4), (4, 2)):
        launched = run(
            "-m", "shardax", "launch", "-n", processes, "--devices", devices, script, "place.json", cwd=tmp_path
        )
        text += launched.stdout
        read = {int(rank): int(count) for rank, count in re.findall(r"rank (\d) of \d has read (\d+)", launched.stdout)}
        assert sorted(read) == list(range(processes))
        assert max(read.values()) < 1000 / processes  # nobody has read what another's devices hold
    rows = r"step +(\d+) .* rows \[([\d, ]+)\]"
    assert len(re.findall(rows, alone)) == 24
    assert re.findall(rows, text) == re.findall(rows, alone)
    assert losses(text) == pytest.approx(losses(alone), abs=2e-4)
    assert (
        json.loads((tmp_path / "place.json").read_text())["feed"]
        == json.loads((tmp_path / "alone.json").read_text())["feed"]
    )
