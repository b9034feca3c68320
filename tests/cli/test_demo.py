"""The demo through its entry point: nothing on the screen but what it has to say, and everything it says is so."""

import re
import shlex
import subprocess
import sys

from shardax.cli.screen import own_command


def test_the_demo_trains_is_killed_and_goes_on_as_if_nothing_had_been(command, folder):
    told = command("demo", "--quick", "--output", "shown")
    assert (told.code, told.err) == (0, "")
    assert not re.search(r"warning|traceback|\[gloo\]|W\d{4} ", told.out, flags=re.IGNORECASE)
    assert told.out.startswith("shardax 0.1.0: ")
    chapters = re.findall(r"^(.+?) ─+$", told.out, flags=re.MULTILINE)
    assert len(chapters) == 6 and chapters[-1] == "Try next"
    assert "model/blocks/0/up/kernel" in told.out and "all-reduce over tp" in told.out
    assert re.search(r"kill -9: shardax guard: rank 1 of 2 .* was killed", told.out)
    assert re.search(r"steps done twice, before the kill and after the resume: [12], equal bit for bit", told.out)
    assert re.search(r"all 24 losses equal to the undisturbed run's", told.out)
    page = (folder / "shown" / "index.html").read_text()
    assert "resumed" in page and "model/blocks/0/up/kernel" in page
    suggested = [line.strip() for line in told.out.partition("Try next")[2].splitlines() if line.startswith("  ")]
    assert len(suggested) == 3 and suggested[1].split()[1] == "prove"  # libtpu is here
    for line in suggested:  # typed as it stands, it works, also where shardax is on no path
        ended = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=280)
        assert (ended.returncode, ended.stderr) == (0, ""), line


def test_what_to_try_next_works_without_the_tpu_compiler(command):
    from shardax.demo import example, story

    for line in story.next_commands(str(example.place()), tpu=False):
        ended = command(*shlex.split(line)[1:])
        assert (ended.code, ended.err, "tpu" in line) == (0, "", False), line


def test_the_command_is_named_as_it_can_be_typed(monkeypatch, tmp_path):
    beside = tmp_path / ".venv" / "bin" / "shardax"
    beside.parent.mkdir(parents=True)
    beside.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert own_command() == ".venv/bin/shardax"
    monkeypatch.setenv("PATH", str(beside.parent))  # as after `source .venv/bin/activate`
    assert own_command() == "shardax"


def test_what_the_demo_needs_is_said(monkeypatch, quickly):
    from shardax.demo import example

    monkeypatch.setitem(example.NEEDED, "not_there_at_all", "some-distribution")
    ended = quickly("demo")
    assert (ended.code, ended.out) == (2, "")
    assert "some-distribution: not installed" in ended.err and 'pip install "shardax[demo]"' in ended.err
