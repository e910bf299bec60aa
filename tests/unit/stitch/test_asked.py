from tests.unit.stitch.noting_engines import Bench
from zerolayer.core.engine_state import EngineEvent
from zerolayer.core.fleet_state import FleetState
from zerolayer.dispatch.asked import Asked
from zerolayer.dispatch.policies import LeastRequests
from zerolayer.dispatch.policies.base import Decision, PlacementRequest, Preference
from zerolayer.dispatch.preference import Hints

THRIFTY = Hints(Preference.COST_OPTIMAL, contiguous=True)


class Noting:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.inner = LeastRequests()
        self.asked: list[PlacementRequest] = []

    def choose(
        self, fleet: FleetState, request: PlacementRequest, exclude: frozenset[int]
    ) -> Decision | None:
        self.asked.append(request)
        return self.inner.choose(fleet, request, exclude)


def noting_bench() -> tuple[Bench, Noting]:
    bench, policy = Bench(), Noting()
    bench.driver._policy = policy
    return bench, policy


async def test_what_a_client_asked_holds_for_each_placement_of_its_stream() -> None:
    bench, policy = noting_bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, False, Asked(THRIFTY, explain=True))
    home = bench.driver.owned["s"].stream.engine
    assert home is not None
    bench.emit(home, request_id="s@0", new_token_ids=[1])
    bench.driver.apply(home, EngineEvent.STALLED)
    await bench.driver.move_all(home, "stalled", reachable=True)
    assert len(policy.asked) == 2
    for request in policy.asked:
        assert request.preference is Preference.COST_OPTIMAL
        assert request.contiguous
        assert request.explain


async def test_the_first_choice_is_what_the_client_is_told() -> None:
    bench, _ = noting_bench()
    wishes = Asked(explain=True)
    await bench.driver.add("s", "request", 5, False, wishes)
    before = wishes.decision
    assert before is None, "no engine was there"
    await bench.all_up()
    home = bench.driver.owned["s"].stream.engine
    assert wishes.decision is not None
    assert wishes.decision.engine == home
    await bench.driver.add("t", "request", 5, False, wishes)  # a second answer of the same request
    assert wishes.decision.engine == home


async def test_a_stream_that_nobody_asked_anything_for_is_placed_as_ever() -> None:
    bench, policy = noting_bench()
    await bench.all_up()
    await bench.driver.add("s", "request", 5, False)
    assert policy.asked[0].preference is Preference.BALANCED
    assert not policy.asked[0].explain
