"""Keeps one slot of the fleet filled: starts its engine, notices its end, starts it again."""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm.logger import init_logger

from zerolayer.core.engine_state import EngineEvent, EngineState
from zerolayer.core.errors import EngineError
from zerolayer.core.ids import engine_name
from zerolayer.engines.launcher import (
    TERMINATE_GRACE_S,
    LaunchedEngine,
    Launcher,
    LaunchOrder,
    exit_text,
    kill_now,
    kill_tree,
    last_words,
    watch_pids,
)
from zerolayer.engines.leftovers import remove_shared_memory
from zerolayer.engines.lifetime import let_die_quietly
from zerolayer.engines.port import VllmPort
from zerolayer.engines.processes import ProcessTree
from zerolayer.stitch.driver import FleetDriver

logger = init_logger("vllm.zerolayer.supervisor")

#: Deaths in a row, of engines that had not proved themselves, before an engine is set aside.
GIVE_UP_AFTER = 5
#: An engine that has served this long, or computed a step beyond the one of its admission and a
#: prefill, has proved itself: somebody who kills it again and again does not make it a bad one.
LIVED_S = 10.0
PROVEN_STEPS = 3
#: So many deaths within DEATHS_WITHIN_S set an engine aside whatever it did in between.
DEATHS_MAX = 40
DEATHS_WITHIN_S = 600.0
#: A new engine must compute its first token within this time to be admitted.
FIRST_TOKEN_TIMEOUT_S = 120.0
#: Between a death and the clean-up after it, in seconds.
SETTLE_S = 0.5
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0


def backoff_s(failures: int) -> float:
    """Seconds to wait before a restart: none after the first death, then 1, 2, 4 ... 30."""
    if failures <= 1:
        return 0.0
    return min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** (failures - 2))


@dataclass
class SlotRecord:
    """What the status shows of a slot beside its life."""

    name: str
    restarts: int = 0
    last_fault: str = ""
    suspicions: int = 0  # times that a step was late; most pass by themselves
    up_since: float = 0.0  # unix seconds, 0 while it is not up
    start_seconds: float = 0.0
    down_since_ns: int = 0  # monotonic, 0 while it is up
    missing_capacity_s: float = 0.0  # of all its outages that are over


@dataclass
class LiveEngine:
    """One incarnation that is up."""

    launched: LaunchedEngine
    port: VllmPort
    tree: ProcessTree
    ended: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, why: str) -> None:
        """Note the first reason for which this incarnation ends."""
        if not self.ended.done():
            self.ended.set_result(why)


class SupervisorHooks(Protocol):
    """What a supervisor needs from the fleet."""

    def order(self, slot: int, incarnation: int) -> LaunchOrder:
        """How to launch the engine of a slot."""

    def connect(self, slot: int, launched: LaunchedEngine) -> VllmPort:
        """Lead the engine's outputs to the fleet."""

    def note(self, slot: int, what: str) -> None:
        """Add an event to the fleet's log."""

    def steps(self, slot: int) -> int:
        """Steps that the slot's newest engine has computed."""


