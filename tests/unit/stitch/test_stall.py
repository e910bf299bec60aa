"""What the stall detector does about faults and about load, on a virtual clock."""

import random
from collections.abc import Callable

import pytest

from tests.unit.stitch.virtual_fleet import MS, SECOND, VirtualEngine, VirtualFleet
from zerolayer.stitch.stall import (
    Clear,
    Commit,
    OverBudget,
    Phase,
    Reason,
    StallConfig,
    Starved,
    Suspect,
)

SEEDS = range(2)
Fault = Callable[[VirtualEngine], None]


def stop(engine: VirtualEngine) -> None:
    engine.stopped = True


def spin(engine: VirtualEngine) -> None:
    engine.spinning = True


def fall_asleep(engine: VirtualEngine) -> None:
    engine.asleep = True


def slow_down(engine: VirtualEngine) -> None:
    engine.slow_factor = 20.0


def sleep_between(engine: VirtualEngine) -> None:
    engine.slow_factor, engine.slow_sleeps = 20.0, True


def end(engine: VirtualEngine) -> None:
    engine.gone = True


def busy_fleet(
    seed: int, engines: int = 2, at_work: tuple[int, ...] = (0, 1), step_s: float = 0.05
) -> VirtualFleet:
    """Some 8 s of decoding on the engines `at_work`; nothing was said of stalls."""
    rng = random.Random(seed)
    fleet = VirtualFleet(
        [
            VirtualEngine(
                random.Random(rng.random()), step_s=step_s, prefill_s_per_token=0.03 * step_s
            )
            for _ in range(engines)
        ]
    )
    for slot in at_work:
        for _ in range(4):
            fleet.engines[slot].place(100, 1_000_000)
    fleet.run(8.0 + rng.random())
    assert not fleet.of(Commit), seed
    fleet.log.clear()
    return fleet


def commit_after_ms(fleet: VirtualFleet, fault: Fault, within_s: float = 15.0) -> float:
    """How long after the fault engine 0 was given up; it must be the only one."""
    began_ns = fleet.now_ns
    fault(fleet.engines[0])
    fleet.run(within_s, lambda fleet: bool(fleet.of(Commit)))
    (commit,) = fleet.of(Commit)
    assert isinstance(commit.verdict, Commit)
    assert commit.verdict.engine == 0
    return (commit.at_ns - began_ns) / MS


def reason(fleet: VirtualFleet) -> Reason:
    verdict = fleet.of(Commit)[-1].verdict
    assert isinstance(verdict, Commit)
    return verdict.reason


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step_s", [0.05, 0.005])
@pytest.mark.parametrize("at_work", [(0, 1), (0,)], ids=["both at work", "alone at work"])
@pytest.mark.parametrize(
    ("fault", "why", "limit_ms"),
    [
        (end, {Reason.GONE}, 20),
        (stop, {Reason.STOPPED}, 250),
        (fall_asleep, {Reason.IDLE}, 600),
        (spin, {Reason.NO_PROGRESS}, 1_500),
        (slow_down, {Reason.NO_PROGRESS, Reason.SLOW_STEPS}, 8_000),
        (sleep_between, {Reason.IDLE, Reason.SLOW_STEPS}, 1_500),
    ],
)
def test_a_faulty_engine_is_given_up_in_time_and_no_other_is(
    seed: int,
    step_s: float,
    at_work: tuple[int, ...],
    fault: Fault,
    why: set[Reason],
    limit_ms: float,
) -> None:
    fleet = busy_fleet(seed, at_work=at_work, step_s=step_s)
    assert commit_after_ms(fleet, fault) <= limit_ms, seed
    assert reason(fleet) in why, seed


@pytest.mark.parametrize("tick_ms", [10, 15, 20])
def test_a_stop_is_found_within_250_ms_at_any_usual_tick(tick_ms: int) -> None:
    fleet = busy_fleet(7)
    fleet.tick_ns = tick_ms * MS
    assert commit_after_ms(fleet, stop) <= 250


def noisy_load(seed: int) -> VirtualFleet:
    """Ten minutes to come: short streams and 2,000-token prompts on two engines, steps up to three
    times as long in four spells of 30 s in which a third engine starts."""
    rng = random.Random(seed)
    spells = [rng.uniform(20, 560) for _ in range(4)]

    def contention(chance: random.Random) -> Callable[[int], float]:
        def at(now_ns: int) -> float:
            if any(begin <= now_ns / SECOND < begin + 30 for begin in spells):
                return chance.uniform(1.5, 3.0)
            return chance.choice((1.0, 1.3, 2.0)) if chance.random() < 0.3 else 1.0

        return at

    engines = [
        VirtualEngine(random.Random(rng.random()), contention=contention(random.Random(seed + n)))
        for n in range(2)
    ]
    fleet = VirtualFleet(engines)
    at_s = 0.0
    while at_s < 600:
        at_s += rng.expovariate(0.8)
        prompt = 2_000 if rng.random() < 0.15 else rng.randrange(10, 300)
        stream = (rng.randrange(2), prompt, rng.randrange(5, 150))
        fleet.arrivals.append((SECOND + int(at_s * SECOND), *stream))
    return fleet


