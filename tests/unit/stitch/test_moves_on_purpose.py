"""Laws of moves that no fault asked for: drain, roll and offload."""

import random

import pytest

from tests.unit.stitch.noting_engines import Bench, NotingPort, Output
from zerolayer.core.engine_state import EngineEvent, EngineState
from zerolayer.core.limits import MOVES_PER_STREAM_MAX


async def placed(bench: Bench, stream_id: str = "s") -> int:
    """Add a stream with one token at its client; returns its engine."""
    await bench.driver.add(stream_id, "request", 5, by_prefill=False)
    home = bench.driver.owned[stream_id].stream.engine
    assert home is not None
    assert bench.emit(home, request_id=f"{stream_id}@0", new_token_ids=[1]) == 1
    return home


def state_of(bench: Bench, slot: int) -> EngineState:
    return bench.driver.lives[slot].state


async def test_a_chosen_stream_goes_on_elsewhere_and_its_old_copy_is_aborted() -> None:
    bench = Bench()
    await bench.all_up()
    home = await placed(bench)
    reply = await bench.driver.move_streams(home, ["s"], "drain")
    assert (reply.moved, reply.stayed) == (("s",), {})
    order = bench.ports[1 - home].orders[-1]
    assert (order.request_id, list(order.delivered)) == ("s@1", [1])
    assert list(order.sources) == [f"arena-{home}"]
    assert bench.ports[home].aborted == ["s@0"]
    assert bench.emit(home, request_id="s@0", new_token_ids=[9]) == 0
    bench.clock.now_ns += 50_000_000
    assert bench.emit(1 - home, request_id="s@1", new_token_ids=[2], restored=5) == 1
    record = bench.driver.recent_moves[-1]
    assert (record.on_purpose, record.gap_ms, record.reason) == (True, 50.0, "drain")
    assert bench.driver.totals.moves_on_purpose == 1


async def test_without_a_target_a_stream_stays_untouched() -> None:
    bench = Bench()
    await bench.up(0)
    home = await placed(bench)
    reply = await bench.driver.move_streams(home, ["s"], "drain")
    assert (reply.moved, list(reply.stayed)) == ((), ["s"])
    assert bench.driver.owned["s"].stream.epoch == 0
    assert bench.ports[home].aborted == []
    assert bench.emit(home, request_id="s@0", new_token_ids=[2]) == 1


async def test_a_stream_that_cannot_be_continued_stays_instead_of_ending() -> None:
    bench = Bench(why_not="its input is live")
    await bench.all_up()
    home = await placed(bench)
    reply = await bench.driver.move_streams(home, ["s"], "drain")
    assert reply.stayed == {"s": "its input is live"}
    assert not bench.failed
    assert bench.emit(home, request_id="s@0", new_token_ids=[2]) == 1


async def test_a_stream_whose_target_cannot_be_reached_goes_back_where_it_was() -> None:
    bench = Bench()
    await bench.all_up()
    home = await placed(bench)
    bench.ports[1 - home].broken = True
    bench.driver.hold(home)  # a draining engine takes its own stream back
    reply = await bench.driver.move_streams(home, ["s"], "drain")
    assert list(reply.stayed) == ["s"]
    assert bench.driver.owned["s"].stream.engine == home
    assert bench.ports[home].aborted == ["s@0"]
    assert bench.emit(home, request_id="s@2", new_token_ids=[2]) == 1
    assert bench.driver.owned["s"].stream.delivered == [1, 2]


async def test_a_named_target_is_obeyed_or_the_stream_stays() -> None:
    bench = Bench(engines=3)
    await bench.all_up()
    home = await placed(bench)
    target = max({0, 1, 2} - {home})
    bench.driver.hold(target)
    reply = await bench.driver.move_streams(home, ["s"], "offload", target)
    assert list(reply.stayed) == ["s"]
    await bench.driver.let_go(target)
    reply = await bench.driver.move_streams(home, ["s"], "offload", target)
    assert reply.moved == ("s",)
    assert bench.driver.owned["s"].stream.engine == target


async def test_moves_on_purpose_never_use_up_a_stream() -> None:
    bench = Bench()
    await bench.all_up()
    home = await placed(bench)
    for _ in range(3 * MOVES_PER_STREAM_MAX):
        assert (await bench.driver.move_streams(home, ["s"], "roll")).moved
        home = 1 - home
    assert bench.driver.owned["s"].moves == 0
    assert bench.driver.owned["s"].deaths_without_token == 0


