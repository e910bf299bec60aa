"""Waiting for an engine that an operator had started: it serves, or it failed."""

import asyncio
import time
from typing import TYPE_CHECKING

from zerolayer.core.errors import EngineError

if TYPE_CHECKING:
    from zerolayer.engines.fleet import Fleet
    from zerolayer.engines.supervisor import SlotSupervisor

LOOK_EVERY_S = 0.05
#: How long an engine that is down for another reason is waited for before an operation is given up.
OTHERS_TIMEOUT_S = 300.0


async def proved(fleet: "Fleet", supervisor: "SlotSupervisor", incarnation: int) -> None:
    """Wait until the slot's engine has computed its first token as this incarnation or a later one.

    Raises `EngineError` with its last fault when a start fails first. The launcher's own limit
    bounds the wait.
    """
    life = fleet.driver.lives[supervisor.slot]
    while supervisor.live is None or life.incarnation < incarnation:
        if life.incarnation >= incarnation and supervisor.failures:
            raise EngineError(f"{supervisor.record.name}: {supervisor.record.last_fault}")
        await asyncio.sleep(LOOK_EVERY_S)


async def serving(supervisor: "SlotSupervisor") -> None:
    """Wait until the slot has a live engine at all. Raises `EngineError` after a while."""
    began = time.monotonic()
    while supervisor.live is None:
        if time.monotonic() - began > OTHERS_TIMEOUT_S:
            raise EngineError(
                f"{supervisor.record.name} did not come up within {OTHERS_TIMEOUT_S:.0f} s "
                f"({supervisor.record.last_fault or 'it is still starting'})"
            )
        await asyncio.sleep(LOOK_EVERY_S)