@pytest.mark.timeout(180)  # 60,000 judgements; seconds on an idle core
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_minutes_of_noisy_load_with_long_prefills_move_nothing(seed: int) -> None:
    fleet = noisy_load(seed)
    fleet.run(600)
    assert not fleet.of(Commit), seed
    assert sum(engine.done for engine in fleet.engines) > 400, seed


def test_a_fault_in_noisy_load_is_found() -> None:
    fleet = noisy_load(11)
    fleet.run(100)
    fleet.run(30, lambda fleet: bool(fleet.engines[0].streams))
    assert commit_after_ms(fleet, stop) <= 250


def test_the_first_long_prefill_of_a_new_engine_is_waited_for() -> None:
    """Its cost is a guess yet, and four times as high as the guess."""
    engines = [VirtualEngine(random.Random(n), prefill_s_per_token=0.006) for n in range(2)]
    fleet = VirtualFleet(engines)
    for engine in engines:
        engine.place(2_000, 50)
    fleet.run(60)
    assert not fleet.of(Commit)
    assert [engine.done for engine in engines] == [1, 1]


def test_a_stop_during_a_long_prefill_is_found_before_the_prefill_would_end() -> None:
    fleet = busy_fleet(3)
    fleet.engines[0].place(2_000, 10)
    fleet.run(0.3)
    assert commit_after_ms(fleet, stop) <= 250


def test_a_stop_of_50_ms_has_no_effect_on_anyone() -> None:
    fleet = busy_fleet(4)
    fleet.engines[0].stopped = True
    fleet.run(0.05)
    fleet.engines[0].stopped = False
    fleet.run(5)
    assert not fleet.of(Commit)


def test_an_idle_engine_that_is_stopped_is_only_a_suspect() -> None:
    fleet = busy_fleet(5, at_work=(1,))
    fleet.engines[0].stopped = True
    fleet.run(10)
    assert [seen.verdict for seen in fleet.of(Suspect)] == [Suspect(0, Reason.STOPPED)]
    assert not fleet.of(Commit)
    fleet.engines[0].stopped = False
    fleet.run(0.1)
    assert [seen.verdict for seen in fleet.of(Clear)] == [Clear(0)]


def test_a_suspect_whose_work_has_ended_is_trusted_again_though_nobody_sends_it_any() -> None:
    fleet = busy_fleet(10)
    engine = fleet.engines[0]
    engine.slow_factor = 8.0
    for stream in engine.streams:
        stream.output_left = 2  # of the step that runs, and of a slow one behind it
    fleet.run(5.0, lambda fleet: not engine.streams)
    fleet.run(0.5)
    assert fleet.detector.phase(0) is Phase.SUSPECT
    assert not fleet.of(Commit)
    fleet.run(1.5)
    assert fleet.detector.phase(0) is Phase.CLEAR


@pytest.mark.parametrize("starting", [False, True])
def test_what_was_slow_while_another_engine_started_counts_against_nobody(starting: bool) -> None:
    fleet = busy_fleet(11)
    fleet.engines[0].slow_factor = 12.0
    for _ in range(12):
        fleet.run(0.4)
        if starting:
            fleet.detector.restarted(1)  # so it comes up at the next tick
    assert bool(fleet.of(Commit)) is not starting


def test_work_sent_to_a_stopped_idle_engine_is_moved_at_once() -> None:
    fleet = busy_fleet(5, at_work=(1,))
    fleet.engines[0].stopped = True
    fleet.run(1)
    fleet.engines[0].place(100, 10)
    fleet.run(1, lambda fleet: bool(fleet.of(Commit)))
    assert reason(fleet) is Reason.STOPPED


def test_a_request_that_an_idle_engine_never_starts_counts_from_its_sending() -> None:
    fleet = busy_fleet(6, at_work=(1,))
    fleet.run(30)
    fleet.engines[0].place(50, 10)
    assert commit_after_ms(fleet, fall_asleep, within_s=5) <= 600


