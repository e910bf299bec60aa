"""A driver over engines that only note what they are sent, on a clock that stands still."""

from dataclasses import dataclass, field
from typing import Any

from zerolayer.core.errors import EngineError
from zerolayer.core.outcome import Outcome
from zerolayer.dispatch.policies import LeastRequests
from zerolayer.stitch.driver import DriverHooks, FleetDriver, SubmitOrder


class VirtualClock:
    def __init__(self) -> None:
        self.now_ns = 1

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix(self) -> float:
        return self.now_ns / 1e9


@dataclass
class NotingPort:
    """An engine that is only an inbox; `broken` makes it unreachable."""

    arena: str
    orders: list[SubmitOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    broken: bool = False

    async def submit(self, order: SubmitOrder) -> None:
        if self.broken:
            raise EngineError("gone")
        self.orders.append(order)

    async def abort(self, request_ids: list[str]) -> None:
        if self.broken:
            raise EngineError("gone")
        self.aborted += request_ids


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    restored: int = 0


class Bench:
    """A driver over noting engines, and what it told the client side."""

    def __init__(self, engines: int = 2, why_not: str | None = None) -> None:
        self.clock = VirtualClock()
        self.failed: list[tuple[str, Outcome, str]] = []
        hooks = DriverHooks(
            failed=lambda *lost: self.failed.append(lost),
            restored_tokens=lambda output: output.restored,
            abandoned=lambda output: output.finish_reason == "abort",
            why_not_resumable=lambda request, delivered: why_not,
        )
        self.driver = FleetDriver(engines, LeastRequests(), self.clock, hooks)
        self.ports = [NotingPort(f"arena-{slot}") for slot in range(engines)]

    async def up(self, slot: int) -> None:
        await self.driver.engine_up(slot, self.ports[slot])

    async def all_up(self) -> None:
        for slot in range(len(self.ports)):
            await self.up(slot)

    def emit(self, slot: int, **fields: Any) -> int:
        """Let an engine send an output; returns how many passed the fence."""
        return len(self.driver.take_outputs(slot, [Output(**fields)]))

    async def die(self, slot: int) -> None:
        self.ports[slot].broken = True
        self.driver.engine_gone(slot)
        await self.driver.move_all(slot, "killed", reachable=False)
