"""Help fits a small terminal, comes without JAX, and shells complete."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shardax.cli.app import app

COMMANDS = ["layout", "prove", "check", "lock", "verify", "mesh", "targets", "launch", "demo"]


def help_of(*arguments):
    done = CliRunner().invoke(
        app, [*arguments, "--help"], prog_name="shardax", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    )
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_a_screen_of_80_by_40(command):
    lines = help_of(*([command] if command else [])).rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_front_page_lists_every_command_on_one_line_each():
    page = help_of()
    for command in COMMANDS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"│ {command} ")]
        assert line.rstrip("│ ").endswith((".", "?"))  # the whole sentence
    assert sorted(COMMANDS) == sorted(command.callback.__name__ for command in app.registered_commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_json_and_tracebacks_and_shows_an_example(command):
    page = help_of(command)
    assert "--json" in page and "--debug" in page
    assert f"Example: shardax {command} " in page or command == "demo"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_words_not_types(command):
    page = help_of(*([command] if command else []))
    assert not re.search(r"<\w+", page)  # typer writes <bool> behind --help, <str> behind a name
    usage = next(line for line in page.splitlines() if "Usage:" in line)
    assert "{" not in usage and "......" not in usage


def test_help_answers_without_jax():
    probe = "import sys; from shardax.cli.app import app; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"


def test_version_module_and_no_command(command):
    import shardax

    assert command("--version").out == f"shardax {shardax.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "shardax", "--version"], capture_output=True, text=True, timeout=60)
    assert module.stdout == f"shardax {shardax.__version__}\n"
    bare = command()
    assert bare.code == 2 and "Usage: shardax" in bare.out + bare.err


def completed(command, line):
    words = line.split(" ")
    found = command(_SHARDAX_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    return found.out.split()


def test_a_shell_completes_commands_programs_and_targets(command):
    assert completed(command, "shardax ve") == ["verify"]
    assert "mlp.py:" in completed(command, "shardax layout ml")
    assert set(completed(command, "shardax layout mlp.py:h")) == {"mlp.py:huge"}
    assert "mlp.py:needs" not in completed(command, "shardax layout mlp.py:n")
    assert completed(command, "shardax prove mlp.py --target tpu:v6e:2") == ["tpu:v6e:2x2", "tpu:v6e:2x4"]
