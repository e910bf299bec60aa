"""`zerolayer chaos`: make an engine of a running fleet fail, to see its streams go on."""

import os
import signal
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from zerolayer.arena.runtime_dir import SHM, list_instances
from zerolayer.cli.instances import Instance, Url, fetch_status, find_url
from zerolayer.core.errors import ConfigError, EngineError
from zerolayer.core.ids import engine_name, engine_slot

app = typer.Typer(
    no_args_is_help=True,
    help="Make an engine of a running fleet fail, and watch its streams go on elsewhere.",
)

Engine = Annotated[
    str, typer.Argument(help="The engine: e0, e1, ... as `zerolayer status` shows it.")
]


class Part(StrEnum):
    """Which processes of an engine a signal goes to."""

    CORE = "core"
    WORKER = "worker"
    TREE = "tree"


PartOption = Annotated[
    Part,
    typer.Option(
        help="Which of its processes: the core (schedules), the workers (compute), or the tree "
        "(all of them)."
    ),
]


@app.command()
def kill(
    engine: Engine, part: PartOption = Part.TREE, url: Url = None, instance: Instance = None
) -> None:
    """End an engine at once, as `kill -9` does. It is started again by itself."""
    _send(signal.SIGKILL, engine, part, find_url(url, instance))


@app.command()
def stop(
    engine: Engine, part: PartOption = Part.TREE, url: Url = None, instance: Instance = None
) -> None:
    """Freeze an engine (SIGSTOP). It stays frozen until `cont`, or until it is restarted."""
    _send(signal.SIGSTOP, engine, part, find_url(url, instance))


@app.command()
def cont(
    engine: Engine, part: PartOption = Part.TREE, url: Url = None, instance: Instance = None
) -> None:
    """Wake a frozen engine (SIGCONT). It serves again once it has proved progress."""
    _send(signal.SIGCONT, engine, part, find_url(url, instance))


@app.command()
def hang(engine: Engine, url: Url = None, instance: Instance = None) -> None:
    """Make an engine spin in its next step: busy, but without progress. `clear` ends it."""
    from zerolayer.arena.board import CHAOS_HANG

    _order(CHAOS_HANG, 1.0, engine, find_url(url, instance))


@app.command()
def slow(
    engine: Engine,
    factor: Annotated[float, typer.Option(help="How many times longer each step takes.")] = 20.0,
    url: Url = None,
    instance: Instance = None,
) -> None:
    """Make each step of an engine many times slower. `clear` ends it."""
    from zerolayer.arena.board import CHAOS_SLOW

    _order(CHAOS_SLOW, factor, engine, find_url(url, instance))


@app.command()
def clear(engine: Engine, url: Url = None, instance: Instance = None) -> None:
    """End `hang` and `slow`."""
    from zerolayer.arena.board import CHAOS_NONE

    _order(CHAOS_NONE, 1.0, engine, find_url(url, instance))


def pids_of(status: dict[str, Any], engine: str, part: Part) -> list[int]:
    """The process ids of that part. Raises `EngineError` when the engine has none now."""
    found = _row(status, engine)
    core = [found["core_pid"]] if found["core_pid"] else []
    pids = {Part.CORE: core, Part.WORKER: found["worker_pids"]}.get(
        part, [*core, *found["worker_pids"]]
    )
    if not pids:
        raise EngineError(f"{found['id']} is {found['state']} and has no such process now")
    return [int(pid) for pid in pids]


def _row(status: dict[str, Any], engine: str) -> dict[str, Any]:
    """The engine's part of the status; `0` means `e0`."""
    try:
        name = engine_name(engine_slot(f"e{engine}" if engine.isdigit() else engine))
    except ValueError as cause:
        raise ConfigError("ENGINE", engine, str(cause)) from cause
    for row in status["engines"]:
        if row["id"] == name:
            return dict(row)
    known = ", ".join(row["id"] for row in status["engines"])
    raise ConfigError("ENGINE", engine, f"this fleet has {known}")


def _send(number: signal.Signals, engine: str, part: Part, url: str) -> None:
    pids = pids_of(fetch_status(url), engine, part)
    reached = []
    for pid in pids:
        try:
            os.kill(pid, number)
            reached.append(str(pid))
        except ProcessLookupError:
            continue  # its parent's end took it along
        except PermissionError as cause:
            raise EngineError(f"process {pid} is not yours; run as who started it") from cause
    if not reached:
        raise EngineError(f"{engine} ended by itself just now; look at zerolayer status")
    typer.echo(f"sent {number.name} to {engine} ({part.value}): pid {' '.join(reached)}")


def _order(mode: int, factor: float, engine: str, url: str, shm: Path = SHM) -> None:
    from zerolayer.arena.board import CHAOS_HANG, CHAOS_NONE, ChaosOrder, EngineBoard

    status = fetch_status(url)
    row = _row(status, engine)
    runtime = next((r for r in list_instances(shm) if r.instance == status["instance"]), None)
    if runtime is None:
        raise EngineError(f"{url} does not run on this machine, or not as your user")
    with closing(EngineBoard.open_writer(runtime.board_path(row["slot"]))) as board:
        board.order_chaos(ChaosOrder(mode, factor))
    words = {CHAOS_NONE: "runs as usual", CHAOS_HANG: "hangs"}
    typer.echo(f"{row['id']} {words.get(mode, f'runs {factor:g} times slower')} from its next step")
