"""`zerolayer maps`: the shared tables of a running fleet, read and set from another shell."""

import json
from contextlib import closing
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from zerolayer.cli.instances import Instance, find_instance
from zerolayer.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Read and set the shared tables of a running fleet.")

ROWS_SHOWN = 1000


class TableName(StrEnum):
    """The tables that may be read."""

    LOAD_HEATMAP = "load_heatmap"
    KV_SNAPSHOT_META = "kv_snapshot_meta"
    STALL_DETECT_CFG = "stall_detect_cfg"


class SettableTable(StrEnum):
    """The tables that an operator may write."""

    STALL_DETECT_CFG = "stall_detect_cfg"


@app.command()
def dump(
    table: Annotated[
        TableName,
        typer.Argument(
            help="load_heatmap: each engine's load, now and in each of the next 5 s. "
            "kv_snapshot_meta: where the KV cache of each stream is kept. "
            "stall_detect_cfg: when an engine counts as stalled."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON list of all rows instead of a table.")
    ] = False,
    instance: Instance = None,
) -> None:
    """Print a table of a running fleet. Reads shared memory and disturbs nobody."""
    from zerolayer.arena.tables import dump as rows_of

    runtime = find_instance(instance)
    rows = rows_of(table.value, runtime.table_path(table.value))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    _print_rows(rows)


@app.command(name="set")
def set_values(
    table: Annotated[SettableTable, typer.Argument(help="The table to change.")],
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Settings to change; `maps dump` shows the names. They hold at once.",
        ),
    ],
    instance: Instance = None,
) -> None:
    """Change settings of a running fleet, for example: threshold_ms=120 restart_after_s=60."""
    from zerolayer.arena.tables import StallDetectCfg

    wanted = dict(parse_change(text) for text in changes)
    runtime = find_instance(instance)
    with closing(StallDetectCfg.open_writer(runtime.table_path(table.value))) as cfg:
        settings = cfg.update(wanted)
    _print_rows([asdict(settings)])


def parse_change(text: str) -> tuple[str, object]:
    """`name=number`, the number whole where it is written so. Raises `ConfigError`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError("KEY=VALUE", text, "write it like threshold_ms=120")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    raise ConfigError(name, value, "give a number")


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if len(rows) <= 1:
        lines = [f"{name} = {_text(value)}" for row in rows for name, value in row.items()]
        console.print("\n".join(lines) or "no rows", markup=False, highlight=False)
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows[:ROWS_SHOWN]:
        table.add_row(*(escape(_text(value)) for value in row.values()))
    console.print(table)
    if len(rows) > ROWS_SHOWN:
        console.print(f"and {len(rows) - ROWS_SHOWN} more rows; --json prints all")


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.0f}" for each in value)
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
