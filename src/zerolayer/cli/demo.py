"""`zerolayer demo`: an engine killed and one frozen in mid-sentence, and what it cost."""

from typing import Annotated

import typer

from zerolayer.cli.measuring import Json, Model, measure

app = typer.Typer()


@app.command()
def demo(
    model: Model = None,
    engines: Annotated[int | None, typer.Option(help="Engines of the fleet, 2 or more.")] = None,
    as_json: Json = False,
) -> None:
    """See it work: an answer streams, its engine is killed, then frozen, and the text goes on.

    Ends with a table of what was delivered, lost and repeated, all measured in this run, and the
    same as one line of JSON.
    """
    measure("demo", model, {"engines": engines}, as_json=as_json)
