"""The packaged model, made ready with progress; what commands use when no model is named."""

from typing import TYPE_CHECKING

from zerolayer.cli import environment

if TYPE_CHECKING:
    from rich.console import Console

PACKAGED_NAME = "smollm2-135m-instruct"


def packaged_model(console: "Console") -> str:
    """Its folder, converted now if it is not there yet. Raises `ModelUnavailable`."""
    from zerolayer.cli.serve_progress import ModelProgress
    from zerolayer.engines.model import default_model

    with ModelProgress(console) as progress:
        return str(default_model(environment.cache_dir(), progress))