async def test_a_held_engine_gets_nothing_new_even_after_a_restart() -> None:
    bench = Bench()
    await bench.all_up()
    bench.driver.hold(0)
    for number in range(4):
        await bench.driver.add(f"s{number}", "request", 5, by_prefill=False)
    assert bench.ports[0].orders == []
    await bench.die(0)
    bench.driver.apply(0, EngineEvent.RESTARTED)
    bench.ports[0].broken = False
    await bench.up(0)
    assert state_of(bench, 0) is EngineState.DRAINING
    await bench.driver.let_go(0)
    await bench.driver.add("new", "request", 5, by_prefill=False)
    assert [order.request_id for order in bench.ports[0].orders] == ["new@0"]


async def test_a_held_engine_that_was_stalled_drains_when_it_is_back() -> None:
    bench = Bench()
    await bench.all_up()
    bench.driver.apply(0, EngineEvent.STALLED)
    bench.driver.hold(0)
    assert state_of(bench, 0) is EngineState.STALLED
    bench.driver.apply(0, EngineEvent.CLEARED)
    assert state_of(bench, 0) is EngineState.DRAINING
    assert not bench.driver.fleet.accepts[0]


async def test_with_all_engines_held_streams_wait_for_the_first_that_is_let_go() -> None:
    bench = Bench()
    await bench.all_up()
    bench.driver.hold(0)
    bench.driver.hold(1)
    await bench.driver.add("s", "request", 5, by_prefill=False)
    assert list(bench.driver.waiting) == ["s"]
    await bench.driver.let_go(1)
    assert [order.request_id for order in bench.ports[1].orders] == ["s@0"]


async def test_a_fleet_grows_and_shrinks_and_file_names_are_not_used_twice() -> None:
    bench = Bench(engines=1)
    await bench.all_up()
    await placed(bench)
    slot = bench.driver.add_engine()
    assert (slot, bench.driver.lives[slot].incarnation) == (1, 1)
    bench.ports.append(NotingPort("arena-1"))
    await bench.up(slot)
    await bench.driver.add("t", "request", 5, by_prefill=False)
    assert bench.driver.owned["t"].stream.engine == slot
    await bench.driver.move_streams(slot, ["t"], "scale")
    bench.driver.engine_gone(slot)
    bench.driver.remove_engine()
    assert bench.driver.fleet.engines == 1
    assert bench.driver.fleet.running_requests.tolist() == [2.0]
    assert bench.driver.lives[bench.driver.add_engine()].incarnation == 2


@pytest.mark.parametrize("seed", range(20))
async def test_tokens_come_once_and_in_order_over_random_moves_on_purpose(seed: int) -> None:
    rng, bench = random.Random(seed), Bench(engines=3)
    await bench.all_up()
    wanted = {f"s{number}": rng.randrange(3, 30) for number in range(12)}
    got: dict[str, list[int]] = {name: [] for name in wanted}
    for name in wanted:
        await bench.driver.add(name, "request", 5, by_prefill=False)
    while bench.driver.owned:
        stream = bench.driver.owned[rng.choice(list(bench.driver.owned))].stream
        assert stream.engine is not None
        late = Output(stream.request_id, [len(stream.delivered)])
        if rng.random() < 0.3:
            source = stream.engine
            bench.ports[rng.randrange(3)].broken = rng.random() < 0.2
            await bench.driver.move_streams(source, [stream.stream_id], "roll")
            for port in bench.ports:
                port.broken = False
            await bench.driver.place_waiting()
            assert bench.driver.take_outputs(source, [late]) == []
            continue
        done = "stop" if len(stream.delivered) + 1 == wanted[stream.stream_id] else None
        output = Output(stream.request_id, [len(stream.delivered)], done)
        for owned, passed in bench.driver.take_outputs(stream.engine, [output]):
            got[owned.stream.stream_id] += passed.new_token_ids
    assert got == {name: list(range(count)) for name, count in wanted.items()}
    assert bench.driver.totals.outcomes == {"finished": len(wanted)}
    assert bench.driver.fleet.running_requests.tolist() == [0.0, 0.0, 0.0]
