"""What an operator orders of a running fleet, one thing at a time: drain, roll, scale, bring back.

An order is checked before anything is touched. Then it is carried out as a job of the fleet, says
how far it is, and ends with a result or with one sentence why not.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from zerolayer.core.errors import ZeroLayerError

logger = logging.getLogger("vllm.zerolayer.operations")

#: Lines that an operation keeps; a fleet of 256 engines says some 5 for each. Later ones are lost.
LINES_MAX = 4096

Say = Callable[[str], None]
Work = Callable[[Say], Awaitable[dict[str, Any]]]
"""Does what was ordered, tells how far it is, returns the result. Raises `ZeroLayerError`."""


class OperationBusy(ZeroLayerError):
    """Another operation is running."""


@dataclass
class Operation:
    """One order and what became of it."""

    number: int
    kind: str
    what: str
    """In words: "drain e1"."""
    began_unix: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(unix seconds, how far it was)."""
    result: dict[str, Any] | None = None
    error: str = ""
    ended_unix: float = 0.0
    """0 while it runs."""

    @property
    def state(self) -> str:
        """`running`, `done` or `failed`."""
        if not self.ended_unix:
            return "running"
        return "failed" if self.error else "done"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "number": self.number,
            "kind": self.kind,
            "what": self.what,
            "state": self.state,
            "began": self.began_unix,
            "ended": self.ended_unix or None,
            "lines": [{"unix": unix, "text": text} for unix, text in self.lines],
            "result": self.result,
            "error": self.error,
        }


class Operations:
    """Carries out one operation at a time. `run` is a job of the fleet's task group."""

    def __init__(self, note: Say) -> None:
        """`note`: adds a line to the fleet's log."""
        self.newest: Operation | None = None
        self._note = note
        self._orders: asyncio.Queue[tuple[Operation, Work]] = asyncio.Queue(maxsize=1)
        self._count = 0

    @property
    def running(self) -> Operation | None:
        """The operation that is carried out now."""
        newest = self.newest
        return newest if newest is not None and newest.state == "running" else None

    def require_idle(self) -> None:
        """Raises `OperationBusy` with what is running."""
        if (running := self.running) is not None:
            raise OperationBusy(f"{running.what} is running; wait until it has ended")

    def begin(self, kind: str, what: str, work: Work) -> Operation:
        """Start an operation. Raises `OperationBusy`."""
        self.require_idle()
        self._count += 1
        self.newest = operation = Operation(self._count, kind, what, time.time())
        self._orders.put_nowait((operation, work))
        self._note(f"{what}: begun")
        return operation

    async def run(self) -> None:
        """Work for ever."""
        while True:
            operation, work = await self._orders.get()
            await self._carry_out(operation, work)

    async def _carry_out(self, operation: Operation, work: Work) -> None:
        def say(text: str) -> None:
            if len(operation.lines) < LINES_MAX:
                operation.lines.append((time.time(), text))

        try:
            operation.result = await work(say)
        except ZeroLayerError as error:
            operation.error = str(error)
        except Exception as error:
            # A bug in what an operator asked for must not take the streams of the fleet with it.
            logger.exception("%s failed", operation.what)
            operation.error = f"it failed by a fault of Zero-Layer itself: {error!r}"
        operation.ended_unix = time.time()
        self._note(f"{operation.what}: {operation.error or 'done'}")
