"""`shardax`: every command with its options. A command imports what it needs when it runs: help answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import shardax
from shardax.cli.answer import Answer, answers
from shardax.cli.completion import complete_program, complete_target

app = typer.Typer(
    name="shardax",
    help="Lay out, prove, lock and run JAX programs on any mesh, before any accelerator is rented.",
    epilog='MODULE:FN is a function that returns sx.Case(step, args, rules): "train.py:case" or "package.train:case".',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOOK, RUN = "Look, prove, lock", "Machines"

Program = Annotated[
    str, typer.Argument(metavar="MODULE:FN", help="Gives a Case: train.py:case", autocompletion=complete_program)
]
Mesh = Annotated[str | None, typer.Option("--mesh", "-m", metavar="MESH", help='Like "dp=2,fsdp=-1".')]
OneTarget = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="TARGET", help="Like tpu:v5e:2x4.", autocompletion=complete_target),
]
Timeout = Annotated[float, typer.Option(help="Seconds a compiler may take.", min=1)]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardax {shardax.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command(rich_help_panel=LOOK)
@answers
def layout(
    program: Program,
    mesh: Mesh = None,
    target: OneTarget = None,
    explain: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Say rule by rule why these leaves lie so.")
    ] = None,
    lint: Annotated[bool, typer.Option("--lint", help="Say what is wrong with the rules (exit code 1).")] = False,
    on_misfit: Annotated[
        str | None, typer.Option(metavar="error|warn|adapt", help="Where a spec does not fit.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Leaves to list.")] = 40,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the layout as JSON.")] = None,
) -> Answer:
    """Where every array goes, what stands in copies, and why."""
    from shardax.cli.looking import layout as made

    return made(program, mesh, target, explain=explain or [], lint=lint, on_misfit=on_misfit, most=most, save=save)


@app.command(rich_help_panel=LOOK)
@answers
def prove(
    program: Program,
    mesh: Annotated[list[str] | None, typer.Option("--mesh", "-m", metavar="MESH", help="Several: compared.")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", metavar="TARGET", help="Several: compared.", autocompletion=complete_target),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all of it.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the proof as JSON.")] = None,
    timeout: Timeout = 600,
    cache: Annotated[bool, typer.Option(help="Use what was compiled before.")] = True,
) -> Answer:
    """Compile the step for hardware that is not here: does it fit, what does it send, how long does it take?

    Exit code 1 when it does not fit.
    """
    from shardax.cli.proofs import prove as proved

    return proved(program, mesh or [], target or [], report=report, save=save, timeout=timeout, cache=cache)


@app.command(rich_help_panel=LOOK)
@answers
def lock(
    program: Program,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The lock.")] = Path("sharding.lock"),
    mesh: Mesh = None,
    target: OneTarget = None,
    timeout: Timeout = 600,
) -> Answer:
    """Write the facts of a proof that no change should change unseen: commit the file, let CI verify it."""
    from shardax.cli.locking import lock as locked

    return locked(program, output, mesh, target, timeout)


@app.command(rich_help_panel=LOOK)
@answers
def verify(
    path: Annotated[Path, typer.Argument(metavar="LOCK", help="What `shardax lock` wrote.")] = Path("sharding.lock"),
    tolerance: Annotated[float, typer.Option(min=0, help="The share by which bytes may differ.")] = 0.05,
    update: Annotated[bool, typer.Option("--update", help="Rewrite the file: the change is meant.")] = False,
    program: Annotated[str | None, typer.Option(metavar="MODULE:FN", help="Instead of the one in the file.")] = None,
    timeout: Timeout = 600,
) -> Answer:
    """Prove the locked program again: exit code 1, and every difference, when it is not what the lock says."""
    from shardax.cli.locking import verify as verified

    return verified(path, tolerance, update=update, program=program, timeout=timeout)


@app.command(rich_help_panel=RUN)
@answers
def mesh(
    mesh: Annotated[str, typer.Argument(metavar="MESH", help='Like "dp=2,fsdp=-1,tp=4": one size may be -1.')],
    target: OneTarget = None,
    axis: Annotated[str | None, typer.Option(metavar="AXIS", help="Colour and number the devices along it.")] = None,
) -> Answer:
    """Draw a mesh on its devices: which axis stays in a host, which crosses hosts and slices."""
    from shardax.cli.machines import mesh as drawn

    return drawn(mesh, target, axis)


@app.command(rich_help_panel=RUN)
@answers
def targets(
    chip: Annotated[str | None, typer.Argument(metavar="CHIP", help="Every topology of one, like v5e.")] = None,
) -> Answer:
    """What can be proved for: every chip and topology, what is installed, what is missing."""
    from shardax.cli.machines import targets as listed

    return listed(chip)


@app.command(rich_help_panel=RUN, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@answers
def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARG]...", help="A script and its arguments.")],
    processes: Annotated[int, typer.Option("-n", "--processes", min=1, help="How many processes.")],
    devices: Annotated[int | None, typer.Option(min=1, help="Simulated CPU devices of each.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds the others have after a failure.")] = 5.0,
) -> Answer:
    """Run a script as several processes here; sx.initialize() finds its place. Exits with the script's code."""
    from shardax.cli.machines import launch as launched

    return launched(command, processes, devices, grace)


@app.command(rich_help_panel=RUN)
@answers
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the page goes.")] = Path(
        "shardax-report"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="One compiler, fewer steps.")] = False,
) -> Answer:
    """A small GPT on eight simulated devices: laid out, proved, trained, killed and resumed."""
    from shardax.demo.story import demo as told

    return told(output, quick=quick)


def main() -> None:
    """The entry point of `shardax` and of `python -m shardax`."""
    try:
        app(prog_name="shardax")
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
