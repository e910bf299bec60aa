"""Moves every stream off an engine that goes on living, as gently as it can."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolayer.core.ids import engine_name
from zerolayer.stitch.driver import FleetDriver, Owned
from zerolayer.stitch.moves import MoveRecord

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet

LOOK_EVERY_S = 0.05
#: A stream whose snapshot is still behind (its prompt was just computed) is left until it has
#: caught up, for at most so long; then it moves all the same, and what lacks is computed again.
SNAPSHOT_PATIENCE_S = 10.0
#: How long streams are tried that no engine takes, when they may end where they are.
TARGET_PATIENCE_S = 20.0
#: After the last move: how long its first token may take to come before the report goes out.
ARRIVAL_PATIENCE_S = 30.0
#: How often progress is said, in seconds.
SAY_EVERY_S = 2.0


class MoveTally:
    """Follows the moves that a fleet finishes from now on."""

    def __init__(self, driver: FleetDriver) -> None:
        self.records: list[MoveRecord] = []
        self._driver = driver
        self._seen = driver.totals.moves

    def look(self) -> None:
        """Take over what is new. Often enough, as the driver keeps only the newest moves."""
        new = self._driver.totals.moves - self._seen
        self._seen = self._driver.totals.moves
        if new:
            records = list(self._driver.recent_moves)[-new:]
            self.records += [record for record in records if record.on_purpose]

    def figures(self) -> dict[str, Any]:
        """`moved`, of these `from_snapshot`, and the worst and median silence that a client saw."""
        gaps = sorted(record.gap_ms for record in self.records)
        return {
            "moved": len(gaps),
            "from_snapshot": sum(1 for record in self.records if record.restored_tokens),
            "worst_gap_ms": round(gaps[-1], 1) if gaps else None,
            "median_gap_ms": round(gaps[len(gaps) // 2], 1) if gaps else None,
        }


@dataclass
class Emptying:
    """Empties one engine; nothing new may be placed there meanwhile (`FleetDriver.hold`)."""

    fleet: "Fleet"
    slot: int
    reason: str
    say: Callable[[str], None]
    tally: MoveTally
    stayed: dict[str, str] = field(default_factory=dict)
    """Streams that are still there, and why."""
    _since: dict[str, float] = field(default_factory=dict)
    _said: float = 0.0

    async def run(self, patience_s: float) -> bool:
        """Until it is empty; False when it is not after `patience_s` without any stream leaving."""
        driver = self.fleet.driver
        last_left, left = time.monotonic(), len(driver.on_engine[self.slot])
        while streams := driver.on_engine[self.slot]:
            now = time.monotonic()
            if len(streams) < left:
                last_left, left = now, len(streams)
            await self._move_what_may_go(now)
            if streams and now - last_left > patience_s:
                return False
            self._progress(now)
            await asyncio.sleep(LOOK_EVERY_S)
            self.tally.look()
        return True

    async def arrived(self) -> None:
        """Wait until every stream that is under way has its first token, or ended."""
        driver, end = self.fleet.driver, time.monotonic() + ARRIVAL_PATIENCE_S

        def under_way() -> bool:
            moves = [owned.move for owned in driver.owned.values()]
            return any(move is not None and move.source == self.slot for move in moves)

        while under_way() and time.monotonic() < end:
            await asyncio.sleep(LOOK_EVERY_S)
            self.tally.look()
        self.tally.look()

    def why_stayed(self) -> dict[str, int]:
        """Reasons of those that are still there, with how many each."""
        there = self.fleet.driver.on_engine[self.slot]
        return dict(Counter(self.stayed.get(stream, "not ready to move") for stream in there))

    async def _move_what_may_go(self, now: float) -> None:
        driver = self.fleet.driver
        there = [driver.owned[stream_id] for stream_id in driver.on_engine[self.slot]]
        ready = [owned.stream.stream_id for owned in there if self._may_go(owned, now)]
        if ready:
            reply = await driver.move_streams(self.slot, ready, self.reason)
            self.stayed = reply.stayed

    def _may_go(self, owned: Owned, now: float) -> bool:
        """Whether its snapshot holds all that its client has (and all of its prompt)."""
        since = self._since.setdefault(owned.stream.stream_id, now)
        if now - since > SNAPSHOT_PATIENCE_S:
            return True
        committed = self.fleet.arenas.committed_tokens(owned)
        # The newest token's KV is computed in the step after it.
        return committed is None or committed >= owned.stream.context_tokens - 1

    def _progress(self, now: float) -> None:
        left = len(self.fleet.driver.on_engine[self.slot])
        if left and now - self._said > SAY_EVERY_S:
            self._said = now
            why = ", ".join(f"{count} {what}" for what, count in self.why_stayed().items())
            self.say(f"{engine_name(self.slot)}: {left} streams left ({why})")
