"""Help that says what its reader needs: names and words, without the types that newer versions of typer write in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup


def _plain(params: Sequence[Any]) -> None:
    """A flag takes no word after it; what an argument is, its name and its help say."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            vars(param)["display_type_rich"] = lambda ctx: None  # type: ignore[misc]  (older versions never ask)


class PlainCommand(TyperCommand):
    """A command with such a help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments, and the help option."""
        found = super().get_params(ctx)
        _plain(found)
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the line of usage: what is needed stands bare, what may be left out in brackets."""
        pieces = super().collect_usage_pieces(ctx)
        return [piece.removesuffix("...").strip("{}") if piece.startswith("{") else piece for piece in pieces]


class PlainGroup(TyperGroup):
    """The front page with such a help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options, and the help option."""
        found = super().get_params(ctx)
        _plain(found)
        return found
