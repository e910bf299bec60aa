"""A fleet for orders: the real driver; engines start when their supervisors are told to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.unit.stitch.noting_engines import Bench, NotingPort
from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.ids import engine_name
from zerolayer.engines.gpus import NO_GPUS
from zerolayer.engines.operations import Operation, Operations
from zerolayer.engines.steering import Steering
from zerolayer.stitch.driver import Owned


@dataclass
class Record:
    name: str
    last_fault: str = ""
    start_seconds: float = 0.1


@dataclass
class FakeSupervisor:
    """Restarts its engine in the next turn of the loop; `fails` start attempts fail first."""

    fleet: "FakeFleet"
    slot: int
    live: object | None = None
    failures: int = 0
    fails: int = 0
    started_with: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = Record(engine_name(self.slot))

    async def start(self) -> None:
        """Until it is up."""
        while True:
            config = self.fleet.trials.pop(self.slot, self.fleet.configs[self.slot])
            self.started_with.append(config)
            await asyncio.sleep(0)
            if self.fails == 0:
                break
            self.fails -= 1
            self.failures += 1
            self.record.last_fault = "no such memory"
            self.fleet.driver.apply(self.slot, EngineEvent.DIED)
            await asyncio.sleep(0.01)
            self.fleet.driver.apply(self.slot, EngineEvent.RESTARTED)
        self.live = object()
        await self.fleet.driver.engine_up(self.slot, self.fleet.ports[self.slot])

    def end(self, why: str, *, retire: bool = False) -> None:
        self.live, self.failures = None, 0
        self.fleet.log.append(f"{self.record.name} {why}")
        self.fleet.driver.engine_gone(self.slot)
        if not retire:
            self.fleet.spawn(self._restart())

    def bring_back(self) -> None:
        self.failures = 0
        self.fleet.spawn(self._restart())

    async def _restart(self) -> None:
        await self.fleet.driver.move_all(self.slot, "ended", reachable=True)
        self.fleet.driver.apply(self.slot, EngineEvent.RESTARTED)
        await self.start()


class FakeArenas:
    def __init__(self) -> None:
        self.behind: set[str] = set()

    def committed_tokens(self, owned: Owned) -> int | None:
        behind = owned.stream.stream_id in self.behind
        return 0 if behind else owned.stream.context_tokens


class FakeFleet:
    """What orders need of a `Fleet`."""

    def __init__(self, engines: int) -> None:
        self.bench = Bench(engines)
        self.driver = self.bench.driver
        self.ports = self.bench.ports
        self.configs = ["old"] * engines
        self.trials: dict[int, str] = {}
        self.arguments: tuple[str, ...] = ()
        self.settings = SimpleNamespace(gpus=NO_GPUS)
        self.arenas = FakeArenas()
        self.log: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.supervisors = [FakeSupervisor(self, slot) for slot in range(engines)]
        self.next_fails = 0
        self.operations = Operations(self.log.append)
        fleet: Any = self
        self.steering = Steering(fleet, self.operations)

    def spawn(self, job: Any) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def all_up(self) -> None:
        for supervisor in self.supervisors:
            await supervisor.start()

    def add_slot(self) -> FakeSupervisor:
        slot = self.driver.add_engine()
        self.ports.append(NotingPort(f"arena-{slot}"))
        self.configs.append(self.configs[0])
        self.supervisors.append(FakeSupervisor(self, slot, fails=self.next_fails))
        self.spawn(self.supervisors[slot].start())
        return self.supervisors[slot]

    async def remove_slot(self, why: str) -> None:
        for task in list(self.tasks):
            task.cancel()
        supervisor = self.supervisors.pop()
        if supervisor.live is not None:
            supervisor.end(why, retire=True)
        self.driver.remove_engine()
        self.ports.pop()
        self.configs.pop()

    async def carried_out(self, order: Callable[[], Operation]) -> Operation:
        """Give an order and wait until it has ended, while moved streams get their tokens."""
        job = asyncio.ensure_future(self.operations.run())
        operation = order()
        try:
            while operation.state == "running":
                await asyncio.sleep(0)
                self.give_tokens()
        finally:
            job.cancel()
        return operation

    def give_tokens(self) -> None:
        """One token for every stream that waits for its first one after a move."""
        for owned in list(self.driver.owned.values()):
            engine = owned.stream.engine
            if owned.move is not None and engine is not None:
                self.bench.clock.now_ns += 1_000_000
                self.bench.emit(
                    engine, request_id=owned.stream.request_id, new_token_ids=[7], restored=5
                )
