"""`zerolayer bench`: measure what is promised, here and now. Each ends with one JSON line."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolayer.cli import bench_load, bench_moves
from zerolayer.cli.measuring import Json, Model, measure, numbers
from zerolayer.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    help="Measure placement, snapshots, fail-over, moves and overhead on this machine.",
)
app.add_typer(bench_moves.app)
app.add_typer(bench_load.app)

Seed = Annotated[
    int | None, typer.Option(help="The same seed measures with the same prompts and choices.")
]
Streams = Annotated[int | None, typer.Option(help="Streams at a time.")]


@app.command()
def dispatch(
    engines: Annotated[
        str, typer.Option(help="Fleet sizes to measure, with commas between them.")
    ] = "8,64,256",
    decisions: Annotated[int, typer.Option(help="Decisions for each size.")] = 20_000,
    as_json: Json = False,
) -> None:
    """How fast a stream's engine is chosen: decisions per second, p50, p99. Needs no engine."""
    from zerolayer.dispatch.bench import measure_dispatch

    sizes = numbers("--engines", engines)
    if decisions < 1:
        raise ConfigError("--decisions", decisions, "give 1 or more")
    try:
        figures = measure_dispatch(
            sizes, time.perf_counter_ns, random.Random(0), decisions=decisions
        )
    except ValueError as cause:
        raise ConfigError("--engines", engines, str(cause)) from cause
    rows = [{name: _rounded(value) for name, value in asdict(row).items()} for row in figures]
    if not as_json:
        from rich.console import Console

        _dispatch_table(Console(), rows)
    typer.echo(json.dumps({"dispatch": rows}))


@app.command()
def forecast(
    trace: Annotated[
        str, typer.Option(help="Traces of the package or CSV files, with commas, or `all`.")
    ] = "all",
    engines: Annotated[int, typer.Option(help="Engines of the simulated fleet.")] = 16,
    utilisation: Annotated[
        float, typer.Option(help="Its load as a share of what it sustains.")
    ] = 0.7,
    seconds: Annotated[
        int, typer.Option(help="Seconds of its traffic; the second half is scored.")
    ] = 300,
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 0,
    as_json: Json = False,
) -> None:
    """How good the forecasts are 1 to 5 s ahead: inflow, utilisation, memory. Needs no engine.

    Skill against "no change" and against moving averages on public traces, 0 for no better.
    """
    from rich.console import Console

    from zerolayer.bench.forecast import ForecastOptions, TraceForecast, measure_trace
    from zerolayer.cli.forecast_table import skill_table, verdict
    from zerolayer.cli.run_progress import run_progress
    from zerolayer.sim.plan import chosen_traces

    options = ForecastOptions(engines, utilisation, seconds=seconds, seed=seed)
    options.check()
    names = chosen_traces(trace)
    console = Console(stderr=as_json)
    found: dict[str, TraceForecast] = {}
    with run_progress(console, len(names)) as watch:
        for name in names:
            found[name] = measure_trace(name, options, _of_run(watch, len(found), name))
            if not as_json:
                console.print(skill_table(found[name].skills))
    skills = [skill for measured in found.values() for skill in measured.skills]
    if not as_json:
        console.print("\n".join(verdict(skills)), highlight=False)
    typer.echo(
        json.dumps(
            {
                "forecast": [skill.row() for skill in skills],
                "ttft_error": {name: asdict(measured.ttft) for name, measured in found.items()},
            }
        )
    )


@app.command()
def snapshot(
    model: Model = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to decode, 80 or more.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """What a snapshot costs: bytes and microseconds per token, by way of copying and by codec."""
    measure("snapshot", model, {"tokens": tokens, "seed": seed}, as_json=as_json)


@app.command()
def failover(
    model: Model = None,
    kills: Annotated[int | None, typer.Option(help="Engines to kill, one per round.")] = None,
    freezes: Annotated[int | None, typer.Option(help="Engines to freeze, one per round.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Prompt lengths in tokens, like 100,1000,3500.")
    ] = None,
    streams: Streams = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of each answer.")] = None,
    engines: Annotated[int | None, typer.Option(help="Engines of the fleet, 2 or more.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Kill and freeze engines under running streams: tokens lost, tokens repeated, gaps.

    Starts a fleet of its own and compares each stream, token by token, with an undisturbed run.
    """
    given = {
        "kills": kills, "freezes": freezes, "streams": streams, "tokens": tokens,
        "engines": engines, "seed": seed,
        "contexts": numbers("--contexts", contexts) if contexts is not None else None,
    }  # fmt: skip
    measure("failover", model, given, as_json=as_json)


@app.command()
def overhead(
    model: Model = None,
    engines: Annotated[int | None, typer.Option(help="Engines of each server.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Runs of each server, in turns.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Counted seconds of each run.")] = None,
    streams: Streams = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """The same load on stock vLLM and on a fleet: tokens per second, TTFT and ITL, as ratios."""
    given = {
        "engines": engines, "rounds": rounds, "seconds": seconds, "streams": streams, "seed": seed,
    }  # fmt: skip
    measure("overhead", model, given, as_json=as_json)


def _of_run(watch: Callable[[float, str], None], done: int, name: str) -> Callable[[float], None]:
    """Progress of one run of several."""
    return lambda share: watch(done + share, name)


def _rounded(value: float | int) -> float | int:
    return round(value, 2) if isinstance(value, float) else value


def _dispatch_table(console: "Console", rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="placing a stream, in process", title_justify="left", pad_edge=False)
    for name in ("engines", "decisions/s", "p50 us", "p99 us", "max us"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["engines"]),
            f"{row['decisions_per_s']:,.0f}",
            *(f"{row[name]:.1f}" for name in ("p50_us", "p99_us", "max_us")),
        )
    console.print(table)
