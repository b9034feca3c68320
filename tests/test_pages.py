"""The pages of the documentation: every example runs, page by page, and prints what the page says."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shardax as sx

PAGES = Path(__file__).parents[1] / "docs"
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], flags=re.DOTALL)


SESSIONS = [page for page in TEXTS if blocks(page, "pycon")]
COMMANDS = [page for page in TEXTS if blocks(page, "console")]
TESTS = [page for page in TEXTS if any("\ndef test_" in block for block in blocks(page, "python"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", SESSIONS)
def test_examples_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page saves stays out of the checkout
    test = doctest.DocTestParser().get_doctest("\n".join(blocks(page, "pycon")), {}, page, None, 0)
    runner, report = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS), []
    runner.run(test, out=report.append)
    sx.PartitionAxis.clear_registered_axes()  # pages that register axes do so for themselves
    assert runner.failures == 0, "".join(report)


def test_the_pages_that_promise_examples_have_them():
    assert {"axes.md", "rules.md", "layout.md"} <= set(SESSIONS)
    assert {"command_line.md", "lock_in_ci.md"} <= set(COMMANDS)
    assert {"cluster.md", "lock_in_ci.md"} <= set(TESTS)


def write_files(page, folder):
    """The files that a page shows, by the name in their first line; `train.py` is what its session defines."""
    defined = [
        example.source
        for block in blocks(page, "pycon")
        for example in doctest.DocTestParser().get_examples(block)
        if example.source.startswith(("import ", "from ", "def "))
    ]
    (folder / "train.py").write_text("\n".join(defined))
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)


def run(folder, *command):
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "COLUMNS")}
    env = clean | {"SHARDAX_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=250
    )


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_print_what_the_page_says(page, tmp_path):
    write_files(page, tmp_path)
    for block in blocks(page, "console"):
        for part in block.removeprefix("$ ").split("\n$ "):
            line, _, said = part.rstrip().partition("\n")
            done = run(tmp_path, *shlex.split(line, comments=True))
            assert done.stderr == "" and done.returncode in (0, 1), line + done.stderr
            printed = "\n".join(row.rstrip() for row in done.stdout.splitlines())
            # Columns are as wide as what is in them, seconds included.
            loosely = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(said, printed, loosely), f"{line}\n{printed}"


@pytest.mark.parametrize("page", TESTS)
def test_tests_pass_as_the_page_shows_them(page, tmp_path):
    write_files(page, tmp_path)
    for option in ("--shardax-update", "-p no:cacheprovider"):  # written, then compared
        done = run(tmp_path, "pytest", "-q", *option.split())
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
