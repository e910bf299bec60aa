"""`zerolayer bench evenness` and `bench replay`: requests at fixed times on a live fleet."""

from typing import Annotated

import typer

from zerolayer.cli.measuring import Json, Model, measure

app = typer.Typer()

Engines = Annotated[int | None, typer.Option(help="Engines of each fleet.")]
Seconds = Annotated[float | None, typer.Option(help="Seconds in which requests come.")]
Seed = Annotated[int | None, typer.Option(help="The same seed measures with the same requests.")]


@app.command()
def evenness(
    model: Model = None,
    engines: Engines = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of both policies together, in turns; even.")
    ] = None,
    seconds: Seconds = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    long_share: Annotated[
        float | None, typer.Option(help="Share of requests with long prompts and answers, 0 to 1.")
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option("--offload/--no-offload", help="Whether our fleet moves streams on its own."),
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Skewed load: spread of utilisation over the engines, ours against vLLM's own balancer."""
    given = {
        "engines": engines, "rounds": rounds, "seconds": seconds, "rate": rate,
        "long_share": long_share, "offload": offload, "seed": seed,
    }  # fmt: skip
    measure("evenness", model, given, as_json=as_json)


@app.command()
def replay(
    model: Model = None,
    trace: Annotated[
        str | None, typer.Option(help="A trace of the package, or a CSV file.")
    ] = None,
    engines: Engines = None,
    seconds: Seconds = None,
    utilisation: Annotated[
        float | None, typer.Option(help="Load as a share of what the fleet sustains.")
    ] = None,
    prompt_tokens_max: Annotated[
        int | None, typer.Option(help="Longer prompts are cut to it.")
    ] = None,
    output_tokens_max: Annotated[
        int | None, typer.Option(help="Longer answers are cut to it.")
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Simulated runs, with other noise each.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """A trace on a live fleet and the same in simulation: how far TTFT and token gaps differ."""
    given = {
        "trace": trace, "engines": engines, "seconds": seconds, "utilisation": utilisation,
        "prompt_tokens_max": prompt_tokens_max, "output_tokens_max": output_tokens_max,
        "runs": runs, "seed": seed,
    }  # fmt: skip
    measure("replay", model, given, as_json=as_json)
