"""Laws of the driver, with engines that only note what they are sent."""

import random

import pytest

from tests.unit.stitch.noting_engines import Bench, Output
from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.outcome import Outcome


async def test_a_stream_of_a_dead_engine_goes_on_elsewhere_with_what_it_had() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    bench.emit(home, request_id="s@0", new_token_ids=[1, 2])
    await bench.die(home)
    order = bench.ports[1 - home].orders[-1]
    assert (order.request_id, list(order.delivered)) == ("s@1", [1, 2])
    assert list(order.sources) == [f"arena-{home}"]


async def test_a_stream_that_gets_a_token_on_each_engine_is_not_what_they_die_of() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    for epoch in range(10):
        home = bench.driver.owned["s"].stream.engine
        assert home is not None
        assert bench.emit(home, request_id=f"s@{epoch}", new_token_ids=[epoch]) == 1
        await bench.die(home)
        bench.driver.apply(home, EngineEvent.RESTARTED)
        bench.ports[home].broken = False
        await bench.up(home)
    assert not bench.failed


async def test_what_a_woken_engine_still_sends_is_fenced() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    bench.driver.apply(home, EngineEvent.STALLED)
    await bench.driver.move_all(home, "stalled", reachable=True)
    assert bench.ports[home].aborted == ["s@0"]
    assert bench.emit(home, request_id="s@0", new_token_ids=[9]) == 0
    assert bench.emit(1 - home, request_id="s@1", new_token_ids=[3]) == 1
    assert bench.driver.owned["s"].stream.delivered == [3]
    assert bench.driver.totals.outputs_fenced == 1


async def test_without_engines_a_stream_waits_and_goes_to_the_first_that_comes_up() -> None:
    bench = Bench()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    assert list(bench.driver.waiting) == ["s"]
    await bench.up(1)
    assert not bench.driver.waiting
    assert [order.request_id for order in bench.ports[1].orders] == ["s@0"]


async def test_a_stream_that_waited_too_long_ends_with_one_error() -> None:
    bench = Bench()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    bench.clock.now_ns += 11_000_000_000
    await bench.driver.expire_waiting(10_000_000_000)
    await bench.driver.expire_waiting(10_000_000_000)
    assert [(lost[0], lost[1]) for lost in bench.failed] == [("s", Outcome.ENGINES_LOST)]
    assert bench.driver.totals.outcomes == {"engines_lost": 1}
    assert not bench.driver.owned


async def test_an_engine_that_cannot_be_reached_is_passed_over() -> None:
    bench = Bench()
    await bench.all_up()
    bench.ports[0].broken = True
    for number in range(4):
        await bench.driver.add(f"s{number}", "request", 5, by_prefill=False)
    assert len(bench.ports[1].orders) == 4


async def test_a_client_that_leaves_has_its_work_aborted_on_the_current_engine() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    await bench.die(home)
    await bench.driver.end_streams(["s"], Outcome.CLIENT_LEFT)
    assert bench.ports[1 - home].aborted == ["s@1"]
    assert bench.driver.totals.outcomes == {"client_left": 1}


async def test_a_request_that_cannot_be_continued_says_so_instead_of_going_on_wrongly() -> None:
    bench = Bench(why_not="its input is live")
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    await bench.die(home)
    assert bench.failed[0][1] is Outcome.NOT_RESUMABLE
    assert "its input is live" in bench.failed[0][2]


async def test_a_stream_that_an_engine_gives_up_by_itself_goes_on_elsewhere() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=False)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    assert bench.emit(home, request_id="s@0", new_token_ids=[], finish_reason="abort") == 0
    await bench.driver.move_abandoned(home)
    assert [order.request_id for order in bench.ports[1 - home].orders] == ["s@1"]


async def test_by_prefill_names_no_snapshot() -> None:
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, by_prefill=True)
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    await bench.die(home)
    assert list(bench.ports[1 - home].orders[-1].sources) == []


async def test_a_stream_that_kills_every_engine_is_given_up_before_it_takes_the_fleet_along() -> (
    None
):
    bench = Bench()
    await bench.all_up()
    await bench.driver.add("poison", "request", 5, by_prefill=False)
    deaths = 0
    while (owned := bench.driver.owned.get("poison")) is not None:
        deaths += 1
        home = owned.stream.engine
        assert home is not None
        await bench.die(home)
        bench.ports[home].broken = False
        bench.driver.apply(home, EngineEvent.RESTARTED)
        await bench.up(home)
    assert deaths == 5
    assert bench.failed[0][1] is Outcome.ENGINES_LOST
    assert "died of this request" in bench.failed[0][2]


@pytest.mark.parametrize("seed", range(20))
async def test_requests_are_conserved_and_tokens_come_once_over_random_deaths(seed: int) -> None:
    """Invariants I1 and I2: each stream ends once, with its own tokens in order."""
    rng, bench = random.Random(seed), Bench(engines=3)
    await bench.all_up()
    wanted = {f"s{number}": rng.randrange(3, 30) for number in range(12)}
    got: dict[str, list[int]] = {name: [] for name in wanted}
    for name in wanted:
        await bench.driver.add(name, "request", 5, by_prefill=False)
    late: list[tuple[int, Output]] = []
    while bench.driver.owned:
        await _one_random_event(rng, bench, wanted, got, late)
    assert got == {name: list(range(count)) for name, count in wanted.items()}
    assert bench.driver.totals.outcomes == {"finished": len(wanted)}
    assert all(not streams for streams in bench.driver.on_engine)
    assert bench.driver.fleet.running_requests.tolist() == [0.0, 0.0, 0.0]


async def _one_random_event(
    rng: random.Random,
    bench: Bench,
    wanted: dict[str, int],
    got: dict[str, list[int]],
    late: list[tuple[int, Output]],
) -> None:
    driver = bench.driver
    if rng.random() < 0.05:
        slot = rng.randrange(3)
        await bench.die(slot)
        bench.ports[slot].broken = False
        driver.apply(slot, EngineEvent.RESTARTED)
        await bench.up(slot)
        return
    if late and rng.random() < 0.3:  # an output that its engine sent before it was given up
        slot, output = late.pop()
        driver.take_outputs(slot, [output])
        return
    name = rng.choice(list(driver.owned))
    stream = driver.owned[name].stream
    assert stream.engine is not None
    token = len(stream.delivered)
    done = "stop" if token + 1 == wanted[name] else None
    output = Output(stream.request_id, [token], done)
    if rng.random() < 0.1:
        late.append((stream.engine, Output(f"{name}@{stream.epoch - 1}", [99])))
    for owned, passed in driver.take_outputs(stream.engine, [output]):
        got[owned.stream.stream_id] += passed.new_token_ids
