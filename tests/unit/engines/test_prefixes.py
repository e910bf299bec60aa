"""What a prompt finds where: the real driver and policy over engines that only note."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.stitch.noting_engines import NotingPort, VirtualClock
from zerolayer.core.outcome import Outcome
from zerolayer.dispatch.policies import PlacementRequest
from zerolayer.dispatch.policies.zerolayer import ZeroLayer
from zerolayer.dispatch.snapshot_load import held_by_snapshot
from zerolayer.engines.prefixes import Prefixes
from zerolayer.stitch.driver import DriverHooks, FleetDriver, Owned

BLOCK = 32
BLOCKS = 1_000
PROMPT = 1_024
SYSTEM = list(range(512))
SECOND = 10**9


def request_of(stream_id: str, tokens: list[int] | None, **fields: Any) -> Any:
    params = SimpleNamespace(skip_reading_prefix_cache=fields.pop("skips", False))
    return SimpleNamespace(
        **{
            "request_id": stream_id, "prompt_token_ids": tokens, "prompt_embeds": None,
            "mm_features": None, "sampling_params": params, "pooling_params": None,
            "lora_request": None, "cache_salt": None, **fields,
        }
    )  # fmt: skip


def prompt(own: int) -> list[int]:
    """A prompt that begins as all of them and goes on as no other."""
    return [*SYSTEM, *[10_000 + own] * (PROMPT - len(SYSTEM))]


class Fleet:
    """The parts of a fleet that place streams."""

    def __init__(self, engines: int = 2, *, caches: bool = True, snapshots: bool = True) -> None:
        self.prefixes = Prefixes(snapshots=snapshots)
        hooks = DriverHooks(
            failed=lambda *_: None,
            restored_tokens=lambda output: 0,
            abandoned=lambda output: False,
            why_not_resumable=lambda request, delivered: None,
            refined=self._refined,
        )
        self.clock = VirtualClock()
        self.driver = FleetDriver(engines, ZeroLayer(), self.clock, hooks)
        self.ports = [NotingPort(f"arena-{slot}") for slot in range(engines)]
        self.cache = SimpleNamespace(
            block_size=BLOCK, num_gpu_blocks=BLOCKS, enable_prefix_caching=caches
        )

    def _refined(self, request: Any, wanted: PlacementRequest) -> PlacementRequest:
        driver = self.driver
        owned = driver.owned[request.request_id]
        return self.prefixes.refined(owned, wanted, driver.fleet)

    async def up(self) -> None:
        for slot, port in enumerate(self.ports):
            self.driver.fleet.set_capacity(slot, requests_max=16, kv_tokens=BLOCK * BLOCKS)
            self.prefixes.engine_up(slot, self.cache)
            await self.driver.engine_up(slot, port)

    async def add(self, stream_id: str, tokens: list[int], **fields: Any) -> int:
        """Place a stream; returns the engine that it went to."""
        request = request_of(stream_id, tokens, **fields)
        by_prefill = fields.get("by_prefill", False)
        self.clock.now_ns += 10 * SECOND
        load, streams = self.driver.fleet, self.driver.placed_streams()
        self.driver.outlook.refresh(self.clock.now_ns, load, streams)
        await self.driver.add(stream_id, request, len(tokens), by_prefill)
        return self.engine_of(stream_id)

    def engine_of(self, stream_id: str) -> int:
        engine = self.driver.owned[stream_id].stream.engine
        assert engine is not None
        return engine

    def emit(self, stream_id: str, tokens: list[int], cached: int | None = 0, **end: Any) -> None:
        """The stream's engine sends tokens, and with the first of them what it had cached."""
        owned = self.driver.owned[stream_id]
        stats = SimpleNamespace(num_cached_tokens=cached) if not owned.decoding else None
        output = SimpleNamespace(
            request_id=owned.stream.request_id, new_token_ids=tokens,
            prefill_stats=stats if cached is not None else None, **{"finish_reason": None, **end},
        )  # fmt: skip
        slot = self.engine_of(stream_id)
        for passed, sent in self.driver.take_outputs(slot, [output]):
            self.prefixes.noted(slot, passed, sent)

    async def one_answer(self, stream_id: str, tokens: list[int], **fields: Any) -> int:
        """A whole stream of two tokens; returns its engine."""
        engine = await self.add(stream_id, tokens, **fields)
        self.emit(stream_id, [1])
        self.emit(stream_id, [2], finish_reason="stop")
        return engine

    def wanted(self, stream_id: str) -> PlacementRequest:
        """As the policy gets it."""
        return self.driver._wanted(self.driver.owned[stream_id])

    def held(self, request: Any) -> dict[int, int]:
        """What a new stream with this request would find."""
        wanted = PlacementRequest(PROMPT)
        owned = Owned(SimpleNamespace(delivered=[], epoch=0), request)  # type: ignore[arg-type]
        return dict(self.prefixes.refined(owned, wanted, self.driver.fleet).held_tokens or {})


