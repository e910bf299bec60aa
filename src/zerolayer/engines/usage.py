"""Adds `kernel_dispatch_time_ms` to the usage part of every answer.

The time from the request's arrival in the fleet's client until the engine's queue had it, in
milliseconds. vLLM builds usage in many places from one class, whose construction is extended here.
"""

from typing import Any

from zerolayer.engines.client import dispatch_time_ms

FIELD = "kernel_dispatch_time_ms"


def install_usage_extras() -> None:
    """Extend vLLM's usage classes. Called once, before the server starts."""
    from vllm.entrypoints.openai.responses.protocol import ResponseUsage
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    for usage in (UsageInfo, ResponseUsage):
        _extend(usage)


def _extend(usage: type[Any]) -> None:
    original = usage.__init__
    if getattr(original, "_zerolayer", False):
        return

    def init(self: Any, **fields: Any) -> None:
        spent_ms = dispatch_time_ms.get()
        if spent_ms is not None:
            fields.setdefault(FIELD, round(spent_ms, 4))
        original(self, **fields)

    init._zerolayer = True  # type: ignore[attr-defined]
    usage.__init__ = init
