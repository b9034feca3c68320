"""What a command found, and the one place where it reaches the terminal: shown, or as JSON, with an exit code."""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Annotated, Any

import typer

from shardax.cli.screen import error_as_data, show, show_error
from shardax.errors import (
    CommandError,
    CompilerError,
    CompilerMissingError,
    HloParseError,
    MeshError,
    ShardaxError,
    TargetError,
)


class Code(IntEnum):
    """The exit codes of every command; `shardax launch` hands on its script's own."""

    YES = 0  # it was done; it fits; it matches
    NO = 1  # it does not fit, does not match, or is wrong: the program, not the command
    USAGE = 2  # the command line: an unknown option, mesh, target, module or function
    CANNOT_SAY = 3  # a compiler is missing, crashed, or took too long
    CRASHED = 4  # an exception in the program's own code
    INTERRUPTED = 130


@dataclass(frozen=True)
class Answer:
    """What to show, the same as plain data, and the exit code."""

    shown: tuple[Any, ...]
    data: Any
    code: int = Code.YES


Json = Annotated[bool, typer.Option("--json", help="Write JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show whole tracebacks.")]


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """A function that makes an answer, as a command that gives it: with --json, --debug and short errors."""

    @wraps(command)
    def run(*args: Any, json: bool = False, debug: bool = False, **kwargs: Any) -> None:
        raise typer.Exit(_run(lambda: command(*args, **kwargs), as_json=json, debug=debug))

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("json", Json), ("debug", Debug))
    ]
    parameters = [*signature.parameters.values(), *added]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _run(command: Callable[[], Answer], *, as_json: bool, debug: bool) -> int:
    # What a program prints while it is loaded must not stand in the JSON.
    aside = redirect_stdout(sys.stderr) if as_json else nullcontext()
    try:
        with aside:
            answer = command()
    except BrokenPipeError:
        raise  # nobody reads: `main` knows
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return Code.INTERRUPTED
    except Exception as error:  # noqa: BLE001 (the border of the program: whatever it was, it is said in one screen)
        code = code_of(error)
        if debug:
            traceback.print_exc()
        if as_json:
            write_json({"error": error_as_data(error), "exit_code": int(code)})
        elif not debug:
            show_error(error)
        return code
    if as_json:
        write_json(answer.data)
    else:
        show(*answer.shown)
    return answer.code


def code_of(error: BaseException) -> Code:
    """The exit code of an error."""
    if isinstance(error, (CommandError, MeshError, TargetError)):
        return Code.USAGE
    if isinstance(error, (CompilerError, CompilerMissingError, HloParseError)):
        return Code.CANNOT_SAY
    return Code.NO if isinstance(error, ShardaxError) else Code.CRASHED


def write_json(data: Any) -> None:
    """Data on standard output, as JSON."""
    sys.stdout.write(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()
