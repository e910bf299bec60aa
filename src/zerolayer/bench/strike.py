"""One fault under running streams: aimed at the engine that computes them, struck at a token."""

import asyncio
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerolayer.bench import chaos_signals
from zerolayer.bench.fleet_process import HEAL_POLL_S, HEAL_TIMEOUT_S, all_ready, not_healed
from zerolayer.bench.stream_client import StreamClient, StreamRecord
from zerolayer.core.errors import EngineError

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class MoveSeen:
    """What the fleet says of one move, set beside the strike that caused it."""

    declared_ms: float
    """From the strike until the fleet declared it."""
    declared_ns: int
    """CLOCK_MONOTONIC of that moment."""
    after_declared_ms: float
    """From there until the stream's next token."""
    restored_tokens: int
    """Tokens whose KV came from the snapshot; 0: computed again."""
    source: str = ""
    """The engine that it left."""
    reason: str = ""
    on_purpose: bool = False
    """The fleet moved it unasked by any fault (offload)."""


@dataclass
class Strike:
    """Kill or freeze the engine of some streams once `after_tokens` of all their tokens came."""

    cause: str
    """`kill` or `freeze`."""
    after_tokens: int
    records: list[StreamRecord] = field(default_factory=list)
    row: dict[str, Any] | None = None
    """The victim's row of the status, once it is known."""
    struck_ns: int = 0
    """CLOCK_MONOTONIC; 0 before."""
    struck_unix: float = 0.0
    """The same moment in unix seconds, to set beside what the fleet says of its moves."""
    _begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, record: StreamRecord) -> None:
        """For `StreamRequest.on_tokens`: strikes at once when its moment has come."""
        self._begun.set()
        if self.struck_ns or self.row is None:
            return
        if sum(each.tokens for each in self.records) >= self.after_tokens:
            self.struck_ns, self.struck_unix = time.monotonic_ns(), time.time()
            chaos_signals.send(self.row, SIGNALS[self.cause])

    async def aim(self, client: StreamClient) -> None:
        """Find the engine that computes most of the streams, once one of them has begun."""
        await self._begun.wait()
        status = await client.status()
        engine = chaos_signals.busiest_engine(status)
        if engine is not None:
            self.row = chaos_signals.engine_row(status, engine)

    def moves_of(self, record: StreamRecord, status: Mapping[str, Any]) -> list[MoveSeen]:
        """The moves of one stream, as the fleet's status tells them; earlier ones too."""
        if not record.response_id or not self.struck_ns:
            return []
        seen = []
        for move in status["recent_moves"]:
            if move["external_id"].startswith(record.response_id):
                ms = 1e3 * (move["declared_unix"] - self.struck_unix)
                at_ns = self.struck_ns + int(1e6 * ms)
                seen.append(
                    MoveSeen(
                        ms,
                        at_ns,
                        move["after_declared_ms"],
                        move["restored_tokens"],
                        move["from"],
                        move["reason"],
                        bool(move.get("on_purpose")),
                    )
                )
        return seen

    def wake(self) -> None:
        """SIGCONT for what was frozen."""
        if self.struck_ns and self.row is not None and self.cause == "freeze":
            chaos_signals.send(self.row, signal.SIGCONT)

    def missing_s(self, status: Mapping[str, Any]) -> float:
        """Seconds that the killed engine's capacity was missing, by the fleet's own account."""
        if self.row is None or self.cause != "kill":
            return 0.0
        now = chaos_signals.engine_row(status, self.row["id"])
        return float(now["missing_capacity_s"] - self.row["missing_capacity_s"])

    def still_to_heal(self, status: dict[str, Any]) -> bool:
        """Whether the fleet is not whole again, or still shows the killed engine as it was."""
        if not all_ready(status):
            return True
        if not self.struck_ns or self.row is None or self.cause != "kill":
            return False
        now = chaos_signals.engine_row(status, self.row["id"])
        return bool(now["incarnation"] == self.row["incarnation"])


async def heal(
    client: StreamClient, strike: Strike | None, timeout_s: float = HEAL_TIMEOUT_S
) -> dict[str, Any]:
    """Wake what was frozen, wait until every engine serves; returns the status then.

    Raises `EngineError` when that takes longer than `timeout_s`.
    """
    began = time.monotonic()
    if strike is not None:
        strike.wake()
    while True:
        status = await client.status()
        if not (strike.still_to_heal(status) if strike is not None else not all_ready(status)):
            return status
        if time.monotonic() - began > timeout_s:
            raise EngineError(not_healed(status, timeout_s))
        await asyncio.sleep(HEAL_POLL_S)
