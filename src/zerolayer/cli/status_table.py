"""The status of a fleet as a table for people."""

import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zerolayer.cli.heat_strip import heat_view

MOVES_SHOWN = 5
EVENTS_SHOWN = 5
_STATE_STYLES = {
    "ready": "green",
    "starting": "cyan",
    "suspect": "yellow",
    "draining": "yellow",
    "stalled": "red",
    "dead": "red",
    "set_aside": "bold red",
}
_REASON_CHARS_MAX = 40
_LINE_CHARS_MAX = 200


def status_view(status: Mapping[str, Any], now_unix: float | None = None) -> RenderableType:
    """Head line, one row per engine, reasons, totals, the last moves and the last events."""
    now = time.time() if now_unix is None else now_unix
    parts: list[RenderableType] = [_head(status, now), _engines(status)]
    parts += [*_gpus(status), *_reasons(status), *_operation(status)]
    parts += [*heat_view(status), _totals(status)]
    moves, events = status.get("recent_moves", []), status.get("events", [])
    if moves:
        parts.append(_moves(moves[-MOVES_SHOWN:]))
    if events:
        parts.append(_events(events[-EVENTS_SHOWN:]))
    return Group(*parts)


def _head(status: Mapping[str, Any], now: float) -> Text:
    up = max(0, int(now - status["started"]))
    days, rest = divmod(up, 86_400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    age = f"{days} d {clock}" if days else clock
    return Text(
        f"{status['url']}  {status['model']}  up {age}  instance {status['instance']}",
        style="bold",
    )


def _engines(status: Mapping[str, Any]) -> Table:
    """Narrow enough for 80 columns; reasons in words stand below it."""
    table = _bare_table()
    for name in ("engine", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("inc", "pid", "streams", "wait", "KV %", "step ms", "restarts", "moves"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("snapshots", no_wrap=True)
    moved_off = Counter(move["from"] for move in status.get("recent_moves", []))
    for engine in status["engines"]:
        state = str(engine["state"])
        table.add_row(
            engine["id"],
            Text(state, style=_STATE_STYLES.get(state, "")),
            _cell(engine["incarnation"]),
            _cell(engine["core_pid"]),
            _cell(engine["streams"]),
            _cell(engine["waiting"]),
            _cell(engine["kv_used_percent"], 1),
            _cell(engine["expected_step_ms"], 1),
            _cell(engine["restarts"]),
            _cell(moved_off[engine["id"]]),
            "on" if engine.get("snapshots") == "on" else "off",
        )
    return table


def _gpus(status: Mapping[str, Any]) -> list[RenderableType]:
    """Which engine has which, where they have any."""
    rows = [row for row in status["engines"] if row.get("gpus")]
    have = [f"{row['id']} {','.join(row['gpus'])}" for row in rows]
    return [Text(f"GPUs: {'; '.join(have)}")] if have else []


def _reasons(status: Mapping[str, Any]) -> list[RenderableType]:
    """Each engine's last fault, and why it keeps no snapshots."""
    lines = []
    for engine in status["engines"]:
        if engine["last_fault"]:
            fault = _cut(str(engine["last_fault"]), _LINE_CHARS_MAX)
            lines.append(f"{engine['id']} last fault: {fault}")
        if engine.get("snapshots", "on") not in ("on", "off"):
            why = _cut(str(engine["snapshots"]), _LINE_CHARS_MAX)
            lines.append(f"{engine['id']} keeps no snapshots: {why}")
    return [Text("\n".join(lines), style="yellow")] if lines else []


def _operation(status: Mapping[str, Any]) -> list[RenderableType]:
    """What was ordered last, while it runs or when it failed."""
    operation = status.get("operation")
    if not operation or operation["state"] == "done":
        return []
    said = f"{operation['what']}: {operation['error'] or operation['state']}"
    return [Text(_cut(said, _LINE_CHARS_MAX), style="yellow")]


def _bare_table(title: str | None = None) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 0)
    )


def _totals(status: Mapping[str, Any]) -> Text:
    totals, streams, dispatch = status["totals"], status["streams"], status["dispatch"]
    outcomes = ", ".join(f"{name} {count}" for name, count in totals["outcomes"].items())
    return Text(
        f"streams {totals['streams']} ({streams['active']} now, "
        f"{streams['waiting_for_engine']} wait for an engine); ended: {outcomes or 'none'}\n"
        f"tokens {totals['tokens_delivered']}; late outputs dropped {totals['outputs_fenced']}\n"
        f"moved {totals['moves']} ({totals['resumed_from_snapshot']} from snapshots, "
        f"{totals['resumed_by_prefill']} computed again; "
        f"{totals.get('moves_on_purpose', 0)} on purpose)\n"
        f"dispatch p50 {_cell(dispatch['p50_us'], 1)} us, p99 {_cell(dispatch['p99_us'], 1)} us"
    )


def _moves(moves: list[Mapping[str, Any]]) -> Table:
    table = _bare_table("last moves")
    for name in ("at", "stream", "from", "to", "reason"):
        table.add_column(name)
    for name in ("delivered", "context", "restored", "ms after"):
        table.add_column(name, justify="right")
    for move in moves:
        table.add_row(
            _time(move["declared_unix"]),
            escape(str(move.get("external_id") or move["stream"])),
            move["from"],
            move["to"],
            escape(_cut(str(move["reason"]))),
            _cell(move["delivered_tokens"]),
            _cell(move["context_tokens"]),
            _cell(move["restored_tokens"]),
            _cell(move["after_declared_ms"], 1),
        )
    return table


def _events(events: list[Mapping[str, Any]]) -> Text:
    lines = [
        f"{_time(e['unix'])}  {e['engine']:<6} {_cut(str(e['what']), _LINE_CHARS_MAX)}"
        for e in events
    ]
    return Text("\n".join(lines), style="dim")


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix).strftime("%H:%M:%S")


def _cell(value: float | int | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cut(text: str, most: int = _REASON_CHARS_MAX) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
