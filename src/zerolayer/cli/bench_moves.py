"""`zerolayer bench roll` and `bench offload`: what moves on purpose cost the streams."""

from typing import Annotated

import typer

from zerolayer.cli.measuring import Json, Model, measure, numbers
from zerolayer.cli.parsing import PassThroughCommand, passed_through

app = typer.Typer()

Seed = Annotated[int | None, typer.Option(help="The same seed measures with the same prompts.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of each answer.")]
Streams = Annotated[int | None, typer.Option(help="Streams at a time.")]


@app.command(cls=PassThroughCommand)
def roll(
    ctx: typer.Context,
    model: Model = None,
    streams: Streams = None,
    tokens: Tokens = None,
    engines: Annotated[int | None, typer.Option(help="Engines of the fleet, 2 or more.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Restart a whole fleet under long streams: broken, lost, repeated, exact, worst gaps.

    Words behind -- are new vLLM arguments for the roll.
    """
    given = {
        "streams": streams, "tokens": tokens, "engines": engines, "seed": seed,
        "vllm_args": passed_through(ctx) or None,
    }  # fmt: skip
    measure("roll", model, given, as_json=as_json)


@app.command()
def offload(
    model: Model = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds with offload, and as many without, in turns.")
    ] = None,
    streams: Streams = None,
    tokens: Tokens = None,
    factors: Annotated[
        str | None, typer.Option(help="How much slower an engine gets, step by step, like 2,3,4,5.")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """An engine turns slow under streams: their worst gap with proactive offload and without."""
    given = {
        "rounds": rounds, "streams": streams, "tokens": tokens, "seed": seed,
        "factors": numbers("--factors", factors) if factors is not None else None,
    }  # fmt: skip
    measure("offload", model, given, as_json=as_json)
