"""The live fleet's placement: the policy, the forecast that it reads, and the rules around both."""

import random
from typing import TYPE_CHECKING

import numpy as np

from zerolayer.core.fleet_state import HORIZON_S, FleetState, Ints
from zerolayer.core.outcome import Outcome
from zerolayer.core.ports import Clock
from zerolayer.dispatch.asked import Asked, asked
from zerolayer.dispatch.choices import Admission, PlacementChoices
from zerolayer.dispatch.drain_rule import DrainRule
from zerolayer.dispatch.heat import heat_of
from zerolayer.dispatch.outlook import Outlook
from zerolayer.dispatch.policies.base import PlacementRequest
from zerolayer.dispatch.policies.registry import policy_entry
from zerolayer.dispatch.policies.zerolayer import ZeroLayer

if TYPE_CHECKING:
    from zerolayer.stitch.driver import FleetDriver

#: How often the drain rule takes a sample, and at most the forecast is made anew.
EVERY_NS = 200_000_000
#: From one forecast to the next passes this many times what it took: 5 % of the event loop at most.
TIMES_IT_TOOK = 20
#: But no more time than it looks ahead, or one long pause of the machine would end it for minutes.
FORECAST_NS_MAX = HORIZON_S * 1_000_000_000


class Placing:
    """One per fleet; `FleetWatch` ticks it."""

    def __init__(self, choices: PlacementChoices, engines: int, clock: Clock) -> None:
        self.choices = choices
        self.policy = policy_entry(choices.policy).make(random.Random())
        self.outlook = Outlook(engines)
        self._judge = ZeroLayer()
        self._drain = DrainRule(engines, choices.drain)
        self._clock = clock
        self._forecast_due_ns = self._sample_due_ns = 0
        self._labels = choices.labels
        self._domains_in: Ints | None = None  # the array that has them; a resize makes a new one

    def tick(self, driver: "FleetDriver", now_ns: int) -> None:
        """Domains of slots that are new; the forecast and the drain rule when they are due."""
        self.set_domains(driver.fleet)
        if now_ns >= self._forecast_due_ns:
            self._forecast(driver, now_ns)
        if now_ns >= self._sample_due_ns:
            self._sample_due_ns = now_ns + EVERY_NS
            self._sample(driver.fleet)

    def _forecast(self, driver: "FleetDriver", now_ns: int) -> None:
        begun_ns = self._clock.monotonic_ns()
        self.outlook.refresh(now_ns, driver.fleet, driver.placed_streams())
        took_ns = self._clock.monotonic_ns() - begun_ns
        pause_ns = max(EVERY_NS, min(FORECAST_NS_MAX, TIMES_IT_TOOK * took_ns))
        self._forecast_due_ns = now_ns + pause_ns

    def set_domains(self, fleet: FleetState) -> None:
        """Give each slot the operator's domain, also those that were added later."""
        if self._domains_in is fleet.domain:
            return
        for slot in range(fleet.engines):
            fleet.set_domain(slot, self.choices.domain_of(slot))
        self._domains_in = fleet.domain

    def wishes(self) -> Asked | None:
        """What the request that the current task serves asks of its placement, in terms of these
        domains; None outside of one."""
        wishes = asked.get()
        if wishes is not None:
            wishes.labels = self._labels
        return wishes

    def refused_for_s(self, driver: "FleetDriver") -> float | None:
        """Seconds after which a request may be let in that must be refused now, or None.

        Asked before an answer begins, when its length is not known: the smallest request would be
        too much for each engine. A request is judged once.
        """
        wishes = asked.get()
        if self.choices.admission is Admission.QUEUE or (wishes is not None and wishes.admitted):
            return None
        request = PlacementRequest(1, int(self.outlook.expected_output()))
        wait_s = self._judge.retry_after_s(driver.fleet, request)
        if wishes is not None:
            wishes.admitted, wishes.retry_after_s = wait_s is None, wait_s
        if wait_s is not None:
            outcomes = driver.totals.outcomes
            outcomes[Outcome.REFUSED.label] = outcomes.get(Outcome.REFUSED.label, 0) + 1
        return wait_s

    def _sample(self, fleet: FleetState) -> None:
        heat = heat_of(fleet)
        gpu = np.where(fleet.gpu_busy >= 0.0, fleet.gpu_busy, heat.util)
        hot = self._drain.sample_all(gpu.tolist(), heat.mem.tolist())
        fleet.hot[:] = hot
