"""`shardax`: every command with its options. A command imports what it needs when it runs: help answers at once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

import shardax
from shardax.cli.answer import Answer, answers
from shardax.cli.completion import complete_program, complete_target
from shardax.cli.plain_help import PlainCommand, PlainGroup

app = typer.Typer(
    name="shardax",
    cls=PlainGroup,
    help="Lay out, prove, lock and run JAX programs on any mesh.",
    epilog="MODULE:FN, as in train.py:case, is a function that returns sx.Case(step, args, rules). First: shardax demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOOK, RUN = "Look, prove, lock", "Machines"

Program = Annotated[
    str,
    typer.Argument(metavar="MODULE:FN", help="Gives a Case, as train.py:case.", autocompletion=complete_program),
]
Mesh = Annotated[str | None, typer.Option("--mesh", "-m", metavar="MESH", help='Like "dp=2,fsdp=-1".')]
OneTarget = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", metavar="TARGET", help="Like tpu:v5e:2x4 or cpu:16.", autocompletion=complete_target
    ),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="For a compiler.", min=1)]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardax {shardax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(
    cls=PlainCommand,
    epilog="Example: shardax layout train.py:case --mesh dp=2,fsdp=-1 --explain mlp/up",
    rich_help_panel=LOOK,
)
@answers
def layout(
    program: Program,
    mesh: Mesh = None,
    target: OneTarget = None,
    explain: Annotated[list[str] | None, typer.Option(metavar="PATH", help="Why arrays of such a path lie so.")] = None,
    lint: Annotated[bool, typer.Option("--lint", help="What is wrong with the rules.")] = False,
    on_misfit: Annotated[
        str | None, typer.Option(metavar="error|warn|adapt", help="Where a spec does not fit.")
    ] = None,
    most: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the N largest arrays.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the layout as JSON.")] = None,
) -> Answer:
    """Where every array goes, what stands in copies, and why."""
    from shardax.cli.looking import layout as made

    return made(program, mesh, target, explain=explain or [], lint=lint, on_misfit=on_misfit, most=most, save=save)


@app.command(
    cls=PlainCommand,
    epilog="Example: shardax prove train.py:case -t tpu:v5e:2x4 -m fsdp=8 -m fsdp=4,tp=2",
    rich_help_panel=LOOK,
)
@answers
def prove(
    program: Program,
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", "-m", metavar="MESH", help="Several are compared.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET",
            help="Several are compared.",
            autocompletion=complete_target,
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page of it (HTML).")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the proof as JSON.")] = None,
    timeout: Timeout = 600,
    cache: Annotated[bool, typer.Option(help="Take what was compiled before.")] = True,
) -> Answer:
    """Does it fit, what does it send, how long does it take?

    A real compiler says it, for hardware that is not here. Exit code 1 when it does not fit.
    """
    from shardax.cli.proofs import prove as proved

    return proved(program, mesh or [], target or [], report=report, save=save, timeout=timeout, cache=cache)


@app.command(cls=PlainCommand, epilog="Example: shardax check train.py:case --mesh dp=16,fsdp=64", rich_help_panel=LOOK)
@answers
def check(program: Program, mesh: Mesh = None) -> Answer:
    """What travels between devices, without compiling anything.

    For a mesh of any size. Exit code 1 where it is ambiguous, so that the compiler chooses.
    """
    from shardax.cli.checking import check as checked

    return checked(program, mesh)


@app.command(
    cls=PlainCommand,
    epilog="Example: shardax lock train.py:case -o sharding.lock --target tpu:v5e:4x4",
    rich_help_panel=LOOK,
)
@answers
def lock(
    program: Program,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the lock goes.")] = Path(
        "sharding.lock"
    ),
    mesh: Mesh = None,
    target: OneTarget = None,
    timeout: Timeout = 600,
) -> Answer:
    """Keep what no change should change unseen.

    A lock holds the facts of a proof: layout, collectives, memory. Commit it, and let CI verify it.
    """
    from shardax.cli.locking import lock as locked

    return locked(program, output, mesh, target, timeout)


@app.command(cls=PlainCommand, epilog="Example: shardax verify sharding.lock", rich_help_panel=LOOK)
@answers
def verify(
    path: Annotated[Path, typer.Argument(metavar="LOCK", help="The file that `shardax lock` wrote.")] = Path(
        "sharding.lock"
    ),
    tolerance: Annotated[float, typer.Option(metavar="SHARE", min=0, help="By how much bytes may differ.")] = 0.05,
    update: Annotated[bool, typer.Option("--update", help="The change is meant: rewrite the file.")] = False,
    program: Annotated[
        str | None, typer.Option(metavar="MODULE:FN", help="Instead of the one that the file names.")
    ] = None,
    timeout: Timeout = 600,
) -> Answer:
    """Prove a locked program again, and show what differs.

    The lock names its program, mesh and target. Exit code 1 when anything differs.
    """
    from shardax.cli.locking import verify as verified

    return verified(path, tolerance, update=update, program=program, timeout=timeout)


@app.command(
    cls=PlainCommand,
    epilog='Example: shardax mesh "dp=2,fsdp=-1" --target tpu:v5e:4x8 --axis fsdp',
    rich_help_panel=RUN,
)
@answers
def mesh(
    mesh: Annotated[str, typer.Argument(metavar="MESH", help='Like "dp=2,fsdp=-1,tp=4": one size may be -1.')],
    target: OneTarget = None,
    axis: Annotated[str | None, typer.Option(metavar="AXIS", help="Colour and number the devices along it.")] = None,
) -> Answer:
    """Draw a mesh: which axis crosses hosts and slices."""
    from shardax.cli.machines import mesh as drawn

    return drawn(mesh, target, axis)


@app.command(cls=PlainCommand, epilog="Example: shardax targets v5e", rich_help_panel=RUN)
@answers
def targets(
    chip: Annotated[
        str | None, typer.Argument(metavar="CHIP", help="Show every topology of one chip, like v5e.")
    ] = None,
) -> Answer:
    """Every chip and topology: what is here, what is missing."""
    from shardax.cli.machines import targets as listed

    return listed(chip)


@app.command(
    cls=PlainCommand,
    epilog="Example: shardax launch -n 2 --devices 4 train.py --steps 100",
    rich_help_panel=RUN,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@answers
def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARG]...", help="A script and its arguments.")],
    processes: Annotated[int, typer.Option("-n", "--processes", metavar="N", min=1, help="How many processes.")],
    devices: Annotated[int | None, typer.Option(metavar="N", min=1, help="Simulated CPU devices of each.")] = None,
    grace: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For the rest, after a failure.")] = 5.0,
) -> Answer:
    """Run a script as several processes on this machine.

    In the script, sx.initialize() finds its place. The exit code is that of the first process that fails.
    """
    from shardax.cli.machines import launch as launched

    return launched(command, processes, devices, grace)


@app.command(cls=PlainCommand, rich_help_panel=RUN)
@answers
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the page goes.")] = Path(
        "shardax-report"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model, one compiler, fewer steps.")] = False,
) -> Answer:
    """A small GPT: laid out, proved, trained, killed, resumed.

    On eight simulated devices, in about a minute. It ends with a page that shows all of it.
    """
    from shardax.demo.story import demo as told

    return told(output, quick=quick)


def main() -> None:
    """The entry point of `shardax` and of `python -m shardax`."""
    try:
        app(prog_name="shardax")
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
