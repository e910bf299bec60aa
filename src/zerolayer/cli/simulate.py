"""`zerolayer simulate`: placement policies against each other on public traces, with faults."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolayer.cli.run_progress import run_progress
from zerolayer.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from zerolayer.sim.plan import Plan
    from zerolayer.sim.series import CellReport

app = typer.Typer()

HTML_NAME = "zerolayer-simulation.html"
JOBS = 2


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Option(
            help="Traces of the package (azure_2023_conv, mooncake_conversation, ...), CSV files, "
            "several with commas, or `all`."
        ),
    ] = "azure_2023_conv",
    engines: Annotated[int, typer.Option(help="Engines of the fleet.")] = 16,
    policies: Annotated[str, typer.Option(help="Names with commas, or `all`.")] = "all",
    continuation: Annotated[
        str,
        typer.Option(
            help="What becomes of a stream whose engine fails. own: what each policy's system "
            "does. snapshot, reprefill or retry: the same for all, so that placement alone differs."
        ),
    ] = "own",
    utilisation: Annotated[
        str, typer.Option(help="Load as a share of what the fleet sustains, like 0.7,0.85.")
    ] = "0.7",
    faults: Annotated[
        str, typer.Option(help="none, base (a decent datacentre), stress (accelerated), several.")
    ] = "base",
    seeds: Annotated[int, typer.Option(help="Runs of each policy, each with its own faults.")] = 5,
    requests: Annotated[int, typer.Option(help="First so many of each trace; 0: all.")] = 0,
    gpu: Annotated[str, typer.Option(help="GPU of the engines.")] = "h100-sxm-80gb",
    model: Annotated[str, typer.Option(help="Model on the engines.")] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of one engine.")] = 1,
    jobs: Annotated[int, typer.Option(help="Runs at a time, a process each.")] = JOBS,
    html: Annotated[Path, typer.Option(help="Where the report goes.")] = Path(HTML_NAME),
    as_json: Annotated[
        bool, typer.Option("--json", help="Only JSON on stdout; all else goes to stderr.")
    ] = False,
) -> None:
    """Compare placement policies on a fleet that is simulated: tails, broken streams, evenness.

    The same dispatcher code as in the live fleet, on a virtual clock. Ends with a table, an HTML
    report and one line of JSON. The same arguments give the same figures.
    """
    from rich.console import Console

    from zerolayer.dispatch.policies.registry import POLICIES
    from zerolayer.sim.plan import Plan, chosen, chosen_traces
    from zerolayer.sim.profiles import EngineKind

    plan = Plan(
        traces=chosen_traces(trace),
        policies=chosen("--policies", policies, tuple(POLICIES)),
        utilisations=shares("--utilisation", utilisation),
        faults=chosen("--faults", faults, ("none", "base", "stress")),
        seeds=seeds,
        requests=requests,
        engines=engines,
        kind=EngineKind(gpu, model, tensor_parallel),
        continuation=continuation,
    )
    check_jobs(jobs)
    check_folder("--html", html)
    console = Console(stderr=as_json)
    began = time.monotonic()
    reports = _simulated(plan, jobs, console)
    _finish(plan, reports, html, console, time.monotonic() - began)


def shares(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between them. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as cause:
        raise ConfigError(option, text, "give numbers like 0.7,0.85") from cause


def check_jobs(jobs: int) -> None:
    """Raises ConfigError for a number of processes that cannot be."""
    if not 1 <= jobs <= 256:
        raise ConfigError("--jobs", jobs, "give 1 to 256; more than there are cores helps nothing")


def check_folder(option: str, path: Path) -> None:
    """Raises ConfigError where no file can be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(option, str(path), "give a file in a folder that is there")


def _simulated(plan: "Plan", jobs: int, console: "Console") -> list["CellReport"]:
    from zerolayer.cli.simulate_table import cell_table
    from zerolayer.sim.experiment import run_count, simulate_plan

    reports = []
    with (
        run_progress(console, run_count(plan)) as watch,
        closing(simulate_plan(plan, jobs, watch)) as cells,
    ):
        for report in cells:
            reports.append(report)
            console.print(cell_table(report, console.width))
    return reports


def _finish(
    plan: "Plan", reports: list["CellReport"], html: Path, console: "Console", seconds: float
) -> None:
    from zerolayer.cli.simulate_table import verdict_text
    from zerolayer.sim.assumptions import assumptions
    from zerolayer.sim.report import About, html_report
    from zerolayer.sim.report_json import cells_json

    kind = plan.kind
    facts = (
        ("fleet", f"{plan.engines} engines, each {kind.tensor_parallel} × {kind.gpu}"),
        ("model", kind.model),
        ("continuation", plan.continuation),
        ("seeds", str(plan.seeds)),
        ("requests", f"first {plan.requests:,}" if plan.requests else "all"),
        ("simulated in", f"{seconds:.0f} s"),
    )
    html.write_text(html_report(reports, About(facts, assumptions(plan))), encoding="utf-8")
    text = verdict_text(reports)
    if text:
        console.print(text, highlight=False)
    console.print(f"report: {html}", highlight=False, soft_wrap=True)
    result = {"cells": cells_json(reports), "html": str(html), "seconds": round(seconds, 1)}
    typer.echo(json.dumps({"simulate": result}))