def test_a_starved_box_moves_nothing_and_says_so_once() -> None:
    fleet = busy_fleet(1)
    for engine in fleet.engines:
        engine.hungry = True
    fleet.run(10)
    assert not fleet.of(Commit)
    assert [seen.verdict for seen in fleet.of(Starved)] == [Starved((0, 1))]
    for engine in fleet.engines:
        engine.hungry = False
    fleet.run(5)
    assert not fleet.of(Commit)
    assert {fleet.detector.phase(slot) for slot in (0, 1)} == {Phase.CLEAR}


@pytest.mark.parametrize("engines", [1, 2])
def test_one_engine_at_work_that_wants_a_core_and_gets_none_is_starved(engines: int) -> None:
    fleet = busy_fleet(1, engines=engines, at_work=(0,))
    fleet.engines[0].hungry = True
    fleet.run(10)
    assert not fleet.of(Commit)
    assert [seen.verdict for seen in fleet.of(Starved)] == [Starved((0,))]


@pytest.mark.parametrize("fault", [spin, slow_down])
def test_a_single_live_engine_is_not_given_up_without_hard_evidence(fault: Fault) -> None:
    fleet = busy_fleet(2, engines=1, at_work=(0,))
    fault(fleet.engines[0])
    fleet.run(20)
    assert not fleet.of(Commit)
    assert fleet.of(Starved)


@pytest.mark.parametrize("fault", [stop, end, fall_asleep])
def test_hard_evidence_holds_for_a_single_live_engine_too(fault: Fault) -> None:
    fleet = busy_fleet(2, engines=1, at_work=(0,))
    assert commit_after_ms(fleet, fault) <= 600


@pytest.mark.parametrize("told", [True, False], ids=["its waits are told", "they are not"])
def test_an_engine_whose_cores_others_have_is_not_stalled(told: bool) -> None:
    """Seven programs on each of its cores, none on those of the engine beside it."""
    fleet = busy_fleet(2)
    engine = fleet.engines[0]
    engine.crowd, engine.waits_told = 7.0, told
    fleet.run(20)
    assert bool(fleet.of(Commit)) is not told


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "limit_ms"), [(end, 20), (stop, 250), (fall_asleep, 600), (spin, 6_000)]
)
def test_a_fault_on_crowded_cores_is_found_and_only_a_spin_takes_longer(
    seed: int, fault: Fault, limit_ms: float
) -> None:
    fleet = busy_fleet(seed)
    for engine in fleet.engines:
        engine.crowd = 3.0
    fleet.run(3)
    assert commit_after_ms(fleet, fault) <= limit_ms, seed


def test_an_engine_that_gets_next_to_nothing_is_given_up_in_the_end() -> None:
    fleet = busy_fleet(2)
    fleet.engines[0].crowd = 1_000.0
    fleet.run(60, lambda fleet: bool(fleet.of(Commit)))
    assert reason(fleet) is Reason.NO_PROGRESS


def test_a_stopped_engine_on_a_starved_box_is_moved_and_the_starved_one_is_not() -> None:
    fleet = busy_fleet(2)
    fleet.engines[0].hungry = fleet.engines[1].hungry = True
    fleet.run(1)
    assert commit_after_ms(fleet, stop) <= 250
    fleet.run(5)
    assert len(fleet.of(Commit)) == 1


def test_a_detector_that_slept_itself_holds_it_against_nobody() -> None:
    """A virtual machine is paused for 3 s: every engine's step seems to have taken that long."""
    fleet = busy_fleet(3)
    for _ in range(5):
        for engine in fleet.engines:
            engine.asleep = True
            engine.advance(fleet.now_ns + 3 * SECOND)
            engine.asleep = False
        fleet.tick(3 * SECOND)
        fleet.run(1)
    assert not fleet.of(Commit)


def test_a_late_tick_delays_the_judgement_of_a_hung_engine_but_does_not_prevent_it() -> None:
    fleet = busy_fleet(3)
    fleet.engines[0].spinning = True
    fleet.tick(2 * SECOND)
    assert commit_after_ms(fleet, spin) <= 1_500


def probe(fleet: VirtualFleet, slot: int) -> None:
    """A round trip through the queue: one token, and the report that it came back."""
    engine = fleet.engines[slot]
    done = engine.done
    engine.place(1, 1)
    fleet.run(30, lambda fleet: engine.done > done)
    fleet.detector.proved(slot, fleet.now_ns)


def stall_and_wake(fleet: VirtualFleet) -> None:
    fleet.log.clear()
    fleet.engines[0].place(10, 1_000)
    commit_after_ms(fleet, stop)
    fleet.engines[0].streams.clear()  # its streams were moved
    fleet.run(1)
    fleet.engines[0].stopped = False


