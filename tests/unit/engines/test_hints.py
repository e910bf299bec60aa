"""From a header at the door to the engine that is chosen: labels of domains and who asks for them.

The door and the driver are the real ones; engines only note what they are sent.
"""

from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.unit.stitch.noting_engines import Bench, NotingPort
from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.fleet_state import EngineReport
from zerolayer.dispatch.choices import PlacementChoices, parse_domains
from zerolayer.engines.placing import EVERY_NS, Placing
from zerolayer.gateway.placement import PlacementHeaders

PRECISION, MODEL = "x-precision-preference", "x-model-hint"


class Floor:
    """A fleet behind its door. A busy engine is one where a request that asks for nothing does not
    go while another one is idle."""

    def __init__(self, domains: str, engines: int) -> None:
        self.bench = Bench(engines)
        self.driver: Any = self.bench.driver
        self.placing = Placing(
            PlacementChoices(domains=parse_domains(domains)), engines, self.bench.clock
        )
        self.driver._policy = self.placing.policy
        self.streams = 0

    async def up(self, slot: int) -> None:
        await self.bench.up(slot)
        self.placing.tick(self.driver, self.bench.clock.now_ns)

    async def all_up(self, busy: tuple[int, ...]) -> "Floor":
        for slot in range(len(self.bench.ports)):
            await self.up(slot)
        for slot in busy:
            self.occupy(slot)
        return self

    def occupy(self, slot: int) -> None:
        for _ in range(8):
            self.driver.fleet.placed(slot, 50)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.streams += 1
        wishes = self.placing.wishes()
        await self.driver.add(f"s{self.streams}", "request", 20, False, wishes)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def engine_for(self, **headers: str) -> str:
        """What the response says of its engine, `e0` and so on."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = [(n.encode(), v.encode()) for n, v in {"x-zerolayer-explain": "1", **named}.items()]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "headers": raw}
        await PlacementHeaders(self.serve)(scope, receive, send)
        line: str = dict(sent[0]["headers"])[b"x-zerolayer-decision"].decode()
        return line.partition(";")[0].removeprefix("engine=")


async def floor(domains: str = "fp8+cheap=0;bf16=1;2") -> Floor:
    return await Floor(domains, 3).all_up(busy=(0, 1))


@pytest.mark.parametrize(
    ("header", "value", "engine"),
    [
        (PRECISION, "fp8", "e0"),
        (PRECISION, "BF16", "e1"),
        (MODEL, "cheap", "e0"),
        (MODEL, "bf16", "e1"),
    ],
)
async def test_a_hint_that_names_a_label_changes_the_engine(
    header: str, value: str, engine: str
) -> None:
    assert await (await floor()).engine_for() == "e2"
    assert await (await floor()).engine_for(**{header: value}) == engine


@pytest.mark.parametrize(
    ("header", "value"),
    [(PRECISION, "int4"), (PRECISION, "auto"), (MODEL, "auto"), (MODEL, "Qwen/Qwen3-8B")],
)
async def test_a_hint_that_names_no_label_changes_nothing(header: str, value: str) -> None:
    assert await (await floor()).engine_for(**{header: value}) == "e2"
    assert await (await floor("0;1;2")).engine_for(x_precision_preference="fp8") == "e2"


async def test_a_hint_is_a_wish_and_gives_way_to_room() -> None:
    full = await floor()
    full.driver.fleet.report(0, EngineReport(0.99, 0, 0.05, 0.0015, 0.0005))
    assert await full.engine_for(x_precision_preference="fp8") == "e2"
    full.driver.apply(0, EngineEvent.STALLED)
    assert await full.engine_for(x_model_hint="cheap") == "e2"


async def test_labels_stay_when_an_engine_restarts() -> None:
    each = await floor()
    await each.bench.die(0)
    assert await each.engine_for(x_model_hint="cheap") == "e2"
    each.driver.apply(0, EngineEvent.RESTARTED)
    each.bench.ports[0].broken = False
    await each.up(0)
    each.occupy(0)
    assert await each.engine_for(x_model_hint="cheap") == "e0"


async def test_labels_stay_when_the_fleet_is_scaled_and_come_to_slots_that_were_named_before() -> (
    None
):
    each = await Floor("fp8=0;cheap=1,3", 3).all_up(busy=(0, 1))
    each.driver.engine_gone(2)
    each.driver.remove_engine()
    for slot in (2, 3):  # two changes between two ticks: one down, two up
        assert each.driver.add_engine() == slot
    each.bench.ports[2:] = [NotingPort("arena-2b"), NotingPort("arena-3")]
    each.placing.tick(each.driver, EVERY_NS)
    for slot in (2, 3):
        await each.up(slot)
    each.occupy(3)
    each.driver.apply(1, EngineEvent.STALLED)
    assert each.driver.fleet.domain.tolist() == [0, 1, 2, 1]
    assert await each.engine_for() == "e2"
    assert await each.engine_for(x_precision_preference="fp8") == "e0"
    assert await each.engine_for(x_model_hint="cheap") == "e3"
