"""`zerolayer status`: what a fleet is doing, once or each second."""

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from zerolayer.cli.instances import Instance, Url, fetch_status, find_url

app = typer.Typer()

REFRESH_S = 1.0

Watch = Annotated[
    bool, typer.Option("--watch", "-w", help="Show it anew each second, until Ctrl-C.")
]
Json = Annotated[
    bool, typer.Option("--json", help="JSON instead of a table; with --watch one line a second.")
]


@app.command()
def status(
    watch: Watch = False, as_json: Json = False, url: Url = None, instance: Instance = None
) -> None:
    """Show the engines of a running fleet: state, load, streams, moves, last faults."""
    address = find_url(url, instance)
    if not watch:
        _show_once(fetch_status(address), as_json=as_json)
        return
    try:
        (_print_lines if as_json else _repaint)(_each_second(address))
    except KeyboardInterrupt:
        return


def _show_once(now: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(now, indent=2))
        return
    from rich.console import Console

    from zerolayer.cli.status_table import status_view

    Console().print(status_view(now))


def _each_second(address: str) -> Iterator[dict[str, Any]]:
    """The status again and again; ends with `NoAnswer` when the serving process does."""
    while True:
        yield fetch_status(address)
        time.sleep(REFRESH_S)


def _print_lines(states: Iterator[dict[str, Any]]) -> None:
    for now in states:
        typer.echo(json.dumps(now))


def _repaint(states: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    from zerolayer.cli.status_table import status_view

    with Live(auto_refresh=False, screen=False) as live:
        for now in states:
            live.update(status_view(now), refresh=True)
