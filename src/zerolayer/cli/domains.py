"""`zerolayer domains`: which engines are equal enough to be balanced against each other."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from zerolayer.cli.instances import Instance, Url, fetch_status, find_url
from zerolayer.core.errors import ZeroLayerError
from zerolayer.dispatch.domains import SPREAD_MAX, CensusRow, propose_domains

app = typer.Typer()

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@app.command()
def domains(as_json: Json = False, url: Url = None, instance: Instance = None) -> None:
    """Measured speed of each engine, and the domains that follow from it.

    Speed is 1 / the learned time of one and the same step on each engine. Engines that differ by
    more than 5 % belong apart: start the fleet with the --domains that is printed.
    """
    found = census(fetch_status(find_url(url, instance)))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _print(found)


def census(status: Mapping[str, Any]) -> dict[str, Any]:
    """What a status says of each engine's speed, and the proposal, as plain JSON values.

    Raises `ZeroLayerError` when the status has no such figures.
    """
    engines = status["engines"]
    if not all("reference_step_ms" in engine for engine in engines):
        raise ZeroLayerError("this server's status has no step times; it is of another version")
    device = status["placement"]["device"]
    steps = [engine["reference_step_ms"] for engine in engines]
    labels = [tuple(engine.get("labels", ())) for engine in engines]
    proposal = propose_domains(
        [
            CensusRow(device, speed=1e3 / step if step else None, labels=own)
            for step, own in zip(steps, labels, strict=True)
        ]
    )
    known = [step for step in steps if step]
    return {
        "device": device,
        "spread_max": SPREAD_MAX,
        "engines": [
            {
                "id": engine["id"],
                "domain": engine["domain"],
                "labels": list(own),
                "reference_step_ms": step,
                "slower_than_best": round(step / min(known) - 1.0, 4) if step else None,
                "proposed": proposed,
            }
            for engine, own, step, proposed in zip(
                engines, labels, steps, proposal.domains, strict=True
            )
        ],
        "unmeasured": [
            engine["id"] for engine, step in zip(engines, steps, strict=True) if not step
        ],
        "reasons": list(proposal.reasons),
        "option": option(proposal.domains, labels),
    }


def option(proposed: Sequence[int], labels: Sequence[Sequence[str]]) -> str:
    """The value of `--domains` that makes these domains and keeps the labels of their engines;
    empty for one domain without a label."""
    numbers = sorted(set(proposed))
    if len(numbers) < 2 and not any(labels):
        return ""
    parts = []
    for number in numbers:
        pool = [slot for slot, own in enumerate(proposed) if own == number]
        named = f"{'+'.join(labels[pool[0]])}=" if labels[pool[0]] else ""
        parts.append(named + ",".join(str(slot) for slot in pool))
    return ";".join(parts)


def _print(found: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("engine")
    labelled = any(engine["labels"] for engine in found["engines"])
    if labelled:
        table.add_column("labels")
    for name in ("domain now", "step ms", "slower than best", "proposed"):
        table.add_column(name, justify="right")
    for engine in found["engines"]:
        step, slower = engine["reference_step_ms"], engine["slower_than_best"]
        table.add_row(
            engine["id"],
            *(["+".join(engine["labels"])] if labelled else []),
            str(engine["domain"]),
            "-" if step is None else f"{step:.2f}",
            "-" if slower is None else f"{100 * slower:.1f} %",
            str(engine["proposed"]),
        )
    console = Console()
    console.print(table)
    lines = list(found["reasons"])
    if found["unmeasured"]:
        lines.append(f"not measured yet (too few steps): {', '.join(found['unmeasured'])}")
    wanted = found["option"]
    lines.append(f'proposal: --domains "{wanted}"' if wanted else "proposal: one domain")
    console.print("\n".join(lines), markup=False, highlight=False)
