"""What typer does not do by itself: errors in one line, and words behind `--` passed through."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from zerolayer.core.errors import ZeroLayerError

#: Exit status when a command could not do what it was asked for: wrong words or a wrong world.
EXIT_REFUSED = 2
_VLLM_ARGS = "zerolayer.vllm_args"


class RootGroup(TyperGroup):
    """All commands. An error that was raised on purpose is text for stderr, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except ZeroLayerError as error:
            typer.echo(f"zerolayer: {error}", err=True)
            raise typer.Exit(EXIT_REFUSED) from error


class PassThroughCommand(TyperCommand):
    """A command whose words behind the first `--` are for somebody else's parser."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Name those words in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- VLLM ARGUMENTS]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set those words aside before our own parser sees them."""
        own, passed = split_at_dashes(args)
        ctx.meta[_VLLM_ARGS] = passed
        return list(super().parse_args(ctx, own))


def split_at_dashes(args: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words before the first `--` and those behind it."""
    words = list(args)
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def passed_through(ctx: typer.Context) -> tuple[str, ...]:
    """The words behind `--` of a `PassThroughCommand`."""
    words: tuple[str, ...] = ctx.meta.get(_VLLM_ARGS, ())
    return words