class SlotSupervisor:
    """The one owner of a slot's engine process. `run` is a task of the fleet's task group."""

    def __init__(
        self, slot: int, launcher: Launcher, driver: FleetDriver, hooks: SupervisorHooks
    ) -> None:
        self.slot = slot
        self.record = SlotRecord(engine_name(slot), down_since_ns=time.monotonic_ns())
        self.live: LiveEngine | None = None
        self.first_try_over = asyncio.Event()
        self._launcher = launcher
        self._driver = driver
        self._hooks = hooks
        self._failures = 0
        self._deaths: deque[float] = deque(maxlen=DEATHS_MAX)
        self._wake = asyncio.Event()
        self._ended_for = ""  # why the operator ended this incarnation; empty: nobody did
        self._retired = False

    async def run(self) -> None:
        """Start, watch, restart; until the slot is retired."""
        while True:
            try:
                await self._one_life()
            except EngineError as cause:
                self._note_fault(str(cause))
                self._driver.apply(self.slot, EngineEvent.DIED)
            finally:
                self.first_try_over.set()
            if self._retired:
                return
            await self._pause_before_restart()
            self._driver.apply(self.slot, EngineEvent.RESTARTED)
            self.record.restarts += 1

    def bring_back(self) -> None:
        """The operator wants an engine that was set aside to be tried again."""
        self._failures = 0
        self._deaths.clear()
        self._wake.set()

    @property
    def failures(self) -> int:
        """Starts that failed in a row, and deaths of engines that had not proved themselves."""
        return self._failures

    def end(self, why: str, *, retire: bool = False) -> None:
        """End the live engine as the operator wants it: no fault, and no grudge.

        It is started again at once; with `retire`, `run` returns instead. Its streams should have
        been moved before; what is still there waits for an engine.
        """
        assert self.live is not None, "only a live engine is ended; a start is cancelled"
        self._retired = self._retired or retire
        self._ended_for = why
        self.live.end(why)

    async def _one_life(self) -> None:
        self._ended_for = ""
        incarnation = self._driver.lives[self.slot].incarnation
        order = self._hooks.order(self.slot, incarnation)
        self._hooks.note(self.slot, f"starting (incarnation {incarnation})")
        launched = await self._launcher.start(order)
        try:
            await self._serve(launched)
        finally:
            await asyncio.shield(self._bury(launched))

    async def _serve(self, launched: LaunchedEngine) -> None:
        port = self._hooks.connect(self.slot, launched)
        live = LiveEngine(launched, port, ProcessTree(launched.pids))
        unwatch = watch_pids(launched.pids, lambda pid: live.end(_who_ended(launched, pid)))
        try:
            await self._first_token(live)
            self.live = live
            self._came_up(launched)
            await self._driver.engine_up(self.slot, port)
            self.first_try_over.set()
            why = await live.ended
            let_die_quietly(launched.pids)
            self.live = None
            if self._ended_for:
                await self._end_as_ordered(launched, why)
            else:
                await self._end_as_found(launched, why)
        finally:
            unwatch()
            self.live = None
            live.tree.close()

    async def _end_as_found(self, launched: LaunchedEngine, why: str) -> None:
        self._went_down(why)
        # Its streams find their new places even if this slot is taken away meanwhile.
        await asyncio.shield(self._driver.move_all(self.slot, why, reachable=False))
        kill_now(launched.pids)
        # The moved streams load their pages now; tidying and restarting can wait for them.
        await asyncio.sleep(SETTLE_S)
        self._explain(launched, why)

    async def _end_as_ordered(self, launched: LaunchedEngine, why: str) -> None:
        self._driver.engine_gone(self.slot)
        self._failures = 0
        self.record.down_since_ns, self.record.up_since = time.monotonic_ns(), 0.0
        await self._driver.move_all(self.slot, why, reachable=True)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, kill_tree, launched.process, TERMINATE_GRACE_S)
        self._hooks.note(self.slot, f"ended: {why}")

    async def _first_token(self, live: LiveEngine) -> None:
        """Admit the engine only once it has computed a token (its first steps are its slowest)."""
        probe = asyncio.ensure_future(self._proves_itself(live.port))
        try:
            either: set[asyncio.Future[Any]] = {probe, live.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if live.ended.done():
                raise EngineError(f"ended before its first token: {live.ended.result()}")
            if not probe.result():
                raise EngineError(f"computed no token within {FIRST_TOKEN_TIMEOUT_S:.0f} s")
        finally:
            probe.cancel()

    @staticmethod
    async def _proves_itself(port: VllmPort) -> bool:
        return await port.answers() and await port.computes(FIRST_TOKEN_TIMEOUT_S)

    def _came_up(self, launched: LaunchedEngine) -> None:
        record, now = self.record, time.monotonic_ns()
        record.missing_capacity_s += (now - record.down_since_ns) / 1e9
        record.down_since_ns, record.up_since = 0, time.time()
        record.start_seconds = launched.start_seconds
        self._hooks.note(self.slot, f"ready after {launched.start_seconds:.1f} s")

    def _went_down(self, why: str) -> None:
        """First of all nothing may be sent there any more."""
        self._driver.engine_gone(self.slot)
        lived_s = time.time() - self.record.up_since
        proven = lived_s > LIVED_S or self._hooks.steps(self.slot) >= PROVEN_STEPS
        self._failures = 1 if proven else self._failures + 1
        self._deaths.append(time.monotonic())
        self.record.down_since_ns, self.record.up_since = time.monotonic_ns(), 0.0
        self.record.last_fault = why

    def _explain(self, launched: LaunchedEngine, why: str) -> None:
        """Say how the engine ended, with its own last words where it had any."""
        words = exit_text(launched.process)
        said = last_words(launched.order.log_path) if "exit code" in words else ""
        self.record.last_fault = f"{why} ({words}){': ' + said if said else ''}"
        self._hooks.note(self.slot, f"ended: {self.record.last_fault}")

    def _note_fault(self, why: str) -> None:
        self._failures += 1
        self.record.last_fault = why
        self._hooks.note(self.slot, why)
        logger.error("Engine %s: %s", self.record.name, why)

    async def _bury(self, launched: LaunchedEngine) -> None:
        """End what is left of the process tree and release what it held."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, kill_tree, launched.process)
        with contextlib.suppress(Exception):  # vLLM's own clean-up of a client without an engine
            launched.client.shutdown(timeout=0)
        remove_shared_memory(launched.shared_memory)
        launched.order.clean_up()

    async def _pause_before_restart(self) -> None:
        if (deaths := self._too_many_deaths()) > 0:
            self._driver.apply(self.slot, EngineEvent.GAVE_UP)
            self._hooks.note(self.slot, f"set aside after {deaths} deaths in a row")
            logger.error("Engine %s is set aside: %s", self.record.name, self.record.last_fault)
            self._wake.clear()
            await self._wake.wait()
            return
        await asyncio.sleep(backoff_s(self._failures))

    def _too_many_deaths(self) -> int:
        """How many deaths are too many; 0 while they are not."""
        if self._failures >= GIVE_UP_AFTER:
            return self._failures
        full = len(self._deaths) == DEATHS_MAX
        soon = full and time.monotonic() - self._deaths[0] < DEATHS_WITHIN_S
        return DEATHS_MAX if soon else 0

    @property
    def ends_as_ordered(self) -> bool:
        """Whether an order, and no fault, ends the engine that is there."""
        return bool(self._ended_for)

    @property
    def state(self) -> EngineState:
        """Where the slot's engine is in its life."""
        return self._driver.lives[self.slot].state


def _who_ended(launched: LaunchedEngine, pid: int) -> str:
    """Which process of an engine ended, in words. Must not wait: streams are to be moved."""
    return "its core ended" if pid == launched.process.pid else f"its worker (pid {pid}) ended"
