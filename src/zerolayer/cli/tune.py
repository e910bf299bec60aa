"""`zerolayer tune`: find the weights of our policy on traces, with evidence."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolayer.cli.simulate import check_folder, check_jobs, shares
from zerolayer.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from zerolayer.sim.plan import Plan
    from zerolayer.sim.tune_report import Evidence

app = typer.Typer()

FRESH_FIRST_SEED = 1000
"""Seeds from here on are kept for the check at the end."""
CHECK_FACTOR = 1.6
"""The check at the end takes so many times as long as the runs of the peers at the start."""


@app.command()
def tune(
    traces: Annotated[
        str, typer.Option(help="Traces or CSV files with commas, or `all`.")
    ] = "azure_2023_conv,mooncake_conversation,servegen_mlarge_hour",
    utilisation: Annotated[str, typer.Option(help="Loads, like 0.7,0.85.")] = "0.7,0.85",
    faults: Annotated[str, typer.Option(help="Fault levels with commas.")] = "base,stress",
    engines: Annotated[int, typer.Option(help="Engines of the fleet.")] = 16,
    seeds: Annotated[int, typer.Option(help="Runs of each cell.")] = 2,
    requests: Annotated[int, typer.Option(help="First so many of each trace; 0: all.")] = 3000,
    gpu: Annotated[str, typer.Option(help="GPU of the engines.")] = "h100-sxm-80gb",
    model: Annotated[str, typer.Option(help="Model on the engines.")] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs of one engine.")] = 1,
    points: Annotated[int, typer.Option(help="Points of the coarse grid.")] = 60,
    jobs: Annotated[int, typer.Option(help="Runs at a time, a process each.")] = 2,
    minutes: Annotated[float, typer.Option(help="End after about so long.")] = 20.0,
    out: Annotated[Path, typer.Option(help="Evidence as JSON; a .md is written beside it.")] = Path(
        "zerolayer-weights.json"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Only JSON on stdout; all else goes to stderr.")
    ] = False,
) -> None:
    """Find the weights of the policy `zerolayer`: grid, then local search, checked over traces.

    What is made small: P99.9 and P99 of the whole answer and of the worst pause, against the best
    peer in each cell (trace, utilisation, faults).
    """
    from rich.console import Console

    from zerolayer.sim.plan import Plan, chosen, chosen_traces
    from zerolayer.sim.profiles import EngineKind
    from zerolayer.sim.verdict import OURS

    plan = Plan(
        traces=chosen_traces(traces),
        policies=(OURS,),
        utilisations=shares("--utilisation", utilisation),
        faults=chosen("--faults", faults, ("none", "base", "stress")),
        seeds=seeds,
        requests=requests,
        engines=engines,
        kind=EngineKind(gpu, model, tensor_parallel),
    )
    plan.check()
    check_jobs(jobs)
    check_folder("--out", out)
    if not minutes > 0.0 or points < 0:
        raise ConfigError("--minutes", minutes, "give minutes above 0 and --points of 0 or more")
    console = Console(stderr=as_json)
    evidence = _tuned(plan, (jobs, points), minutes * 60.0, console)
    _write(evidence, out, console)


def _tuned(
    plan: "Plan", jobs_and_points: tuple[int, int], seconds: float, console: "Console"
) -> "Evidence":
    from dataclasses import replace

    from zerolayer.cli.run_progress import TimeProgress
    from zerolayer.sim.parallel import Simulators
    from zerolayer.sim.scoring import PEERS, Scoring
    from zerolayer.sim.tune import search_weights
    from zerolayer.sim.tune_report import Evidence

    jobs, points = jobs_and_points
    began = time.monotonic()
    with Simulators(jobs) as simulators, TimeProgress(console, seconds) as progress:
        scoring = Scoring(plan, simulators, progress.look)
        progress.now_at("peers")
        baseline = scoring.baseline()
        check_s = CHECK_FACTOR * (time.monotonic() - began)
        search_s = max(0.0, seconds - check_s - (time.monotonic() - began))
        search_began = time.monotonic()

        def time_is_up(share: float) -> bool:
            return time.monotonic() - search_began > share * search_s

        def evaluate(weights: Any, best: Any) -> Any:
            scores = scoring.scores(weights, baseline, best)
            whole = len(scores) == len(plan.traces)
            progress.tried(sum(scores.values()) / len(scores) if whole else float("inf"))
            return scores

        search = search_weights(evaluate, time_is_up, points)
        progress.now_at("check with fresh seeds")
        fresh_plan = replace(plan, first_seed=FRESH_FIRST_SEED)
        fresh = Scoring(fresh_plan, simulators, progress.look)
        fresh_baseline = fresh.baseline()
        checked = {
            "default": fresh.scores(search.tried[0].weights, fresh_baseline),
            "winner": fresh.scores(search.best().weights, fresh_baseline),
        }
    minutes = (time.monotonic() - began) / 60.0
    return Evidence(plan, PEERS, search, baseline, checked, FRESH_FIRST_SEED, minutes)


def _write(evidence: "Evidence", out: Path, console: "Console") -> None:
    from zerolayer.sim.tune_report import evidence_json, evidence_markdown

    found = evidence_json(evidence)
    text = evidence_markdown(evidence)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(text, highlight=False, markup=False)
    console.print(f"evidence: {out} and {out.with_suffix('.md')}", highlight=False, soft_wrap=True)
    short = {name: found[name] for name in ("weights", "score", "fresh_seeds", "minutes")}
    typer.echo(json.dumps({"tune": {**short, "out": str(out)}}))
