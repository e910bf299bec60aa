"""Runs a measurement of the room `bench` and shows its result; the same for all of them."""

import importlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from zerolayer.cli.before_start import check_model
from zerolayer.core.errors import ConfigError

#: Exit status of a measurement that ran and found a broken promise.
EXIT_BROKEN = 1
#: Counts in a result that must be zero.
_MUST_BE_ZERO = ("broken", "tokens_lost", "tokens_repeated")

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a model, or its hub name. Without it: the small packaged one.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Only the JSON result on stdout; progress goes to stderr.")
]


def measure(kind: str, model: str | None, given: Mapping[str, Any], *, as_json: bool) -> None:
    """Run `zerolayer.bench.<kind>`, print its result as the last line, and exit.

    `given`: fields of its options; None where the user named none, so that the measurement's own
    default holds. Exits with `EXIT_BROKEN` when the result breaks a promise.
    """
    from rich.console import Console

    from zerolayer.cli.packaged import packaged_model

    console = Console(stderr=as_json)
    module = importlib.import_module(f"zerolayer.bench.{kind}")
    name = check_model(model) if model is not None else packaged_model(console)
    chosen = {field: value for field, value in given.items() if value is not None}
    options = getattr(module, f"{kind.title()}Options")(model=name, **chosen)
    result = getattr(module, f"run_{kind}")(options, console)
    typer.echo(json.dumps(result))
    if breaks_a_promise(result):
        raise typer.Exit(EXIT_BROKEN)


def breaks_a_promise(result: Mapping[str, Any]) -> bool:
    """A stream broke, a token was lost or repeated, or what had to be exact was not."""
    return any(result.get(name) for name in _MUST_BE_ZERO) or result.get("exact") is False


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them. Raises `ConfigError`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as cause:
        raise ConfigError(option, text, "give whole numbers like 8,64,256") from cause