@pytest.fixture
async def fleet() -> Fleet:
    made = Fleet()
    await made.up()
    return made


async def test_prompts_with_a_common_beginning_go_to_the_same_engine_when_load_is_equal(
    fleet: Fleet,
) -> None:
    first = await fleet.one_answer("first", prompt(0))
    for number in range(1, 6):
        assert await fleet.one_answer(f"s{number}", prompt(number)) == first
    assert await fleet.one_answer("stranger", [7] * PROMPT) != first


async def test_a_held_prefix_does_not_lead_to_an_overloaded_engine(fleet: Fleet) -> None:
    first = await fleet.one_answer("first", prompt(0))
    load = fleet.driver.fleet
    for _ in range(20):
        load.placed(first, 1_000)
    assert await fleet.add("second", prompt(1)) != first


async def test_a_prompt_is_held_from_its_first_token_on(fleet: Fleet) -> None:
    engine = await fleet.add("first", prompt(0))
    assert fleet.held(request_of("x", prompt(1))) == {}
    fleet.emit("first", [1])
    assert fleet.held(request_of("x", prompt(1))) == {engine: len(SYSTEM)}
    assert fleet.held(request_of("x", prompt(0))) == {engine: PROMPT - BLOCK}


async def test_the_next_turn_of_a_talk_finds_the_answer_too(fleet: Fleet) -> None:
    engine, answer = await fleet.add("first", prompt(0)), list(range(5_000, 5_200))
    fleet.emit("first", answer[:1])
    fleet.emit("first", answer[1:])
    fleet.prefixes.ended(engine, fleet.driver.owned["first"])  # a stop string, or the client left
    await fleet.driver.end_streams(["first"], Outcome.CLIENT_LEFT)
    held = fleet.held(request_of("x", [*prompt(0), *answer, 1, 2, 3]))
    assert PROMPT + len(answer) - 3 * BLOCK < held[engine] < PROMPT + len(answer)


async def test_an_engine_that_starts_again_or_is_emptied_holds_nothing(fleet: Fleet) -> None:
    engine = await fleet.one_answer("first", prompt(0))
    fleet.prefixes.engine_up(engine, fleet.cache)
    assert fleet.held(request_of("x", prompt(0))) == {}
    await fleet.one_answer("second", prompt(0))
    fleet.prefixes.all_emptied()
    assert fleet.held(request_of("x", prompt(0))) == {}
    engine = await fleet.one_answer("third", prompt(0))
    assert fleet.held(request_of("x", prompt(0))) == {engine: PROMPT - BLOCK}


async def test_nothing_is_held_for_what_reads_no_cache_or_is_not_made_of_tokens(
    fleet: Fleet,
) -> None:
    engine = await fleet.one_answer("first", prompt(0))
    for others in (
        {"skips": True},
        {"mm_features": ["image"]},
        {"prompt_embeds": object()},
        {"cache_salt": "other"},
        {"lora_request": SimpleNamespace(lora_name="adapter")},
    ):
        assert fleet.held(request_of("x", prompt(0), **others)) == {}
    assert fleet.held(request_of("x", None, prompt_embeds=object())) == {}
    assert fleet.held(request_of("x", prompt(0), cache_salt="")) == {engine: PROMPT - BLOCK}