def test_a_stalled_engine_returns_only_after_a_round_trip_and_steps_in_time() -> None:
    fleet = busy_fleet(9)
    stall_and_wake(fleet)
    fleet.run(60)
    assert not fleet.of(Clear), "woke up, proved nothing"
    assert fleet.detector.phase(0) is Phase.COMMITTED
    probe(fleet, 0)
    fleet.run(1)
    assert [seen.verdict for seen in fleet.of(Clear)] == [Clear(0)]


def test_a_stalled_engine_that_counts_as_owing_returns_while_it_is_idle() -> None:
    """Its watchman wants a probe's step from it all the time; between two of them it owes none."""
    fleet = busy_fleet(9)
    stall_and_wake(fleet)
    fleet.always_owing = frozenset({0})
    probe(fleet, 0)
    fleet.run(5)
    assert [seen.verdict for seen in fleet.of(Clear)] == [Clear(0)]


def test_a_report_without_a_step_proves_nothing() -> None:
    fleet = busy_fleet(9, at_work=(1,))
    fleet.engines[0].place(10, 1_000)
    commit_after_ms(fleet, stop)
    fleet.detector.proved(0, fleet.now_ns + 1)
    fleet.run(10)
    assert fleet.detector.phase(0) is Phase.COMMITTED


def test_an_engine_that_flaps_is_kept_out_twice_as_long_each_time() -> None:
    fleet = busy_fleet(9)
    holds = []
    for _ in range(4):
        stall_and_wake(fleet)
        stalled_ns = fleet.of(Commit)[-1].at_ns
        while not fleet.of(Clear):
            probe(fleet, 0)
        holds.append(round((fleet.of(Clear)[-1].at_ns - stalled_ns) / SECOND))
    assert holds[1:] == [2, 4, 8]
    assert fleet.detector.hold_s(0) == 8.0
    fleet.run(301)
    stall_and_wake(fleet)
    assert fleet.detector.hold_s(0) == 1.0


def test_an_engine_that_is_still_slow_is_not_readmitted_by_its_round_trips() -> None:
    fleet = busy_fleet(9)
    commit_after_ms(fleet, slow_down)
    fleet.engines[0].streams.clear()
    for _ in range(10):
        probe(fleet, 0)
    assert fleet.detector.phase(0) is Phase.COMMITTED
    fleet.engines[0].slow_factor = 1.0
    probe(fleet, 0)
    probe(fleet, 0)
    assert fleet.detector.phase(0) is Phase.CLEAR


def test_a_new_process_in_the_slot_starts_with_a_clean_record() -> None:
    fleet = busy_fleet(9)
    commit_after_ms(fleet, end)
    fleet.run(5)
    assert len(fleet.of(Commit)) == 1, "said once"
    fleet.engines[0] = VirtualEngine(random.Random(5), now_ns=fleet.now_ns)
    fleet.detector.restarted(0)
    assert fleet.detector.phase(0) is Phase.CLEAR
    fleet.engines[0].place(100, 1_000)
    fleet.run(5)
    assert len(fleet.of(Commit)) == 1


def test_moves_over_the_budget_wait_and_a_lost_process_does_not() -> None:
    fleet = busy_fleet(1, engines=4, at_work=(0, 1, 2, 3))
    fleet.detector.config = StallConfig(moves_per_minute_max=6)
    fleet.engines[0].stopped = True
    fleet.run(1)
    fleet.engines[1].stopped = True
    fleet.engines[2].gone = True
    fleet.run(5)
    assert [seen.verdict for seen in fleet.of(OverBudget)] == [OverBudget(1, Reason.STOPPED)]
    moved = [seen.verdict.engine for seen in fleet.of(Commit)]  # type: ignore[union-attr]
    assert moved == [0, 2]
    fleet.run(61)
    assert len(fleet.of(Commit)) == 3, "the minute is over"


def test_settings_hold_from_the_next_tick_on() -> None:
    fleet = busy_fleet(1)
    fleet.detector.config = StallConfig(threshold_ms=1_000)
    assert commit_after_ms(fleet, stop) > 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold_ms", 0.0),
        ("threshold_ms", float("nan")),
        ("consecutive_failures", 0),
        ("adaptive_factor", 0.5),
        ("moves_per_minute_max", -1),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        StallConfig(**{field: value})  # type: ignore[arg-type]


def test_the_same_load_gets_the_same_verdicts() -> None:
    logs = []
    for _ in range(2):
        fleet = noisy_load(5)
        fleet.run(60)
        fleet.engines[1].spinning = True
        fleet.run(10)
        logs.append(fleet.log)
    assert logs[0] == logs[1]
    assert logs[0]
