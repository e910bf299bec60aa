"""`zerolayer drain`, `roll`, `scale`, `back`: orders to a running fleet that move its streams."""

import json
import time
import urllib.error
from typing import Annotated, Any

import typer

from zerolayer.cli.instances import Instance, NoAnswer, Url, fetch_json, find_url
from zerolayer.cli.parsing import PassThroughCommand, passed_through
from zerolayer.core.errors import EngineError

app = typer.Typer()

OPERATION_PATH = "/zerolayer/operation"
LOOK_EVERY_S = 0.25
#: The server reads new vLLM arguments before it answers; that takes it some seconds.
ORDER_TIMEOUT_S = 60.0
#: Looks in a row that may fail before the server is taken to be gone.
LOST_LOOKS_MAX = 20

Engine = Annotated[
    str, typer.Argument(help="The engine: e0, e1, ... as `zerolayer status` shows it.")
]
MayWait = Annotated[
    bool,
    typer.Option("--may-wait", help="Allow that streams wait while no other engine takes them."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Only the JSON result on stdout; progress goes to stderr.")
]


@app.command()
def drain(
    engine: Engine,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let a drained engine take streams again.")
    ] = False,
    may_wait: MayWait = False,
    as_json: Json = False,
    url: Url = None,
    instance: Instance = None,
) -> None:
    """Move every stream off an engine and keep new ones away from it, until `--undo`."""
    if undo:
        _order("undrain", {"engine": engine}, find_url(url, instance), as_json=as_json)
        return
    body = {"engine": engine, "may_wait": may_wait}
    result = _order("drain", body, find_url(url, instance), as_json=as_json)
    if result["stayed"]:
        raise typer.Exit(1)


@app.command(
    cls=PassThroughCommand,
    epilog="Example: zerolayer roll -- --max-num-seqs 32 (laid over the words of `serve`)",
)
def roll(
    ctx: typer.Context,
    may_wait: MayWait = False,
    as_json: Json = False,
    url: Url = None,
    instance: Instance = None,
) -> None:
    """Restart every engine, one at a time, under load; words behind -- change vLLM's arguments.

    Streams move off each engine before it ends, so none of them breaks. If an engine does not come
    back, the roll stops there.
    """
    body = {"vllm_args": list(passed_through(ctx)), "may_wait": may_wait}
    _order("roll", body, find_url(url, instance), as_json=as_json)


@app.command()
def scale(
    engines: Annotated[int, typer.Argument(metavar="N", help="How many engines there shall be.")],
    force: Annotated[
        bool, typer.Option("--force", help="Start them even if they do not seem to fit in memory.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
    instance: Instance = None,
) -> None:
    """Add engines to a running fleet, or take the last ones away once their streams have moved."""
    body = {"engines": engines, "force": force}
    _order("scale", body, find_url(url, instance), as_json=as_json)


@app.command()
def back(engine: Engine, as_json: Json = False, url: Url = None, instance: Instance = None) -> None:
    """Try an engine again that was set aside because it died again and again."""
    _order("back", {"engine": engine}, find_url(url, instance), as_json=as_json)


def _order(kind: str, body: dict[str, Any], url: str, *, as_json: bool) -> dict[str, Any]:
    """Give the order, show how far it is, print the result; raises `EngineError` if it fails."""
    operation = _given(kind, body, url)
    number, shown = operation["number"], 0
    began, misses = operation["began"], 0
    try:
        while True:
            for line in operation["lines"][shown:]:
                typer.echo(f"{line['unix'] - began:7.1f} s  {line['text']}", err=as_json)
            shown = len(operation["lines"])
            if operation["state"] != "running":
                break
            time.sleep(LOOK_EVERY_S)
            try:
                operation, misses = fetch_json(url, OPERATION_PATH), 0
            except (NoAnswer, urllib.error.HTTPError):
                misses += 1
                if misses > LOST_LOOKS_MAX:
                    raise
            if operation["number"] != number:
                raise EngineError("another order came after this one; look at zerolayer status")
    except KeyboardInterrupt:
        typer.echo("it goes on without this command; zerolayer status shows it", err=True)
        raise typer.Exit(130) from None
    if operation["error"]:
        raise EngineError(operation["error"])
    result: dict[str, Any] = operation["result"]
    typer.echo(json.dumps(result) if as_json else _in_words(result))
    return result


def _given(kind: str, body: dict[str, Any], url: str) -> dict[str, Any]:
    """Send the order. Raises `EngineError` with what the server says when it refuses."""
    try:
        return fetch_json(url, f"/zerolayer/{kind}", body, ORDER_TIMEOUT_S)
    except urllib.error.HTTPError as cause:
        try:
            said = json.loads(cause.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = f"{url} answers {cause.code} to {kind}: not a Zero-Layer server of this version"
        raise EngineError(said) from cause


def _in_words(result: dict[str, Any]) -> str:
    """One line of what came out."""
    parts = []
    if result.get("moved") is not None:
        gap = result["worst_gap_ms"]
        worst = f", worst gap {gap:.0f} ms" if gap is not None else ""
        parts.append(
            f"{result['moved']} streams moved ({result['from_snapshot']} from snapshots{worst})"
        )
    if result.get("stayed"):
        why = ", ".join(f"{count} {what}" for what, count in result["why_stayed"].items())
        parts.append(f"{result['stayed']} stayed: {why}")
    if isinstance(result.get("engines"), int):
        parts.append(f"{result['engines']} engines now, {result['engines_before']} before")
    for name, seconds in (result.get("seconds_per_engine") or {}).items():
        parts.append(f"{name} {seconds:.1f} s")
    if result.get("changed"):
        parts.append(f"changed: {', '.join(result['changed'])}")
    if "seconds" in result:
        parts.append(f"done in {result['seconds']:.1f} s")
    return "; ".join(parts) or "done"