async def test_without_prefix_caching_there_is_no_index() -> None:
    fleet = Fleet(caches=False)
    await fleet.up()
    await fleet.add("first", prompt(0))
    fleet.emit("first", [1])
    assert fleet.driver.owned["first"].prefix is None
    assert fleet.held(request_of("x", prompt(0))) == {}
    assert fleet.prefixes.hits.prompts == 0


async def test_a_moved_stream_finds_its_snapshot_on_every_engine_and_no_cached_prefix(
    fleet: Fleet,
) -> None:
    source = await fleet.add("s", prompt(0))
    await fleet.driver.move_all(source, "killed", reachable=False)
    assert fleet.wanted("s").held_tokens is None  # without a token there may be no snapshot
    fleet.emit("s", [1, 2, 3])
    held = held_by_snapshot(fleet.driver.fleet, PROMPT + 2)
    assert fleet.wanted("s").held_tokens == held
    await fleet.driver.move_all(fleet.engine_of("s"), "killed", reachable=False)
    assert fleet.driver.owned["s"].waiting_tokens == PROMPT + 3 - held[0]
    assert fleet.held(request_of("x", prompt(0))) == {}  # its blocks are under a salt of their own


async def test_without_snapshots_a_moved_stream_finds_nothing() -> None:
    fleet = Fleet(snapshots=False)
    await fleet.up()
    source = await fleet.add("s", prompt(0))
    fleet.emit("s", [1, 2, 3])
    await fleet.driver.move_all(source, "killed", reachable=False)
    assert fleet.driver.owned["s"].waiting_tokens == PROMPT + 3


async def test_a_stream_that_goes_on_by_prefill_finds_what_caches_hold(fleet: Fleet) -> None:
    other = await fleet.one_answer("first", prompt(0))
    fleet.driver.hold(other)
    source = await fleet.add("s", prompt(1), by_prefill=True)
    fleet.emit("s", [1])
    await fleet.driver.let_go(other)
    await fleet.driver.move_all(source, "killed", reachable=False)
    assert fleet.driver.owned["s"].waiting_tokens == PROMPT + 1 - len(SYSTEM)


async def test_hits_are_counted_beside_what_engines_really_had(fleet: Fleet) -> None:
    await fleet.one_answer("first", prompt(0))
    await fleet.add("second", prompt(1))
    fleet.emit("second", [1], cached=480)
    hits = fleet.prefixes.hits
    assert (hits.prompts, hits.prompt_tokens) == (2, 2 * PROMPT)
    assert (hits.predicted_tokens, hits.actual_tokens, hits.error_tokens) == (512, 480, 32)
    await fleet.add("third", prompt(2))
    fleet.emit("third", [1], cached=None)  # vLLM was told to keep no statistics
    assert hits.prompts == 2


async def test_an_engine_that_had_far_less_than_expected_lost_what_is_older(fleet: Fleet) -> None:
    engine = await fleet.one_answer("older", [3] * PROMPT)
    fleet.driver.hold(1 - engine)
    await fleet.one_answer("first", prompt(0))
    await fleet.add("second", prompt(1))
    fleet.emit("second", [1], cached=0)
    assert fleet.held(request_of("x", [3] * PROMPT)) == {}
    assert fleet.held(request_of("x", prompt(1))) == {engine: PROMPT - BLOCK}


async def test_engines_that_come_back_with_other_blocks_begin_a_new_index(fleet: Fleet) -> None:
    await fleet.add("open", prompt(0))
    fleet.cache.block_size = 16
    for slot in range(2):
        fleet.prefixes.engine_up(slot, fleet.cache)
    fleet.emit("open", [1])
    assert list(fleet.held(request_of("x", prompt(0))).values()) == [PROMPT - 16]
