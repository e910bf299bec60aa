from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sim.small import KIND, Bench
from zerolayer.sim.profiles import profile_of

PROFILE = profile_of(KIND)


def step_s(decodes: int, context: int) -> float:
    return PROFILE.step_s(0, 0, decodes, context)


def test_a_request_alone_gets_its_first_token_when_its_prompt_is_computed() -> None:
    bench = Bench()
    bench.submit("a", 1000, 50)
    bench.run()
    assert bench.of("a")[0].at_s == pytest.approx(PROFILE.prefill_s(1000))


def test_a_request_alone_gets_a_token_per_step_and_its_worst_gap_is_the_longest_step() -> None:
    bench = Bench()
    bench.submit("a", 1000, 50)
    bench.run()
    assert bench.tokens("a") == 50
    steps = [step_s(1, context) for context in range(1001, 1050)]
    last = bench.of("a")[-1]
    assert last.finish_reason == "length"
    assert last.at_s == pytest.approx(PROFILE.prefill_s(1000) + sum(steps))
    assert last.gap_s == pytest.approx(max(steps))


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    bench = Bench()
    bench.submit("a", 3 * PROFILE.batch_tokens - 5, 1)
    bench.run()
    assert bench.engine.steps == 3
    assert bench.tokens("a") == 1


def test_an_arrival_waits_for_the_step_that_runs_and_not_for_the_stretch() -> None:
    bench = Bench()
    bench.submit("a", 10, 200)
    bench.run(until=0.3)
    bench.submit("b", 10, 1)
    bench.run()
    assert bench.of("b")[0].at_s < 0.3 + 3 * step_s(2, 100)


def test_a_long_prompt_beside_a_stream_is_that_streams_worst_gap() -> None:
    bench = Bench()
    bench.submit("a", 10, 100)
    bench.run(until=0.3)
    bench.submit("b", 2000, 1)
    bench.run()
    worst = max(output.gap_s for output in bench.of("a"))
    assert worst == pytest.approx(PROFILE.step_s(2000, 0, 1, 40), rel=0.01)


def test_a_freeze_is_the_worst_gap_and_the_stream_goes_on_after_it() -> None:
    bench = Bench()
    bench.submit("a", 10, 100)
    bench.run(until=0.3)
    bench.engine.freeze(bench.now, 2.0)
    bench.run()
    assert max(output.gap_s for output in bench.of("a")) == pytest.approx(2.0, abs=0.05)
    assert bench.tokens("a") == 100


def test_a_request_to_a_frozen_idle_engine_starts_when_that_wakes() -> None:
    bench = Bench()
    bench.engine.freeze(0.0, 2.0)
    bench.submit("a", 10, 1)
    assert not bench.engine.busy
    bench.engine.start(2.0)
    bench.run()
    assert bench.of("a")[0].at_s == pytest.approx(2.0 + PROFILE.prefill_s(10))


def test_letting_go_hands_out_exactly_what_was_generated_by_then() -> None:
    bench = Bench()
    bench.submit("a", 10, 500)
    first_s = PROFILE.prefill_s(10)
    bench.run(until=first_s)
    at_s = first_s + sum(step_s(1, 11 + i) for i in range(20)) + 0.001
    bench.now = at_s
    bench.engine.let_go(at_s)
    bench.collect()
    assert bench.tokens("a") == 21
    assert bench.of("a")[-1].at_s == pytest.approx(at_s - 0.001)


def test_an_aborted_stream_gives_everything_back_and_others_go_on() -> None:
    bench = Bench()
    bench.submit("a", 500, 300)
    bench.submit("b", 500, 100)
    bench.run(until=0.5)
    bench.engine.abort(["a"], bench.now)
    bench.run()
    assert bench.tokens("b") == 100
    assert bench.of("a")[-1].finish_reason is None
    assert bench.engine.kv.used == 0
    assert bench.engine.decodes == bench.engine.context == 0


def test_full_kv_pushes_out_the_newest_stream_which_still_gets_every_token() -> None:
    bench = Bench(replace(PROFILE, kv_tokens=2000))
    bench.submit("old", 900, 300)
    bench.submit("new", 900, 300)
    bench.run()
    assert bench.engine.preemptions > 0
    assert bench.tokens("old") == bench.tokens("new") == 300
    assert bench.of("old")[-1].at_s < bench.of("new")[-1].at_s


def test_more_streams_than_places_wait_in_the_order_of_arrival() -> None:
    bench = Bench(replace(PROFILE, requests_max=2))
    for name in "abcd":
        bench.submit(name, 50, 30)
    bench.run()
    ends = [bench.of(name)[-1].at_s for name in "abcd"]
    assert ends == sorted(ends)
    assert min(ends) < min(bench.of(name)[0].at_s for name in "cd")


def test_a_prompt_whose_beginning_is_held_computes_only_the_rest() -> None:
    bench = Bench(block_tokens=512)
    bench.submit("a", 1500, 1, blocks=(1, 2))
    bench.run()
    began = bench.now
    bench.submit("b", 1500, 1, blocks=(1, 2))
    bench.run()
    assert bench.engine.hit_tokens == 1024
    rest = PROFILE.step_s(1500 - 1024, 1024, 0, 0)
    assert bench.of("b")[0].at_s - began == pytest.approx(rest)


def test_a_dead_engine_loses_what_it_gets() -> None:
    bench = Bench()
    bench.submit("a", 10, 100)
    bench.engine.die()
    bench.submit("b", 10, 10)
    assert not bench.engine.busy
    assert bench.engine.kv.used == 0
    bench.engine.revive()
    bench.submit("c", 10, 10)
    bench.run()
    assert bench.tokens("c") == 10


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 150), st.floats(0.0, 0.4)),
        min_size=1, max_size=12,
    ),
    st.integers(4200, 9000),
)  # fmt: skip
def test_whatever_comes_gets_its_tokens_once_and_kv_is_empty_in_the_end(
    requests: list[tuple[int, int, float]], kv_tokens: int
) -> None:
    bench = Bench(replace(PROFILE, kv_tokens=kv_tokens, requests_max=5))
    for number, (prompt, output, pause) in enumerate(requests):
        bench.run(until=bench.now + pause)
        bench.submit(str(number), prompt, output)
    bench.run()
    for number, (_, output, _) in enumerate(requests):
        assert bench.tokens(str(number)) == output
        times = [out.at_s for out in bench.of(str(number))]
        assert times == sorted(times)
    assert bench.engine.kv.used == bench.engine.decodes == bench.engine.context == 0
