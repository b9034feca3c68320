"""Every command as its own process, through the real entry point."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def test_layout(command):
    shown = command("layout", "mlp.py")
    assert (shown.code, shown.err) == (0, "")
    assert "params/up" in shown.out and "P('fsdp', 'tp')" in shown.out and "Copies" in shown.out
    found = command("layout", "mlp.py:talks", "--mesh", "dp=4,fsdp=1,tp=2", "--json")
    assert found.code == 0
    data = found.data
    assert data["mesh"]["axes"] == "dp=4,fsdp=1,tp=2"
    assert data["bytes"] == (2 * 64 * 256 + 32 * 64) * 4
    assert data["bytes_per_device"] == 2 * 64 * 256 * 4 // 2 + 32 * 64 * 4 // 4
    assert [each["path"] for each in data["offenders"]] == ["params/down", "params/up", "x"]
    assert found.err == "loading\n"  # what the program prints is out of the way


def test_prove_one_target(command, folder):
    shown = command("prove", "mlp.py", "--save", "proof.json", "--report", "proof.html")
    assert (shown.code, shown.err) == (0, "")
    assert "step on cpu:8, mesh dp=2,fsdp=2,tp=2" in shown.out and "mlp.py:13" in shown.out
    assert "wrote proof.html" in shown.out and "wrote proof.json" in shown.out
    assert json.loads((folder / "proof.json").read_text())["flops"] > 0
    page = (folder / "proof.html").read_text()
    assert page.startswith("<!doctype html>") and "params" in page


def test_prove_several_makes_a_comparison(command):
    shown = command("prove", "mlp.py", "-t", "cpu:8", "-t", "tpu:v5e:2x4", "-m", "dp=2,fsdp=2,tp=2", "--json")
    assert shown.code == 0
    cpu, tpu = shown.data["proofs"]
    assert (cpu["target"], tpu["target"]) == ("cpu:8", "tpu:v5e:2x4")
    assert cpu["estimate"] is None and tpu["estimate"] is not None  # a CPU stands for no hardware: it has no time
    again = command("prove", "mlp.py", "-t", "cpu:8", "-t", "tpu:v5e:2x4")  # kept from the first time
    assert again.code == 0
    lines = again.out.splitlines()
    heads = next(line for line in lines if "tpu:v5e:2x4" in line).split()
    verdicts = next(line for line in lines if line.startswith("verdict")).split()
    assert (heads[-2:], verdicts) == (["cpu:8", "tpu:v5e:2x4"], ["verdict", "partitions", "fits"])
    assert again.out.count("(kept)") == 2
    assert "over dp×fsdp " in again.out  # as everywhere


def test_without_a_target_there_are_as_many_simulated_devices_as_the_mesh_has(command):
    shown = command("prove", "mlp.py", "-m", "dp=2,fsdp=2,tp=4", "-m", "dp=2,fsdp=-1,tp=2")
    assert (shown.code, shown.err) == (0, "")
    assert "cpu:16" in shown.out and "cpu:8" in shown.out


def test_what_does_not_fit_is_exit_code_1(command):
    shown = command("prove", "mlp.py:huge", "-t", "tpu:v5e:2x4")
    assert (shown.code, shown.err) == (1, "")
    assert "Does not fit" in shown.out


def test_lock_and_verify(command, folder):
    place = folder / "locked"
    place.mkdir()
    shutil.copy(folder / "mlp.py", place)
    wrote = command("lock", "locked/mlp.py:case", "-o", "locked/sharding.lock")
    assert (wrote.code, wrote.err) == (0, "")
    assert "wrote locked/sharding.lock: step on cpu:8" in wrote.out
    lock = json.loads((place / "sharding.lock").read_text())
    assert lock["program"] == "mlp.py:case"  # seen from the lock, so that it holds from any folder
    holds = command("verify", "locked/sharding.lock", "--json")
    assert (holds.code, holds.data["ok"], holds.data["differences"]) == (0, True, [])

    text = (place / "mlp.py").read_text()
    (place / "mlp.py").write_text(text.replace('("params/down", [sx.TP, sx.EMBED])', '("params/down", None)'))
    differs = command("verify", "locked/sharding.lock")
    assert (differs.code, differs.err) == (1, "")
    assert "step is not what locked/sharding.lock says" in differs.out
    assert "params['down']: loses its sharding: was tp,fsdp, is replicated" in differs.out.replace("\n", " ")
    assert "shardax verify locked/sharding.lock --update" in differs.out
    updated = command("verify", "locked/sharding.lock", "--update")
    assert updated.code == 0 and "rewrote locked/sharding.lock" in updated.out
    assert command("verify", "locked/sharding.lock").code == 0


def test_check(command):
    clear = command("check", "mlp.py", "--mesh", "dp=8,fsdp=2,tp=32")
    assert (clear.code, clear.err) == (0, "")
    assert "Clear" in clear.out and "dp=8,fsdp=2,tp=32" in clear.out and "all-reduce" in clear.out
    doubtful = command("check", "mlp.py:doubtful", "--json")
    assert doubtful.code == 1
    assert [site["cause"] for site in doubtful.data["sites"]] == ["ambiguous"]


def test_launch_runs_processes_and_hands_on_their_end(command):
    well = command("launch", "-n", "2", "--devices", "3", "ranks.py", "--fast", "-n", "5")
    assert well.code == 0
    assert sorted(well.out.splitlines()) == [f"[{rank}] hello from {rank} --fast -n 5 with 3" for rank in (0, 1)]
    badly = command("launch", "-n", "2", "--grace", "0", "--json", "ranks.py", "fail")
    assert badly.code == 7
    assert (badly.data["exit_code"], badly.data["processes"]) == (7, 2)
    assert "rank 1 of 2 failed with exit code 7" in badly.err


def test_output_may_be_cut_short():
    shell = f"{Path(sys.executable).with_name('shardax')} targets v5p --json | head -n 1"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_a_reader_who_left_is_no_answer():
    """Exit code 1 would say that something does not fit."""
    read, write = os.pipe()
    os.close(read)
    command = [Path(sys.executable).with_name("shardax"), "mesh", "dp=2,tp=4"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=100)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("target", ["tpu:v5e:2x4", "gpu:h100:2x8"])
def test_mesh(quickly, target):
    shown = quickly("mesh", "dp=2,fsdp=-1", "-t", target)
    assert shown.code == 0
    assert "hosts" in shown.out if "x8" in target else "devices of one host" in shown.out
    data = quickly("mesh", "dp=2,fsdp=-1", "-t", target, "--json").data
    assert len(data["seats"]) == (16 if "x8" in target else 8)
    assert data["axes"][0]["crosses"] == ("hosts" if "x8" in target else "devices of one host")


def test_a_mesh_over_slices_and_along_an_axis(quickly):
    shown = quickly("mesh", "dp=2,fsdp=-1", "-t", "tpu:v5e:4x4*2", "--axis", "dp")
    assert "slice 0" in shown.out and "slice 1" in shown.out and "its place along 'dp'" in shown.out
    assert "slices" in next(line for line in shown.out.splitlines() if line.startswith("dp "))


def test_targets(quickly):
    data = quickly("targets", "--json").data
    assert data["compilers"]["cpu"]["ready"]
    assert {"v5e", "v5p", "h100"} <= {chip["name"] for chip in data["chips"]}
    shown = quickly("targets").out
    for kind, facts in data["compilers"].items():
        assert f"{kind}: {'ready' if facts['ready'] else facts['missing']}" in shown
    one = quickly("targets", "tpu:v5e")
    assert "tpu:v5e:16x16" in one.out and "256" in one.out
    assert "tpu:v5e:16x16" in quickly("targets", "v5e", "--json").data["targets"]


def test_explain_and_most_and_save(quickly, folder):
    shown = quickly("layout", "mlp.py", "--explain", "up")
    assert "params/up: float32[64, 256] → P('fsdp', 'tp'), by rule 0" in shown.out
    few = quickly("layout", "mlp.py", "--most", "1", "--save", "layout.json")
    assert "… and 2 more" in few.out and "Copies" not in few.out
    assert json.loads((folder / "layout.json").read_text())["shardax"] == "layout"


def test_lint(quickly):
    good = quickly("layout", "mlp.py", "--lint")
    assert good.code == 0 and "no problem" in good.out
    bad = quickly("layout", "mlp.py:typo", "--lint")
    assert bad.code == 1 and "rule 0 'params/pu': unused" in bad.out and "did you mean 'up'?" in bad.out
    assert [each["kind"] for each in quickly("layout", "mlp.py:typo", "--lint", "--json").data["findings"]] == [
        "unused"
    ]


def test_a_misfit_can_be_adapted(quickly):
    assert quickly("layout", "mlp.py:odd").code == 1
    shown = quickly("layout", "mlp.py:odd", "--on-misfit", "adapt")
    assert shown.code == 0 and "Corrections" in shown.out
