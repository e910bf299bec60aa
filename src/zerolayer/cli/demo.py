"""`zerolayer demo`: an engine killed and one frozen in mid-sentence, and what it cost."""

from typing import Annotated

import typer

from zerolayer.cli.measuring import Json, Model, measure

app = typer.Typer()


@app.command()
def demo(
    model: Model = None,
    engines: Annotated[int | None, typer.Option(help="Engines of the fleet, 2 or more.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Length of the answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the answer's sampling.")] = None,
    plain_vllm: Annotated[
        bool | None,
        typer.Option(
            "--plain-vllm/--no-plain-vllm",
            help="Kill an engine of stock vLLM too, to compare (about a minute).",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """See it work: an answer streams, its engine is killed, then frozen, and the text goes on.

    Ends with a table of what was delivered, lost and repeated, all measured in this run, and the
    same as one line of JSON.
    """
    given = {"engines": engines, "tokens": tokens, "seed": seed, "plain_vllm": plain_vllm}
    measure("demo", model, given, as_json=as_json)
